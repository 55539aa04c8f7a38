"""Peak memory of this rank."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30
_STATUS = Path("/proc/self/status")


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
