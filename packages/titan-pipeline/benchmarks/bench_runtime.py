"""Host cost of the executor and of the weight-gradient engine, against torch's own; and simulation against sleep.

Question: what does a schedule cost besides the computation?
Method: (1) ``weight_grad``: I plus W of a stack of tiny Transformer blocks, over one plain backward, ours and torch's
(``stage_backward_input`` / ``stage_backward_weight``); median of the paired ratios, alternating. (2) ``null_stages``:
one rank, stages that do nothing, microseconds an action; torch's runtime in the same process. (3) ``fidelity``: gloo
ranks whose stages sleep, measured over simulated makespan, median of ``--repeats`` steps. (4) ``train``: four gloo ranks
train a small Transformer, our executor and torch's runtime in turns within the same processes, same schedules (1f1b in
torch's own ``Schedule1F1B``); steps a second of each, the median of the paired ratios, and the ratio of the processes' CPU
time, which a loaded machine disturbs less.
Limits: CPU, host time only; a loaded machine makes every number worse, most of all the third.
Example: ``python bench_runtime.py --parts weight_grad null_stages``; the last line is one JSON object.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from titan_pipeline import Costs, Schedule, build_schedule, simulate
from titan_pipeline.runtime import Executor, TorchStage, host_transport, split_layers, torch_runtime
from titan_testing import run_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

FAMILIES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv", "v_half", "dualpipe_v")


class Block(nn.Module):
    """A Transformer block of six linear layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the feed-forward layer."""
        y = self.norm1(x)
        x = x + self.o(nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def bench_weight_grad(layers: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a plain backward, and of the two halves, ours and torch's."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    torch.manual_seed(0)
    plain, ours, theirs = (nn.Sequential(*(Block() for _ in range(layers))) for _ in range(3))
    stage = TorchStage(ours, 1)
    stage.configure(True)
    x, grad = torch.randn(1, 4, 16), torch.randn(1, 4, 16)
    laps: dict[str, list[float]] = {k: [] for k in ("backward", "input", "weight", "torch_input", "torch_weight")}

    def lap(name: str, began: float) -> float:
        laps[name].append(1e3 * (time.perf_counter() - began))
        return time.perf_counter()

    stage.begin(True, 0.0)
    for _ in range(repeats):
        out = plain(x.clone().requires_grad_())
        t = time.perf_counter()
        out.backward(grad)
        lap("backward", t)
        stage.forward(0, (x,), None, {}, True)
        t = time.perf_counter()
        stage.backward(0, (grad,), True)
        t = lap("input", t)
        stage.backward_weight(0)
        lap("weight", t)
        leaf = x.clone().requires_grad_()
        out = theirs(leaf)
        t = time.perf_counter()
        _, groups = stage_backward_input([out], [grad], [leaf], theirs.parameters())
        t = lap("torch_input", t)
        stage_backward_weight(theirs.parameters(), groups)
        lap("torch_weight", t)
    result = {name: statistics.median(values) for name, values in laps.items()}
    for prefix in ("", "torch_"):
        pairs = zip(laps[f"{prefix}input"], laps[f"{prefix}weight"], laps["backward"], strict=True)
        result[f"{prefix}ratio"] = statistics.median((i + w) / b for i, w, b in pairs)
    return result


class NullStage:
    """Does nothing; in the sleeping version it takes time."""

    def __init__(self, index: int, times: tuple[float, float, float] = (0, 0, 0)) -> None:
        self.index = index
        self.times = times
        self.out = (torch.zeros(4),)
        self.loss = (torch.zeros(()),)

    def configure(self, splits_backward: bool) -> None:
        """Nothing to prepare."""

    def begin(self, training: bool, aux_weight: float) -> None:
        """Nothing to prepare."""

    def _wait(self, seconds: float) -> None:
        if seconds:
            time.sleep(seconds)

    def forward(self, microbatch: int, inputs: tuple, target: object, extra: object, training: bool) -> tuple:
        """A constant."""
        self._wait(self.times[0])
        return self.out if target is None else self.loss

    def backward(self, microbatch: int, grads: tuple, defer: bool) -> tuple:
        """A constant."""
        self._wait(self.times[1] + (0 if defer else self.times[2]))
        return self.out

    def backward_weight(self, microbatch: int) -> None:
        """Nothing is deferred."""
        self._wait(self.times[2])

    def finish(self, training: bool) -> None:
        """No reduction."""

    def clear(self) -> None:
        """Nothing is kept."""


def bench_null_stages(repeats: int) -> dict[str, float]:
    """Microseconds an action at one rank, minimum over steps."""
    result: dict[str, float] = {}
    for name, chunks in (("1f1b", 1), ("interleaved_1f1b", 4), ("interleaved_zb", 4), ("zbv", 2)):
        schedule = build_schedule(name, 1, 16, num_chunks=chunks)
        executor = Executor(schedule, [NullStage(s) for s in range(chunks)])
        data = [torch.zeros(4)] * 16
        best = float("inf")
        for _ in range(repeats):
            began = time.perf_counter()
            executor.step(data, data)
            best = min(best, time.perf_counter() - began)
        result[name] = 1e6 * best / len(schedule.ranks[0])
    return result


class NullTorchStage(PipelineStage):
    """Torch's stage with forward and backward that do nothing."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """A constant."""
        return NULL

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def set_local_fwd_input(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is passed on."""

    def set_local_bwd_input(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is passed on."""

    def get_local_bwd_output(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing is passed on."""
        return (NULL,)


NULL = torch.zeros(4)


def bench_null_torch(repeats: int) -> dict[str, float]:
    """The same for torch's runtime, with the same schedules, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    result: dict[str, float] = {}
    for name, chunks in (("interleaved_1f1b", 4), ("interleaved_zb", 4), ("zbv", 2)):
        schedule = build_schedule(name, 1, 16, num_chunks=chunks)
        cpu = torch.device("cpu")
        stages = [
            NullTorchStage(nn.Identity(), s, chunks, cpu, input_args=(NULL,), output_args=(NULL,))
            for s in range(chunks)
        ]
        runtime = torch_runtime(schedule, stages)
        data = torch.zeros(16, 4)
        best = float("inf")
        for _ in range(repeats):
            began = time.perf_counter()
            runtime.step(data, return_outputs=False)
            best = min(best, time.perf_counter() - began)
        result[name] = 1e6 * best / len(schedule.ranks[0])
    dist.destroy_process_group()
    return result


def _train_rank(texts: list[str], repeats: int, width: int, tokens: int) -> list[list[tuple[float, ...]]]:
    """Seconds of our and of torch's step, in turns, for each schedule, and CPU seconds of this rank."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    measured = []
    for text in texts:
        schedule = Schedule.from_text(text)
        m, first, last = schedule.num_microbatches, schedule.placement[0] == rank, schedule.placement[-1] == rank
        torch.manual_seed(0)
        parts = split_layers([Block(width) for _ in range(16)], schedule.num_stages)
        copies = copy.deepcopy(parts)
        mine = schedule.stages_of(rank)
        ours = Executor(schedule, [TorchStage(parts[s], s, loss=_loss) for s in mine], host_transport())
        stages = []
        for s in mine:
            x = torch.zeros(1, tokens, width, requires_grad=s > 0)
            y = torch.zeros(1, tokens, width, requires_grad=True)
            stages.append(
                PipelineStage(copies[s], s, schedule.num_stages, torch.device("cpu"), input_args=(x,), output_args=(y,))
            )
        theirs: Any = (
            Schedule1F1B(stages[0], m, loss_fn=_loss) if schedule.name == "1f1b"
            else torch_runtime(schedule, stages, loss_fn=_loss)
        )  # fmt: skip
        data = torch.randn(m, tokens, width)
        chunks = [c.contiguous() for c in data.chunk(m)]
        laps = []
        for _ in range(repeats + 2):
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            ours.step(chunks, chunks)
            mine = time.process_time() - cpu
            dist.barrier()
            middle, cpu = time.perf_counter(), time.process_time()
            theirs.step(*((data,) if first else ()), **({"target": data} if last else {}))
            other = time.process_time() - cpu
            dist.barrier()
            laps.append((middle - began, time.perf_counter() - middle, mine, other))
        measured.append(laps[2:])
    return measured


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target) / 8


def bench_train(repeats: int, width: int, tokens: int) -> dict[str, dict[str, float]]:
    """Steps a second of both runtimes for the schedules that both have, and ours over theirs."""
    names = (("interleaved_1f1b", 2), ("interleaved_zb", 2), ("zbv", 2), ("dualpipe_v", 2), ("zb_h1", 1), ("1f1b", 1))
    schedules = [build_schedule(name, 4, 8, num_chunks=v) for name, v in names]
    by_rank = run_ranks(_train_rank, 4, [s.to_text() for s in schedules], repeats, width, tokens, timeout_s=900)
    result = {}
    for k, (schedule, laps) in enumerate(zip(schedules, by_rank[0], strict=True)):
        cpu = [sum(statistics.median(lap[i] for lap in rank[k]) for rank in by_rank) for i in (2, 3)]
        result[schedule.name] = {
            "steps_per_s": 1 / statistics.median(a for a, *_ in laps),
            "torch_steps_per_s": 1 / statistics.median(b for _, b, *_ in laps),
            "speedup": statistics.median(b / a for a, b, *_ in laps),
            "cpu_speedup": cpu[1] / cpu[0],
        }
    return result


def _sleep_rank(texts: list[str], repeats: int, times: tuple[float, float, float]) -> list[list[float]]:
    transport = host_transport()
    measured = []
    for text in texts:
        schedule = Schedule.from_text(text)
        share = tuple(t / schedule.num_chunks for t in times)
        executor = Executor(schedule, [NullStage(s, share) for s in schedule.stages_of(transport.rank)], transport)
        data = [torch.zeros(4)] * schedule.num_microbatches
        runs = []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            executor.step(data, data)
            runs.append(time.perf_counter() - began)
        measured.append(runs)
    return measured


def bench_fidelity(repeats: int, scale: float) -> dict[str, float]:
    """Measured over simulated makespan, four gloo ranks, eight microbatches."""
    times = (0.40 * scale, 0.36 * scale, 0.24 * scale)
    schedules = [build_schedule(name, 4, 8) for name in FAMILIES]
    by_rank = run_ranks(_sleep_rank, 4, [s.to_text() for s in schedules], repeats, times, timeout_s=900)
    ratios = {}
    for k, schedule in enumerate(schedules):
        measured = statistics.median(max(rank[k][i] for rank in by_rank) for i in range(repeats))
        costs = Costs.uniform(
            schedule.num_stages, forward=times[0], input_grad=times[1], weight_grad=times[2],
            num_chunks=schedule.num_chunks,
        )  # fmt: skip
        ratios[schedule.name] = measured / simulate(schedule, costs).makespan
    return ratios


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["weight_grad", "null_stages", "fidelity", "train"])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--scale", type=float, default=0.2, help="seconds of F+I+W of a rank and microbatch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
    report: dict[str, object] = {
        "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(), "commit": commit,
        "load": os.getloadavg()[0], "config": vars(args),
    }  # fmt: skip
    if "weight_grad" in args.parts:
        report["weight_grad_ms"] = bench_weight_grad(args.layers, args.repeats)
    if "null_stages" in args.parts:
        report["null_stages_us_per_action"] = bench_null_stages(10 * args.repeats)
        report["torch_null_stages_us_per_action"] = bench_null_torch(10 * args.repeats)
    if "fidelity" in args.parts:
        report["measured_over_simulated"] = bench_fidelity(min(args.repeats, 5), args.scale)
    if "train" in args.parts:
        report["train"] = bench_train(args.repeats, args.width, args.tokens)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
