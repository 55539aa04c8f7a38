"""Does the ring hide its transfers behind compute?

Question: with a link that takes a known time for each message, what share of the transfer time does a rank spend
waiting?

Method: real gloo ranks run ring attention forward and backward. Each message is held back until ``delay`` after it was
posted, as on a link with that latency. A message's *exposed* time is what is left of its delay when the rank comes to
wait for it; hidden share = 1 - exposed / total delay. ``serial`` posts the same messages and waits at once: what no
overlap costs. Median over repeats, of the slowest rank.

Output: a table, and one JSON object on the last line.

Limits: the delay stands for latency, not for bandwidth shared with other traffic; waiting for a slower rank is not
counted, nor is the time that posting takes; compute is the CPU's, so compare the delay with the printed time of a step.
In the backward the very last message (dK, dV going home) has nothing behind it, so 1 of the ring's 3N - 2 messages is
always exposed: at most 0.90 can be hidden at N = 4, 0.95 at N = 8.

Example: ``python packages/titan-cp/benchmarks/overlap.py --ranks 4 --delay-ms 20``
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from titan_cp import plan, ring_attention
from titan_testing import run_ranks


class HeldBack:
    """A transfer that completes no earlier than its deadline."""

    def __init__(self, work, deadline, exposed):
        self._work, self._deadline, self._exposed = work, deadline, exposed

    def wait(self):
        left = self._deadline - time.perf_counter()
        if left > 0:
            self._exposed.append(left)
            time.sleep(left)
        return self._work.wait()


def run(mode, tokens, delay_s, repeats):
    rank, size = dist.get_rank(), dist.get_world_size()
    post = dist.batch_isend_irecv
    exposed, posted = [], []

    def delayed(ops):
        posted.append(delay_s)
        works = post(ops)
        deadline = time.perf_counter() + delay_s
        if mode == "serial":
            held = [HeldBack(w, deadline, exposed) for w in works]
            for work in held:
                work.wait()
            return []
        # One message a post: its send and its receive end together, so only one of them carries the delay.
        return [HeldBack(works[0], deadline, exposed), *works[1:]]

    p = plan(tokens * size, size=size, rank=rank, num_heads=8, num_kv_heads=2, head_dim=64, method="ring")
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, h, p.local_len, 64, requires_grad=True) for h in (8, 2, 2))
    if mode != "plain":
        dist.batch_isend_irecv = delayed
    results = []
    for _ in range(repeats + 1):
        exposed.clear()
        posted.clear()
        dist.barrier()
        start = time.perf_counter()
        ring_attention(q, k, v, plan=p, group=dist.group.WORLD).sum().backward()
        results.append((time.perf_counter() - start, sum(exposed), sum(posted)))
    return results[1:]  # the first is a warm-up


def summary(mode, options):
    ranks = run_ranks(run, options.ranks, mode, options.tokens, options.delay_ms / 1e3, options.repeats, timeout_s=500)
    seconds = statistics.median(max(r[i][0] for r in ranks) for i in range(options.repeats))
    hidden = [1 - max(r[i][1] for r in ranks) / ranks[0][i][2] for i in range(options.repeats) if ranks[0][i][2]]
    return seconds, statistics.median(hidden) if hidden else None, ranks[0][0][2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a rank")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="time a message takes")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rows = {mode: summary(mode, options) for mode in ("plain", "overlapped", "serial")}
    for mode, (seconds, hidden, delay) in rows.items():
        share = "" if hidden is None else f"   hidden {hidden:.3f} of {delay * 1e3:.0f} ms in flight"
        print(f"{mode:<11} {seconds * 1e3:8.1f} ms{share}")
    step_ms = rows["plain"][0] * 1e3 / (2 * options.ranks)
    print(f"a step computes for {step_ms:.0f} ms on average, a message takes {options.delay_ms:g} ms")
    print(
        json.dumps(
            {
                "benchmark": "cp_overlap",
                "config": vars(options),
                "step_compute_ms": step_ms,
                "hidden_share": rows["overlapped"][1],
                "hidden_share_limit": 1 - 1 / (3 * options.ranks - 2),
                "forward_backward_ms": {mode: row[0] * 1e3 for mode, row in rows.items()},
                "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
                "torch": torch.__version__,
                "commit": commit(),
            }
        )
    )


def commit():
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
