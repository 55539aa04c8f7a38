"""Put a host batch on its device: nothing to do on CPU, pinned memory and a stream of its own on CUDA.

A pageable copy stalls the host until it is done, and pinning each batch costs more than copying it. So a ring of
pinned buffers is made once; a buffer is filled again only after the event behind its last copy has passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_train.data.loader.source import HostMicrobatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch on its way; `HostToDevice.receive` makes it safe to use."""

    batch: Any
    tensors: Sequence[Any]
    copied: "torch.cuda.Event | None"


class HostToDevice:
    """Send batches to one device.

    Args:
        device: cpu or a CUDA device.
        slots: Pinned buffers: how many copies may be under way or waiting.
    """

    def __init__(self, device: "str | torch.device", slots: int) -> None:
        import torch

        self.device = torch.device(device)
        if str(self.device) == "cuda":
            # The thread that sends has a current device of its own, which is not the one this thread chose.
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._slots: list[_PinnedSlot] = []
        self._num_slots = slots
        self._next = 0
        self._stream: Any = None

    def send(self, host: HostMicrobatch) -> SentBatch:
        """Start the copy; called by the thread that makes batches."""
        if self.device.type != "cuda":
            moved = [_moved(tensor, self.device) for tensor in host.tensors()]
            return SentBatch(host.on_device(moved), moved, None)
        import torch

        # A new thread is on device 0, and leaving a stream's block would open a context there: 0.5 GB for each rank.
        with torch.cuda.device(self.device):
            return self._copy(host)

    def _copy(self, host: HostMicrobatch) -> SentBatch:
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
            self._slots = [_PinnedSlot() for _ in range(self._num_slots)]
        slot = self._slots[self._next]
        self._next = (self._next + 1) % self._num_slots
        staged = slot.stage(host.tensors())
        with torch.cuda.stream(self._stream):
            moved = [_moved(tensor, self.device) for tensor in staged]
            slot.copied = torch.cuda.Event()
            slot.copied.record(self._stream)
        return SentBatch(host.on_device(moved), moved, slot.copied)

    def receive(self, sent: SentBatch) -> None:
        """Make the current stream wait for the copy, and the allocator for the current stream."""
        if sent.copied is None:
            return
        import torch

        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(sent.copied)
        for tensor in sent.tensors:
            if tensor is not None:
                tensor.record_stream(stream)


class _PinnedSlot:
    """Pinned copies of one batch's tensors, kept while their shapes stay the same."""

    def __init__(self) -> None:
        self.copied: Any = None
        self._buffers: list[Any] = []

    def stage(self, tensors: Sequence[Any]) -> list[Any]:
        if self.copied is not None:
            self.copied.synchronize()
        if [_shape(t) for t in tensors] != [_shape(b) for b in self._buffers]:
            self._buffers = [None if t is None else t.new_empty(t.shape, pin_memory=True) for t in tensors]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            if tensor is not None:
                buffer.copy_(tensor)
        return self._buffers


def _moved(tensor: Any, device: "torch.device") -> Any:
    # On CPU nothing moves; from pinned memory to CUDA the copy runs beside the host.
    return None if tensor is None else tensor.to(device, non_blocking=True)


def _shape(tensor: Any) -> Any:
    return None if tensor is None else tuple(tensor.shape)
