"""A step of four pipeline ranks: our executor beside torch's runtime with the same schedule.

Method: 16 Transformer blocks, 8 microbatches, four ranks of one thread; both runtimes live in the same processes and take
turns, so nothing differs but the runtime (1f1b in torch's own ``Schedule1F1B``, the others in its multi-stage runtime). The
losses of the last stage must be equal to 1e-5. Processor time is that of all four ranks.

Limits: four ranks on fewer cores measure host work, not bubbles. Width 64 shows the overhead, 192 less of it.

    python benchmarks/peers/pipeline.py --schedule 1f1b
    python benchmarks/peers/pipeline.py --schedule dualpipe_v --width 192
"""

import copy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import turns
from titan_pipeline import Schedule, build_schedule
from titan_pipeline.runtime import Executor, TorchStage, host_transport, split_layers, torch_runtime
from titan_testing import run_ranks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages/titan-pipeline/benchmarks"))
from bench_runtime import Block

TOKENS, MICROBATCHES, RANKS = 64, 8, 4


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over a microbatch, averaged over the microbatches."""
    return torch.nn.functional.mse_loss(output, target) / MICROBATCHES


def work(text: str, width: int, rounds: int) -> tuple[list[tuple[float, ...]], float, float]:
    """On each rank: wall and processor seconds of our step and torch's, by round; and the losses of both."""
    torch.set_num_threads(1)
    schedule, rank = Schedule.from_text(text), dist.get_rank()
    first, last = schedule.placement[0] == rank, schedule.placement[-1] == rank
    torch.manual_seed(0)
    parts = split_layers([Block(width) for _ in range(16)], schedule.num_stages)
    copies, mine = copy.deepcopy(parts), schedule.stages_of(rank)
    ours = Executor(schedule, [TorchStage(parts[s], s, loss=loss_of) for s in mine], host_transport())
    shape = (1, TOKENS, width)
    stages = [
        PipelineStage(
            copies[s], s, schedule.num_stages, torch.device("cpu"),
            input_args=(torch.zeros(shape, requires_grad=s > 0),), output_args=(torch.zeros(shape, requires_grad=True),),
        )
        for s in mine
    ]  # fmt: skip
    theirs = (
        Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of) if schedule.name == "1f1b"
        else torch_runtime(schedule, stages, loss_fn=loss_of)
    )  # fmt: skip
    data = torch.randn(MICROBATCHES, TOKENS, width)
    chunks = [chunk.contiguous() for chunk in data.chunk(MICROBATCHES)]
    losses: dict[str, float] = {}

    def our_step() -> None:
        losses["ours"] = ours.step(chunks, chunks).loss * MICROBATCHES

    def torch_step() -> None:
        found: list[torch.Tensor] = []
        theirs.step(*((data,) if first else ()), **({"target": data, "losses": found} if last else {}))
        losses["torch"] = float(sum(loss.detach() for loss in found))

    laps = []
    for round_number in range(rounds + 2):
        row = [0.0] * 4
        for index in (0, 1) if round_number % 2 else (1, 0):
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            (our_step, torch_step)[index]()
            used = time.process_time() - used
            dist.barrier()
            row[2 * index : 2 * index + 2] = [time.perf_counter() - began, used]
        laps.append(tuple(row))
    return laps[2:], losses["ours"], losses["torch"] if last else float("nan")


def main() -> None:
    """Measure and print."""
    made = turns.parser(__doc__ or "", rounds=40)
    made.add_argument(
        "--schedule", default="1f1b", help="1f1b, interleaved_1f1b, dualpipe_v, zbv, zb_h1, interleaved_zb"
    )
    made.add_argument("--width", type=int, default=64)
    options = made.parse_args()
    load = turns.wait_until_idle(options)
    chunks = 1 if options.schedule in ("1f1b", "zb_h1", "gpipe") else 2
    schedule = build_schedule(options.schedule, RANKS, MICROBATCHES, num_chunks=chunks)
    by_rank = run_ranks(work, RANKS, schedule.to_text(), options.width, options.rounds, timeout_s=900)
    last = schedule.placement[-1]
    ours, theirs = by_rank[last][1:]
    if abs(ours - theirs) > 1e-5 * abs(theirs):
        raise SystemExit(f"the losses differ ({ours} and {theirs}): there is nothing to compare")
    rounds = [iter([(rank[0][i][2 * k], sum(r[0][i][2 * k + 1] for r in by_rank)) for i in range(options.rounds)])
              for k, rank in ((0, by_rank[0]), (1, by_rank[0]))]  # fmt: skip
    contestants = {"titan-pipeline": lambda: next(rounds[0]), "torch.distributed.pipelining": lambda: next(rounds[1])}
    turns.compare(
        f"peers_pipeline_{options.schedule}_{options.width}", contestants, options, {"losses": [ours, theirs]}, load
    )


if __name__ == "__main__":
    main()
