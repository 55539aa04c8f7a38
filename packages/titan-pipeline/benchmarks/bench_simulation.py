"""Whether steps take the time that is simulated: four gloo ranks whose stages only sleep, median of five steps.

    python packages/titan-pipeline/benchmarks/bench_simulation.py

Needs a quiet machine; a rank that wakes late is measured too.
"""

import statistics
import time

import torch
import torch.distributed as dist
from titan_pipeline import Costs, Schedule, build_schedule, simulate
from titan_pipeline.runtime import Executor, GlooTransport
from titan_testing import run_ranks


class Sleeper:
    """A stage that only takes time."""

    def __init__(self, index, times):
        self.index = index
        self.times = times

    def configure(self, splits_backward):
        pass

    def begin(self, training, aux_weight):
        pass

    def forward(self, microbatch, inputs, target, extra, training):
        time.sleep(self.times[0])
        return (torch.zeros(()) if target is not None else torch.zeros(4),)

    def backward(self, microbatch, grads, defer):
        time.sleep(self.times[1] if defer else self.times[1] + self.times[2])
        return (torch.zeros(4),)

    def backward_weight(self, microbatch):
        time.sleep(self.times[2])

    def finish(self, training):
        pass

    def clear(self):
        pass


TIMES = (0.040, 0.036, 0.024)


def _sleep(texts, repeats):
    transport = GlooTransport()
    measured = []
    for text in texts:
        schedule = Schedule.from_text(text)
        times = tuple(t * 2 / schedule.num_chunks for t in TIMES)
        executor = Executor(schedule, [Sleeper(s, times) for s in schedule.stages_of(transport.rank)], transport)
        data = [torch.zeros(4)] * schedule.num_microbatches
        executor.step(data, data)
        runs = []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            executor.step(data, data)
            runs.append(time.perf_counter() - began)
        measured.append(runs)
    return measured


SLEEP_FAMILIES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv", "v_half", "dualpipe_v")


def main() -> None:
    """Print one line a family."""
    schedules = [build_schedule(name, 4, 8) for name in SLEEP_FAMILIES]
    by_rank = run_ranks(_sleep, 4, [s.to_text() for s in schedules], 5, timeout_s=170)
    for k, schedule in enumerate(schedules):
        measured = statistics.median(max(rank[k][i] for rank in by_rank) for i in range(5))
        costs = Costs.uniform(
            schedule.num_stages, forward=2 * TIMES[0], input_grad=2 * TIMES[1], weight_grad=2 * TIMES[2],
            num_chunks=schedule.num_chunks,
        )  # fmt: skip
        print(f"{schedule.name:18} measured/simulated {measured / simulate(schedule, costs).makespan:.4f}")


if __name__ == "__main__":
    main()
