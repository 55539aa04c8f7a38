"""Measure the machine at hand, and write its hardware file: products, copies, the host link, the links between ranks, and
the elementwise kernels.

A hardware file states nominal rates, and kernels reach a part of them (`titan_train.planner.cost.constants`). What is measured
here is what kernels reach, so the file gets the nominal rate that this implies: of a device with a shipped file the data
sheet's peaks and the share of the clock that it holds, of another the measured rates over the prior efficiencies.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_train.planner.cost.constants import prior
from titan_train.planner.hardware.links import LinkSpeed
from titan_train.planner.hardware.machine import Machine, load_machine, machine_of_device

_SIZES = {"cpu": 1024, "cuda": 8192}
_GRID = {
    # rows of a product, its inner and outer widths; tokens of attention
    "cpu": ((64, 512, 4096), (64, 512, 2048), (64, 256, 1024)),
    "cuda": ((512, 4096, 32_768), (512, 2048, 8192, 32_768), (1024, 8192, 32_768)),
}


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What kernels reach on one device. SI units."""

    device: str
    """The name that the driver reports."""
    products: float
    """FLOP/s of a large product: bfloat16 on a GPU, float32 on a CPU."""
    products8: float
    """FLOP/s of a large float8 product; 0 where there are no such units."""
    copies: float
    """Bytes a second, read and written, of a large copy in the device's memory."""
    host: float
    """Bytes a second from the device to the host, one direction."""
    memory_bytes: float


def this_device() -> str:
    """What would be measured: cuda or cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def hardware_table(rates: MeasuredRates, links: Sequence[LinkSpeed]) -> dict[str, Any]:
    """The hardware file of a device that reaches these rates."""
    known = machine_of_device(rates.device)
    share = prior("compile")
    peak, peak8 = rates.products / share.matmul, rates.products8 / share.matmul8
    compute = {"bf16_tflops": peak / 1e12, "fp8_tflops": peak8 / 1e12}
    if known is not None and known.name != "cpu":
        nominal = {"bf16": known.bf16, "fp8": known.fp8, "fp4": known.fp4, "vector": known.vector}
        compute = {f"{name}_tflops": rate / known.bf16 * known.peak / 1e12 for name, rate in nominal.items()}
        compute["clock_share"] = min(1.0, peak / known.peak)
    return {
        "name": known.name if known is not None else rates.device.lower().replace(" ", "_"),
        "title": rates.device,
        "source": "measured by titan-train doctor --bench"
        + (", peaks of the data sheet" if "clock_share" in compute else ""),
        "compute": compute,
        "memory": {
            "capacity_gib": rates.memory_bytes / 2**30,
            "bandwidth_tb_s": rates.copies / share.bandwidth / 1e12,
            "host_gb_s": rates.host / 1e9,
        },
        "measured": {
            "product_tflops": rates.products / 1e12,
            "float8_product_tflops": rates.products8 / 1e12,
            "copy_gb_s": rates.copies / 1e9,
        },
        "links": _links(known, rates.device, links),
    }


def measure_tables(device: str, links: Sequence[LinkSpeed]) -> dict[str, Any]:
    """The ``tables`` of a hardware file: seconds of products, attention and casts by shape, and of collectives by bytes."""
    import torch
    import torch.nn.functional as F
    from titan_fp8 import RECIPES, cast

    rows, inner, tokens = _GRID[device]
    plain = "bf16" if device == "cuda" else "fp32"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    float8 = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    tables: dict[str, Any] = {"product": {}, "attention": {}, "cast": {}, "collective": {}}

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=dtype)

    def grid(axes: Sequence[Sequence[int]], seconds: Callable[..., float]) -> dict[str, Any]:
        return {"axes": [list(axis) for axis in axes], "seconds": [seconds(*at) for at in itertools.product(*axes)]}

    def product(m: int, k: int, n: int) -> float:
        a, b = random(m, k), random(k, n)
        return _best(lambda: a @ b, device, 2)

    def product8(m: int, k: int, n: int) -> float:
        return 2 * m * k * n / _products8(random(m, k), random(k, n), device)

    def attention(count: int, width: int) -> tuple[float, float]:
        heads = 4 if device == "cpu" else 32
        q, k, v = (random(1, heads, count, width).requires_grad_() for _ in range(3))
        forward = _best(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        backward = _best(lambda: torch.autograd.grad(out, (q, k, v), out, retain_graph=True), device, 2)
        return forward / heads, backward / heads

    tables["product"][plain] = grid((rows, inner, inner), product)
    if float8:
        tables["product"]["tensorwise"] = grid((rows, inner, inner), product8)
    both = {at: attention(*at) for at in itertools.product(tokens, (32, 64, 128))}
    for way, name in enumerate((plain, f"{plain}_backward")):
        tables["attention"][name] = grid((tokens, (32, 64, 128)), lambda *at, way=way: both[at][way])
    for recipe in ("tensorwise", "rowwise", "blockwise") if float8 else ():

        def casting(n: int, scaling: Any = RECIPES[recipe].x) -> float:
            matrix = random(n // 4096, 4096)
            return _best(lambda: cast(matrix, scaling), device, 2)

        tables["cast"][recipe] = grid([[n * 4096 for n in (256, 4096, 65536)]], casting)
    for speed in links:
        if speed.table:
            sizes, seconds = zip(*speed.table, strict=True)
            tables["collective"][speed.operation] = {"axes": [list(sizes)], "seconds": list(seconds)}
            tables["ranks"] = speed.ranks
    return tables


def measure_rates(device: str) -> MeasuredRates:
    """Time products and copies, each the best of a few repetitions."""
    import torch

    size = _SIZES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    # a copy reads and writes, 256 MiB at least so that no cache holds it
    source = torch.empty(2**26, device=device)
    target = torch.empty_like(source)
    copies = 2 * 4 * 2**26 / _best(lambda: target.copy_(source), device)
    if device == "cuda":
        pinned = torch.empty(2**26, pin_memory=True)
        host = 4 * 2**26 / _best(lambda: pinned.copy_(source, non_blocking=True), device)
        name, memory = torch.cuda.get_device_name(), float(torch.cuda.mem_get_info()[1])
    else:
        name, memory, host = "CPU", _host_bytes(), copies / 2
    flops = 2 * size**3
    return MeasuredRates(name, flops / _best(lambda: a @ b, device), _products8(a, b, device), copies, host, memory)


def gpu_products() -> list[float]:
    """FLOP/s of the same product on each GPU of this machine; empty with less than two.

    The median of many: a GPU that is throttled, or that others use, is slow in most.
    """
    import torch

    count = torch.cuda.device_count()
    size, found = _SIZES["cuda"], list[float]()
    for index in range(count if count > 1 else 0):
        with torch.cuda.device(index):
            a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
            for event in events:
                event.record()
                torch.mm(a, a)
            torch.cuda.synchronize()
            times = [1e-3 * before.elapsed_time(after) for before, after in itertools.pairwise(events)]
        found.append(2 * size**3 / statistics.median(times))
    return found


def gpu_lines(products: Sequence[float]) -> list[str]:
    """What `gpu_products` found, and which GPUs are slow."""
    if not products:
        return []
    usual = statistics.median(products)
    lines = [f"products of each GPU: {', '.join(f'{rate / 1e12:.0f}' for rate in products)} TFLOP/s"]
    lines += [
        f"slow    cuda:{index} makes {rate / usual:.0%} of the others' products, and all ranks would wait for it: look for "
        f"throttling and other processes (nvidia-smi -i {index} -q -d PERFORMANCE)"
        for index, rate in enumerate(products)
        if rate < 0.9 * usual
    ]
    return lines


def _products8(a: Any, b: Any, device: str) -> float:
    """FLOP/s of a float8 product with one scale a tensor; 0 where the device has none."""
    import torch

    if device != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        return 0.0
    one = torch.ones((), device=device)
    left, right = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()

    def product() -> Any:
        return torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    return 2 * a.numel() * b.shape[1] / _best(product, device)


def write_machine(path: Path, links: Sequence[LinkSpeed] = (), *, by_shape: bool = False) -> dict[str, Any]:
    """Measure this machine, write the hardware file, return its table.

    Args:
        path: The file.
        links: Those between ranks on devices of this kind.
        by_shape: Add what `measure_tables` finds.
    """
    import tomli_w

    from titan_train.kernels.measure import measure_kernels

    device = this_device()
    table = hardware_table(measure_rates(device), links) | {"kernels": measure_kernels(device)}
    if by_shape:
        table["tables"] = measure_tables(device, links)
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


def _host_bytes() -> float:
    import os

    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _links(known: Machine | None, device: str, links: Sequence[LinkSpeed]) -> dict[str, Any]:
    """The links' table: a shipped machine's, with what all-gathers between the ranks here reached."""
    like = known or load_machine("cpu" if device == "CPU" else "h100")
    local: dict[str, Any] = {
        "ranks": like.domain,
        "gb_s": like.local.bytes_per_s / 1e9,
        "latency_us": like.local.latency_s * 1e6,
    }
    if like.local.ring_s is not None:
        local["ring_us"] = [1e6 * seconds for seconds in like.local.ring_s]
    network = {"gb_s": like.network.bytes_per_s / 1e9, "latency_us": like.network.latency_s * 1e6}
    for speed in links:
        if speed.operation == "all-gather":
            steps = math.log2(speed.ranks) + 1
            local |= {"gb_s": speed.gb_s / prior("compile").local, "latency_us": max(1.0, speed.latency_us / steps)}
            local.pop("ring_us", None)  # the latency of other ranks
    return {"local": local, "network": network}
