"""How much shorter is a step whose documents are shared by all ranks, and what does planning it cost?

Question: with a degree for each document over all ranks of data and context parallelism, how far is the busiest rank from an
even share, how much longer does the static layout take, which keys travel, and how long does the host plan?

Method: steps of packed rows with documents of three distributions, on ``dp × cp`` ranks, 9 steps of each. *Of the bound*: the
predicted makespan over all work shared evenly, the worst step. *Static*: the static layout's makespan over the dynamic
one's, the median; a token's other layers cost what they do in an 8B Llama (26,600 query-key pairs). *Planning*: CPU time
from the documents' lengths to who holds what, of all micro-batches, the median and the most; *one rank*: with its own
exchange and tiles, as its attention needs them.

Output: a table, and one JSON object on the last line.

Limits: makespans are counted in query-key pairs, not measured, and transfers are not in them. Time is CPU time of one
process on a shared machine.

Example: ``python packages/titan-cp/benchmarks/dynamic_steps.py``
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from titan_cp import plan_step
from titan_cp.cli import cut_rows
from titan_cp.planning.documents import deal_documents

LONG = 1 << 18
TOKEN_PAIRS = 26_600
SHAPES = ((8, 8, 1), (2, 8, 4), (8, 1, 1))  # dp, cp, micro-batches
DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator], float], tuple[int, ...]]] = {
    "500 to 1,500": (lambda rng: rng.integers(500, 1500), ()),
    "log-normal, mean 5,100": (lambda rng: rng.lognormal(np.log(2500), 1.2), ()),
    "log-normal and one of 262,144": (lambda rng: rng.lognormal(np.log(2500), 1.0), (LONG,)),
}


def draw_rows(name: str, rows: int, seed: int) -> list[list[int]]:
    """Document lengths of each row."""
    draw, first = DISTRIBUTIONS[name]
    rng = np.random.default_rng(seed)
    ends = [0, *first]
    while ends[-1] < rows * LONG:
        ends.append(min(ends[-1] + max(1, int(draw(rng))), rows * LONG))
    return [[b - a for a, b in pairwise(row)] for row in cut_rows(ends, LONG)]


def measure(name: str, dp: int, cp: int, microbatches: int) -> dict[str, object]:
    """One row of the table."""
    planning: list[float] = []
    own: list[float] = []
    plans = []
    for seed in range(9):
        rows = draw_rows(name, dp * microbatches, seed)
        start = time.process_time()
        step = plan_step(rows, dp=dp, cp=cp, token_pairs=TOKEN_PAIRS)
        for bounds in step.microbatches:
            deal_documents(bounds, step.size, True)
        planning.append(1e3 * (time.process_time() - start))
        for m in range(microbatches):
            p = step.attention_plan(m, rank=seed % step.size, num_heads=32, num_kv_heads=8)
            assert p.tiles(p.ring_rank)
            for index in range(len(p.rounds) if p.direct else 0):
                p.round_tiles(index)
        own.append(1e3 * (time.process_time() - start))
        plans.append(step)
    return {
        "lengths": name, "dp": dp, "cp": cp, "microbatches": microbatches,
        "documents": round(statistics.mean(sum(s.degrees.values()) for s in plans)),
        "whole": round(statistics.mean(s.degrees.get(1, 0) / sum(s.degrees.values()) for s in plans), 3),
        "of_bound": round(max(s.makespan / s.bound for s in plans), 3),
        "static": round(statistics.median(s.speedup for s in plans), 2),
        "sent_rows": round(statistics.median(s.sent_rows for s in plans)),
        "static_sent_rows": round(statistics.median(s.static_sent_rows for s in plans)),
        "planning_ms": round(statistics.median(planning), 1), "planning_ms_most": round(max(planning), 1),
        "one_rank_ms": round(statistics.median(own), 1),
    }  # fmt: skip


def main() -> None:
    """Run every case."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [measure(name, *shape) for shape in SHAPES for name in DISTRIBUTIONS]
    print("| dp × cp | micro-batches | documents | of them | whole | of the bound | static | rows sent | static | planning, ms | "
          "most | one rank |")  # fmt: skip
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        print(
            f"| {r['dp']} × {r['cp']} | {r['microbatches']} | {r['lengths']} | {r['documents']} | {r['whole']:.1%} "
            f"| {r['of_bound']} | {r['static']} × | {r['sent_rows']:,} | {r['static_sent_rows']:,} | {r['planning_ms']} "
            f"| {r['planning_ms_most']} | {r['one_rank_ms']} |"
        )
    print(json.dumps({
        "benchmark": "cp_dynamic_steps", "torch": torch.__version__, "machine": platform.machine(), "cpus": os.cpu_count(),
        "rows": rows,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
