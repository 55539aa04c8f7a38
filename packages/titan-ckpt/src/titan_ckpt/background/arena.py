"""The staging memory of a save: one anonymous file per rank, which the saver process maps too.

It is as large as what the rank writes, and is kept from save to save. Staging is then a plain memory copy. A new buffer
would cost ten times as much in page faults. CUDA tensors are copied into page-locked memory on a separate stream, behind
the kernels that were queued before the save. The host waits once, for all copies.
"""

import contextlib
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.format.names import Entry
from titan_ckpt.state.dtypes import DTYPES

_log = logging.getLogger("titan_ckpt")

# New pages are touched in pieces of this size.
_TOUCH_BYTES = 64 << 20


class Arena:
    """Staging memory, shared with the saver process through ``fd``."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.fd = -1
        """The memory file; another one after `reserve` has grown it."""
        self.pinned = False
        """Whether CUDA knows the pages as locked."""
        self._streams: dict[torch.device, Any] = {}

    def reserve(self, nbytes: int) -> bool:
        """Take memory for ``nbytes``, with its pages; True if the file is new."""
        if self.memory.numel() >= nbytes:
            return False
        self.close()
        self.fd = os.memfd_create("titan-ckpt-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self.memory = torch.frombuffer(mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED), dtype=torch.uint8)
        # Not MAP_POPULATE: Python holds its lock in mmap; torch releases it while it writes.
        for part in self.memory.split(_TOUCH_BYTES):
            part.zero_()
        return True

    def targets(self, places: Sequence[tuple[int, int]], entries: Sequence[Entry]) -> list[Tensor]:
        """The arena's tensors to stage into; ``places`` has the first byte and size of each."""
        return [
            self.memory[start : start + size].view(DTYPES[entry.dtype]).view(entry.shape)
            for (start, size), entry in zip(places, entries, strict=True)
        ]

    @torch.no_grad()
    def stage(self, targets: Sequence[Tensor], views: Sequence[Tensor], ready: Sequence[Any] = ()) -> None:
        """Copy tensors of any device into the arena. When this returns, the tensors may change.

        ``ready`` holds CUDA events (`staging_point`). They are waited for before CUDA tensors are read, and before this
        returns.
        """
        streams: set[Any] = set()
        for into, view in zip(targets, views, strict=True):
            if not view.is_cuda:
                into.copy_(view)
                continue
            stream = self._stream(view.device)
            if stream not in streams:
                streams.add(stream)
                for event in ready:
                    stream.wait_event(event)
            # A thread that `overlap` starts is on the first device: leaving the stream's block alone would open a context there.
            with torch.cuda.device(view.device), torch.cuda.stream(stream):
                into.copy_(view, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        for event in ready:
            event.synchronize()

    @torch.no_grad()
    def stage_in_order(self, targets: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        """Copy tensors into the arena before they can change, without waiting for CUDA.

        Copies of CUDA tensors are queued on the current stream. Record a `staging_point` after them, and let `stage` wait
        for it.
        """
        self.lock_pages({view.device for view in views if view.is_cuda})
        for into, view in zip(targets, views, strict=True):
            if not view.is_cuda:
                into.copy_(view)
                continue
            with torch.cuda.device(view.device):
                into.copy_(view, non_blocking=self.pinned)

    def lock_pages(self, devices: Iterable[torch.device]) -> None:
        """Lock the pages and make the streams now, instead of at the first copy from these CUDA devices."""
        for device in devices:
            self._stream(device)

    def close(self) -> None:
        """Free the memory."""
        if self.pinned:
            with torch.cuda.device(next(iter(self._streams))):
                torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())  # type: ignore[attr-defined]
            self.pinned = False
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _stream(self, device: torch.device) -> Any:
        if not self.pinned and self.memory.numel():
            with torch.cuda.device(device):  # a new thread is on the first device and would open a context there
                result = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0)  # type: ignore[attr-defined]
            self.pinned = int(result) == 0
            if not self.pinned:
                _forget_error(device)
                _log.warning("the staging memory could not be page-locked (CUDA error %s): staging is slower", result)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error in this thread, which the next kernel's launch would raise as its own.

    torch has no binding of ``cudaGetLastError``; the check behind any kernel's launch reads and clears it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def staging_point(views: Sequence[Tensor]) -> list[Any]:
    """CUDA events after all work that is queued on this thread's streams of the tensors' devices."""
    devices = dict.fromkeys(view.device for view in views if view.is_cuda)
    return [torch.cuda.current_stream(device).record_event() for device in devices]
