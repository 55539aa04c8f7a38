"""Timing that the GPU scripts of this folder share: medians of whole calls, host time included."""

import statistics
import time
from collections.abc import Callable

import torch


def median_ms(run: Callable[[], object], device: torch.device, repeats: int = 10, inner: int = 5) -> float:
    """Milliseconds of one call: the median over ``repeats`` of ``inner`` calls in a row, nothing queued before them.

    Calls follow each other as they do in training, so a call that keeps the host busy for longer than its kernels take
    is as slow here as it is there.
    """
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for _ in range(inner):
                run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / inner)
        else:
            began = time.perf_counter()
            for _ in range(inner):
                run()
            times.append((time.perf_counter() - began) * 1e3 / inner)
    return statistics.median(times)


def host_ms(run: Callable[[], object], device: torch.device, calls: int = 20) -> float:
    """Milliseconds that the host is busy for one call, while the device is far behind."""
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    taken = (time.perf_counter() - began) * 1e3 / calls
    if device.type == "cuda":
        torch.cuda.synchronize()
    return taken


def peak_gib(run: Callable[[], object], device: torch.device) -> float:
    """GiB that the allocator handed out at most during a call, beyond what was there; 0 on a CPU."""
    if device.type != "cuda":
        run()
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
