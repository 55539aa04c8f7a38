"""Where a rank computes: which GPU is its own, how many cores it may use; on the CPU, freed memory stays with the process.

A step frees its activations and the next asks for as much. glibc gives the top of its heap back to the system as soon as
twice its largest freed block is unused there, so every step's activations came as new pages, which the system fills with
zeros: 22,000 page faults a step of the quick start, 4 % of its CPU time. The peak is the same.
"""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 1 << 30
_OWN_MAPPING_BYTES = (
    32 << 20
)  # the largest that glibc accepts: a larger block is its own mapping, and given back when freed


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> bool:
    """Let this process's allocator keep up to 1 GiB that is free at the top of its heap; whether it is one that can."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; musl has none
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES))


def device_index(local_rank: int, visible: int) -> int:
    """The number of this rank's GPU among those that its process sees.

    Args:
        local_rank: The rank's number on its machine.
        visible: How many GPUs the process sees. With one for each process, as ``srun --gpus-per-task=1`` gives, it is 0.

    Raises:
        ValueError: There are fewer GPUs than ranks, but more than one.
    """
    if visible == 1 or local_rank < visible:
        return local_rank % visible
    raise ValueError(
        f"rank {local_rank} of this machine has no GPU: its process sees {visible}, and two ranks cannot share one. Start "
        "as many ranks per machine as there are GPUs, or give each process exactly one (CUDA_VISIBLE_DEVICES, "
        "--gpus-per-task=1)."
    )
