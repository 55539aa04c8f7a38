"""Peak memory of this rank."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30
_STATUS = Path("/proc/self/status")
_PAGES = Path("/proc/self/statm")


def peak_memory_gib(device: "torch.device") -> float:
    """The most memory this rank has held so far, in GiB.

    On an accelerator: the most the allocator had handed out (``max_memory_allocated``), since the process started or
    its peak statistics were reset. On CPU: the resident set's high-water mark of the whole process, so it includes the
    interpreter and torch itself.
    """
    if device.type == "cpu":
        return _resident_high_water_bytes() / GIB
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return torch.accelerator.max_memory_allocated(device) / GIB


def memory_in_use(device: "torch.device") -> dict[str, float]:
    """Memory of this rank now: ``active_gib``, ``reserved_gib``, ``peak_gib``, and the allocator's ``retries``.

    On an accelerator: what tensors hold, what the allocator holds for them, the most that tensors have held, and how often
    the allocator had to give its cache back to go on. On CPU: the resident set and its high-water mark; nothing is reserved.
    """
    if device.type == "cuda":
        import torch

        found = torch.cuda.memory_stats(device)
        keys = {"active_gib": "active_bytes.all.current", "reserved_gib": "reserved_bytes.all.current"}
        values = {name: found.get(key, 0) / GIB for name, key in keys.items()}
        return values | {"peak_gib": peak_memory_gib(device), "retries": float(found.get("num_alloc_retries", 0))}
    try:
        resident = int(_PAGES.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):  # not on Linux
        return {"peak_gib": peak_memory_gib(device)}
    return {"active_gib": resident * os.sysconf("SC_PAGE_SIZE") / GIB, "peak_gib": peak_memory_gib(device)}


def _resident_high_water_bytes() -> int:
    import resource  # not on Windows

    # getrusage's mark survives exec: a process started by a large one would report its parent's. Linux also has
    # the mark of this address space alone.
    try:
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes
