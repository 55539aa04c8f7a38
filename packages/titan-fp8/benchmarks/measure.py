"""Timing shared by the sections of `on_gpu.py`: medians of CUDA events over rotating inputs, and the machine's ceilings."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from titan_fp8 import ops


@dataclass(frozen=True)
class Bench:
    """Where and how long to measure."""

    device: torch.device
    repeats: int
    """Timed calls; their median counts."""
    tiny: bool
    """Check the code with shapes a CPU runs in seconds; the figures mean nothing."""

    def size(self, size: int, tiny: int) -> int:
        """``size``, or ``tiny`` when only checking."""
        return tiny if self.tiny else size

    def random(self, *shape: int, seed: int = 0, requires_grad: bool = False) -> torch.Tensor:
        """Normal bfloat16 values: zeros would let the chip clock 13 % higher."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(*shape, generator=generator, device=self.device, dtype=torch.float32).bfloat16()
        return x.requires_grad_(requires_grad)

    def median_ms(self, runs: Sequence[Callable[[], object]]) -> float:
        """Median milliseconds of the kernels of one call: the host has queued them before the clock starts.

        ``runs`` are taken in turn, so that none finds its input in the cache. The time of the host is left out: for what
        a user waits for, see `eager_ms`.
        """
        for run in [*runs, *runs]:
            run()
        times = [self._kernels_ms(runs[i % len(runs)]) for i in range(self.repeats)]
        return statistics.median(times)

    def eager_ms(self, run: Callable[[], object], calls: int = 8) -> float:
        """Median milliseconds of one call among ``calls`` in a row, host time included: the rate of eager training."""
        run()
        times = []
        for _ in range(max(1, self.repeats // 2)):
            times.append(self._between_events_ms(lambda: [run() for _ in range(calls)]) / calls)
        return statistics.median(times)

    def host_us(self, run: Callable[[], object], calls: int = 20) -> float:
        """Microseconds that the host is busy for one call."""
        run()
        self._wait()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        taken = (time.perf_counter() - began) * 1e6 / calls
        self._wait()
        return taken

    def _kernels_ms(self, run: Callable[[], object]) -> float:
        if self.device.type == "cuda":
            torch.cuda._sleep(8_000_000)  # four milliseconds, in which the host queues the whole call
        return self._between_events_ms(run, wait=False)

    def _between_events_ms(self, run: Callable[[], object], wait: bool = True) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        if wait:
            self._wait()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def ceilings(bench: Bench) -> dict[str, float]:
    """Copy bandwidth, and matrix rates in bfloat16 and each float8 scaling, on random data."""
    rows, columns = bench.size(16384, 256), bench.size(4096, 256)
    sources = [bench.random(rows, columns, seed=i) for i in range(3)]
    targets = [torch.empty_like(source) for source in sources]
    copy_ms = bench.median_ms([lambda s=s, t=t: t.copy_(s) for s, t in zip(sources, targets, strict=True)])
    size = bench.size(8192, 256)
    a, b = bench.random(size, size), bench.random(size, size, seed=1)
    tera_flop = 2 * size**3 / 1e12
    result = {
        "copy_tb_per_s": 2 * sources[0].nbytes / copy_ms / 1e9,
        "bf16_tflops": tera_flop / bench.median_ms([lambda: a @ b.t()]) * 1e3,
    }
    operands = {
        "tensor·tensor": (*ops.cast_tensor(a), *ops.cast_tensor(b)),
        "row·row": (*ops.cast_row(a), *ops.cast_row(b)),
        "block1x128·block128": (*ops.cast_block(a), *ops.cast_weight_block(b)[:2]),
        "block1x128·block1x128": (*ops.cast_block(a), *ops.cast_block(b)),
    }
    for pair, arguments in operands.items():
        for fast_accum in (False, True) if pair in ("tensor·tensor", "row·row") else (False,):
            ms = bench.median_ms(
                [lambda x=arguments, p=pair, f=fast_accum: ops.scaled_mm(*x, *p.split("·"), fast_accum=f)]
            )
            result[f"{pair}{' fast accumulation' if fast_accum else ''}_tflops"] = tera_flop / ms * 1e3
    return result
