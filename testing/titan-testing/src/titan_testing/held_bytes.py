"""Bytes that a piece of code leaves allocated, as the profiler counts them on a CPU."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def held_bytes(run: Callable[[], T]) -> tuple[T, int]:
    """Run a function under the profiler: what it returned, and bytes allocated less bytes freed meanwhile.

    Garbage is collected before, and once more at the end: an autograd graph in a cycle, left by an earlier test, would be
    freed at a random moment and taken off this count.
    """
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
        gc.collect()
    return result, sum(event.self_cpu_memory_usage for event in profile.key_averages())
