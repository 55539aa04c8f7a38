"""Activations in host memory between forward and backward, moved by a stream of their own beside the computation.

    forward of block i     what it saves is copied to pinned host memory, while it and block i + 1 compute
    end of block i + 1     waits for these copies: from here on that memory is free
    backward of block i    waits for its tensors, and starts those of block i - 1

so the GPU holds the activations of two blocks, whichever is faster, copies or computation. Small tensors stay, and so do
parameters: which tensors move follows from their size alone. A tensor that several operators save (the input of several
linears) moves once.

All copies are on one stream, so they happen in the order of their launch: a tensor's way back follows its way there, and
a pinned buffer whose tensor is back can be given to the next. The pool grows to one step's need and is then reused. On the
GPU both ways use memory of the computation's stream, which hands out at once what is freed. So a tensor is kept until that
stream has waited for its copy. With `record_stream` instead the computation would never wait, and memory grow with its lead.

Limits: a backward runs once; with ``retain_graph`` keep offload off. Only CUDA tensors move.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from titan_train.parallel.structure import wrap_forward

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: 1 MiB takes about 20 µs over PCIe 5, no more than the launches around it."""


class HostCopies(Protocol):
    """Moves tensors to the host and back."""

    def away(self, tensor: Tensor) -> Any:
        """Start the copy to the host; the tensor's memory must be kept until `wait`."""
        ...

    def back(self, held: Any) -> Tensor:
        """Start the copy back, of what `away` gave; the tensor must be kept and not be read until `wait`."""
        ...

    def mark(self) -> Any:
        """Stands for all copies that were started before."""
        ...

    def wait(self, mark: Any) -> None:
        """Make what is launched from now on wait for the copies before a mark."""
        ...


CopiesFor = Callable[[Tensor], HostCopies | None]


class StreamCopies:
    """`HostCopies` of one CUDA device, on one stream, through pinned buffers that are reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def away(self, tensor: Tensor) -> Tensor:
        """See `HostCopies`."""
        free = self._free.get((tensor.shape, tensor.dtype))
        host = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        return host

    def back(self, held: Tensor) -> Tensor:
        """See `HostCopies`."""
        tensor = torch.empty_like(held, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still read what lay there before
        with torch.cuda.stream(self._stream):
            tensor.copy_(held, non_blocking=True)
        self._free.setdefault((held.shape, held.dtype), []).append(held)  # the next copy into it comes after this one
        return tensor

    def mark(self) -> Any:
        """See `HostCopies`."""
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """See `HostCopies`."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def offload_activations(blocks: Sequence[nn.Module], copies_for: CopiesFor | None = None) -> None:
    """Make blocks move what they save for backward; in place, inside ``forward``.

    Args:
        blocks: In the order of forward.
        copies_for: From a tensor to what moves it, None for one that stays; by default CUDA tensors move.
    """
    copies_for = copies_for or _cuda_copies()
    latest: dict[int, _Saved] = {}
    under_way: set[_Saved] = set()
    for number, block in enumerate(blocks):
        _offload(block, number, latest, under_way, copies_for)


def _cuda_copies() -> CopiesFor:
    of_device = functools.cache(StreamCopies)

    def copies_for(tensor: Tensor) -> HostCopies | None:
        return of_device(tensor.device) if tensor.is_cuda else None

    return copies_for


def _offload(
    block: nn.Module, number: int, latest: "dict[int, _Saved]", under_way: "set[_Saved]", copies_for: CopiesFor
) -> None:
    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        saved = _Saved(block, copies_for, before=latest.pop(number - 1, None), under_way=under_way)
        latest[number] = saved
        with saved_tensors_hooks(saved.pack, saved.unpack):
            result = inner(*args, **kwargs)
        saved.end_forward()
        return result

    wrap_forward(block, forward)


class _Held:
    """One tensor that is away, on its way back, or back."""

    __slots__ = ("copies", "host", "tensor")

    def __init__(self, copies: HostCopies, tensor: Tensor) -> None:
        self.copies = copies
        self.host: Any = copies.away(tensor)
        self.tensor: Tensor | None = None

    def fetch(self) -> Tensor:
        self.tensor, self.host = self.copies.back(self.host), None
        return self.tensor


class _Saved:
    """What one forward of one block saved."""

    def __init__(
        self, block: nn.Module, copies_for: CopiesFor, before: "_Saved | None", under_way: "set[_Saved]"
    ) -> None:
        self._copies_for = copies_for
        self._block, self._stay = block, set[int]()
        self._before = before
        self._under_way = under_way
        """Whose copies, of all blocks, the computation has not waited for."""
        self._held: list[_Held] = []
        self._kept: list[Any] = []
        """The memory that copies under way read or write; storages, for a tensor would keep the graph that it is saved in."""
        self._marks: list[tuple[HostCopies, Any]] = []
        # by address: what is kept until forward ends, so that no other can come to lie where one was
        self._seen: dict[Any, _Held] = {}

    def end_forward(self) -> None:
        """Nothing more is saved. Wait for the copies of the block before, so that the device holds two blocks at most."""
        self._seen.clear()
        for other in list(self._under_way):
            other.wait()
        self._mark()

    def wait(self) -> None:
        """Make the computation wait for the copies under way; what only they needed is freed."""
        for copies, mark in self._marks:
            copies.wait(mark)
        self._marks, self._kept = [], []
        self._under_way.discard(self)

    def _mark(self) -> None:
        self._marks = [(copies, copies.mark()) for copies in {held.copies for held in self._held}]
        self._under_way.add(self)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of ``tensor``."""
        copies = self._copies_for(tensor)
        small = tensor.numel() * tensor.element_size() < LEAST_BYTES
        plain = type(tensor) in (Tensor, nn.Parameter)  # others have no storage, such as a weight gathered in float8
        if copies is None or small or not plain or self._is_parameter(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)  # pyright: ignore[reportPrivateUsage]
        if key not in self._seen:
            held = _Held(copies, tensor)
            self._held.append(held)
            self._kept.append(tensor.untyped_storage())
            self._seen[key] = held
        return self._seen[key]

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Whether it is one of the block's, or a view of one. Asked late: experts are gathered after the block is entered."""
        at = tensor.untyped_storage().data_ptr()
        if at not in self._stay:
            whole = (p.data for p in self._block.parameters())
            self._stay |= {p.untyped_storage().data_ptr() for p in whole if type(p) is Tensor}
        return at in self._stay

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again; the first of a block starts the copies of its others and of the block before."""
        if isinstance(packed, Tensor):
            return packed
        self._fetch()
        if self._before is not None:
            self._before._fetch()
            self._before = None
        self.wait()
        return cast(Tensor, cast(_Held, packed).tensor)

    def _fetch(self) -> None:
        """Start the copies back, once. What nothing unpacks is kept as well until the computation has waited for it."""
        if self._held:
            self.wait()
            self._kept = [held.fetch().untyped_storage() for held in self._held]
            self._mark()
            self._held = []
