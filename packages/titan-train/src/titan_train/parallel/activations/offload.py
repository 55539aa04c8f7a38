"""Activations in host memory between forward and backward, moved by a stream of their own beside the computation.

    forward of block i     what it saves is copied to pinned host memory while later blocks compute
    backward of block i    waits for its tensors, and starts those of block i - 1

so the GPU holds the activations of about two blocks. Small tensors stay, and so do parameters: which tensors move follows
from their size alone. A tensor that several operators save (the input of several linears) moves once.

All copies are on one stream, so they happen in the order of their launch: a tensor's way back follows its way there, and
a pinned buffer whose tensor is back can be given to the next. The pool grows to one step's need and is then reused.

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
        """Start the copy to the host; the tensor may be freed from now on."""
        ...

    def back(self, held: Any) -> Any:
        """Start the copy back, of what `away` gave."""
        ...

    def ready(self, arriving: Any) -> Tensor:
        """The tensor, of what `back` gave; what is launched from now on waits for it."""
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
        tensor.record_stream(self._stream)
        return host

    def back(self, held: Tensor) -> "tuple[Tensor, torch.cuda.Event]":
        """See `HostCopies`."""
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            tensor = held.to(self._device, non_blocking=True)
            arrived.record(self._stream)
        self._free.setdefault((held.shape, held.dtype), []).append(held)  # the next copy into it comes after this one
        return tensor, arrived

    def ready(self, arriving: "tuple[Tensor, torch.cuda.Event]") -> Tensor:
        """See `HostCopies`."""
        tensor, arrived = arriving
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrived)
        tensor.record_stream(stream)
        return tensor


def offload_activations(blocks: Sequence[nn.Module], copies_for: CopiesFor | None = None) -> None:
    """Make blocks move what they save for backward; in place, inside ``forward``.

    Args:
        blocks: In the order of forward.
        copies_for: From a tensor to what moves it, None for one that stays; by default CUDA tensors move.
    """
    copies_for = copies_for or _cuda_copies()
    latest: dict[int, _Saved] = {}
    for number, block in enumerate(blocks):
        _offload(block, number, latest, copies_for)


def _cuda_copies() -> CopiesFor:
    of_device = functools.cache(StreamCopies)

    def copies_for(tensor: Tensor) -> HostCopies | None:
        return of_device(tensor.device) if tensor.is_cuda else None

    return copies_for


def _offload(block: nn.Module, number: int, latest: "dict[int, _Saved]", copies_for: CopiesFor) -> None:
    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        saved = _Saved(block, copies_for, before=latest.pop(number - 1, None))
        latest[number] = saved
        with saved_tensors_hooks(saved.pack, saved.unpack):
            result = inner(*args, **kwargs)
        saved.end_forward()
        return result

    wrap_forward(block, forward)


class _Held:
    """One tensor that is away, on its way back, or back."""

    __slots__ = ("arriving", "copies", "host")

    def __init__(self, copies: HostCopies, tensor: Tensor) -> None:
        self.copies = copies
        self.host: Any = copies.away(tensor)
        self.arriving: Any = None

    def fetch(self) -> None:
        if self.arriving is None:
            self.arriving, self.host = self.copies.back(self.host), None


class _Saved:
    """What one forward of one block saved."""

    def __init__(self, block: nn.Module, copies_for: CopiesFor, before: "_Saved | None") -> None:
        self._copies_for = copies_for
        self._block, self._stay = block, set[int]()
        self._before = before
        self._held: list[_Held] = []
        # by address: the tensors are kept until forward ends, so that no other can come to lie where one was
        self._seen: dict[Any, tuple[Tensor, _Held]] = {}

    def end_forward(self) -> None:
        """Nothing more is saved."""
        self._seen.clear()

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
            self._seen[key] = (tensor, held)
        return self._seen[key][1]

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
        held = cast(_Held, packed)
        return held.copies.ready(held.arriving)

    def _fetch(self) -> None:
        for held in self._held:
            held.fetch()
        self._held = []
