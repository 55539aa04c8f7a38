"""How many bytes does packed context parallelism send, against the bound and against the ring?

Question: of the keys and values that ring attention sends round, what share do the queries of the other ranks see, what
does titan-cp send, and how long does planning take?

Method: packings of documents with log-normal lengths, planned for every rank. *Bound*: each key and value once for each
rank whose queries see it, from the plan's table, which ``tests/test_exchange.py`` compares with a mask. *Sent*: the
forward bytes of the busiest rank and of the mean rank. *Ring*: every key to every rank. Planning: CPU time of one rank's
plan, its layout, its exchange and its tiles, the median of 9 packings.

Output: a table, and one JSON object on the last line.

Limits: bytes are counted by the plan; that real collectives send exactly these is shown on 4 ranks by the tests. Time is
CPU time of one process on a shared machine.

Example: ``python packages/titan-cp/benchmarks/packed_bytes.py``
"""

import argparse
import json
import os
import platform
import statistics
import time

import numpy as np
import torch
from titan_cp import plan
from titan_cp.planning.layouts import LAYOUTS

CASES = (  # documents, tokens, ranks, spread of the lengths
    (1047, 1 << 20, 64, 0.5),
    (1047, 1 << 20, 64, 1.0),
    (1047, 1 << 20, 64, 1.5),
    (256, 1 << 18, 16, 1.0),
    (64, 1 << 16, 8, 1.0),
)
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "method": "ring"}


def packing(documents: int, tokens: int, spread: float, seed: int) -> list[int]:
    """Document boundaries of a packed row."""
    lengths = np.random.default_rng(seed).lognormal(0, spread, documents)
    ends = np.cumsum(lengths / lengths.sum() * tokens).astype(int)
    return sorted({0, tokens, *(int(e) for e in ends if e < tokens)})


def measure(documents: int, tokens: int, ranks: int, spread: float) -> dict[str, object]:
    """One row of the table."""
    times: list[float] = []
    for seed in range(9):
        bounds = packing(documents, tokens, spread, seed)
        start = time.process_time()
        p = plan(cu_seqlens=bounds, size=ranks, rank=seed % ranks, **HEADS)
        assert p.shard_ranges
        assert p.tiles(p.ring_rank)
        for index in range(len(p.rounds) if p.direct else 0):
            p.round_tiles(index)
        times.append(1e3 * (time.process_time() - start))
    p = plan(cu_seqlens=packing(documents, tokens, spread, 0), size=ranks, rank=0, **HEADS)
    row = 2 * HEADS["num_kv_heads"] * HEADS["head_dim"] * 2
    ring = plan(tokens, size=ranks, rank=0, layout="zigzag", **HEADS).costs.forward_bytes
    bound = int(p.rows_needed.sum()) * row
    return {
        "documents": documents, "tokens": tokens, "ranks": ranks, "spread": spread, "layout": p.layout,
        "direct": p.direct, "imbalance": round(p.imbalance, 4), "ring_mib": ring / 2**20,
        "bound_mib_mean": bound / ranks / 2**20, "sent_mib_mean": sum(p.sent_rows) * row / ranks / 2**20,
        "sent_mib_busiest": max(p.sent_rows) * row / 2**20, "planning_ms": round(statistics.median(times), 1),
    }  # fmt: skip


def planning_ms(layout: str) -> float:
    """CPU time to plan a packing that was not seen before: one rank's ranges, and its tiles or its exchange."""
    times: list[float] = []
    for seed in range(9):
        bounds = packing(1047, 1 << 20, 1.0, 100 + seed)
        start = time.process_time()
        p = plan(cu_seqlens=bounds, size=64, rank=seed, layout=layout, **HEADS)
        assert p.shard_ranges
        assert p.tiles(p.ring_rank)
        for index in range(len(p.rounds) if p.direct else 0):
            p.round_tiles(index)
        times.append(1e3 * (time.process_time() - start))
    return round(statistics.median(times), 1)


def main() -> None:
    """Run every case."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [measure(*case) for case in CASES]
    print("| documents | tokens | ranks | spread | layout | imbalance | ring, MiB | bound, MiB | sent, mean | sent, busiest "
          "| planning, ms |")  # fmt: skip
    print("| ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        print(
            f"| {r['documents']} | {r['tokens']} | {r['ranks']} | {r['spread']} | {r['layout']} | {r['imbalance']:.3f} "
            f"| {r['ring_mib']:.0f} | {r['bound_mib_mean']:.1f} | {r['sent_mib_mean']:.1f} | {r['sent_mib_busiest']:.1f} "
            f"| {r['planning_ms']} |"
        )
    planning = {layout: planning_ms(layout) for layout in LAYOUTS}
    print("\n| layout | planning, ms |\n| --- | ---: |")
    for layout, took in planning.items():
        print(f"| {layout} | {took} |")
    print(json.dumps({
        "planning_ms": planning, "benchmark": "cp_packed_bytes", "torch": torch.__version__, "machine": platform.machine(),
        "cpus": os.cpu_count(), "rows": rows,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
