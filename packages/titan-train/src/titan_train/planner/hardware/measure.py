"""Measure the machine at hand, and write its hardware file: product rates, copies, the host link, one link class,
and the elementwise kernels.

Each figure is the best of a few repetitions: a machine file states what the machine can do, and efficiencies are the
constants' part. Several ranks (`titan-train doctor --bench` under torchrun) also measure all-gathers of two sizes, from
which latency and bandwidth follow; alone, the links of a shipped file of the same kind are kept.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SIZES = {"cpu": 1024, "cuda": 8192}


def measure_machine(device: str = "auto") -> dict[str, Any]:
    """The table of a hardware file."""
    import torch

    from titan_train.kernels.measure import measure_kernels

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    size = _SIZES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    flops = 2 * size**3 / _best(lambda: a @ b, device)
    # a copy reads and writes, 256 MiB at least so that no cache holds it
    source = torch.empty(2**26, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * 4 * 2**26 / _best(lambda: target.copy_(source), device)
    if device == "cuda":
        host = torch.empty(2**26, pin_memory=True)
        host_rate = 4 * 2**26 / _best(lambda: host.copy_(source, non_blocking=True), device)
        name, capacity = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 2**30
    else:
        name, capacity, host_rate = "CPU", _host_gib(), bandwidth / 2
    links = _links(device)
    return {
        "name": name.lower().replace(" ", "_"),
        "title": name,
        "source": "measured by titan-train doctor --bench",
        "verified": True,
        "compute": {"bf16_tflops": flops / 1e12, "fp8_tflops": 0.0},
        "memory": {"capacity_gib": capacity, "bandwidth_tb_s": bandwidth / 1e12, "host_gb_s": host_rate / 1e9},
        "links": links,
        "kernels": measure_kernels(device),
    }


def write_machine(path: Path, device: str = "auto") -> dict[str, Any]:
    """Measure, write the file, return its table."""
    import tomli_w

    table = measure_machine(device)
    path.write_text(tomli_w.dumps(table))
    return table


def _best(work: Callable[[], object], device: str, repetitions: int = 5) -> float:
    """Seconds of the fastest of a few repetitions."""
    import torch

    best = float("inf")
    for _ in range(repetitions + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _host_gib() -> float:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _links(device: str) -> dict[str, Any]:
    """The links' table: measured where several ranks run, else a shipped machine's."""
    import torch.distributed as dist

    from titan_train.planner.hardware.machine import load_machine

    like = load_machine("h100" if device == "cuda" else "cpu")
    local = {"ranks": like.domain, "gb_s": like.local.bytes_per_s / 1e9, "latency_us": like.local.latency_s * 1e6}
    network = {"gb_s": like.network.bytes_per_s / 1e9, "latency_us": like.network.latency_s * 1e6}
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        rate, latency = _measure_gather(device)
        local |= {"gb_s": rate / 1e9, "latency_us": latency * 1e6}
    return {"local": local, "network": network}


def _measure_gather(device: str) -> tuple[float, float]:
    """Bytes per second and seconds of latency, from all-gathers of a short and a long message."""
    import math

    import torch
    import torch.distributed as dist

    n = dist.get_world_size()
    seconds: list[float] = []
    sizes = (2**10, 2**22)
    for count in sizes:
        part = torch.empty(count, device=device)
        whole = torch.empty(n * count, device=device)
        seconds.append(_best(lambda p=part, w=whole: dist.all_gather_into_tensor(w, p), device))
    sent = [4 * count * (n - 1) for count in sizes]
    rate = (sent[1] - sent[0]) / max(1e-9, seconds[1] - seconds[0])
    return rate, max(1e-6, (seconds[0] - sent[0] / rate) / (math.log2(n) + 1))
