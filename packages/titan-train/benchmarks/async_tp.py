"""Does asynchronous tensor parallelism hide its transfers behind the matrix products?

Question: on links that take a known time for each message, what share of that time does a rank spend waiting?

Method: real gloo ranks run one Llama block (attention and feed-forward, sequence parallel), forward and backward. Each
rank has one link to each neighbour, which carries one message at a time: a message ends ``delay`` after the one before
it on the same link has ended, or after it was posted, whichever is later. A message's *exposed* time is what is left when
the rank comes to wait for it; hidden share = 1 - exposed / time of all messages on the links. Median over repeats, of
the rank that waits longest. The delay is given as a share of the smallest product that a message can hide behind (one
part of ``wo``), which all ranks time together just before. Four modes, in turn:

- ``overlapped``: the ring products of titan_train.parallel.tensor, async_tp=True;
- ``serial``: the same messages, waited for as soon as they are posted: what no overlap costs;
- ``collectives``: plain tensor parallelism, each all-gather and reduce-scatter taking the n - 1 messages of a ring;
- ``no delay``: the ring products on links without delay.

Output: a table, and one JSON object on the last line.

Limits: the delay stands for time on the wire, not for what posting costs the host; waiting for a slower rank is not
counted; compute is the CPU's. On CPU cores that are all busy with the ranks' own products no time can be won by
overlapping with real transfers; with delays that cost no compute, the times of the modes can be compared.

Example: ``python packages/titan-train/benchmarks/async_tp.py --ranks 4 --delay-share 0.8``
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
from titan_testing import run_ranks
from titan_train.models import Llama, LlamaArgs
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.styles import table_for

MODES = ("no delay", "overlapped", "serial", "collectives")


class HeldBack:
    """A transfer that completes no earlier than its deadline."""

    def __init__(self, work, deadline, exposed):
        self._work, self._deadline, self._exposed = work, deadline, exposed

    def wait(self):
        left = self._deadline - time.perf_counter()
        if left > 0:
            self._exposed.append(left)
            time.sleep(left)
        return self._work.wait() if self._work is not None else True


class Links:
    """Links of this rank, and what was posted on them."""

    def __init__(self, delay_s):
        self.mode = "no delay"
        self._delay_s = delay_s
        self._exposed, self._on_the_wire, self._free = [], [], {}
        self._post = dist.batch_isend_irecv
        dist.batch_isend_irecv = self._messages
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            plain = getattr(dist, name)
            setattr(dist, name, lambda *args, plain=plain, **kwargs: self._collective(plain, *args, **kwargs))

    def take(self):
        """Seconds exposed and on the wire since the last call."""
        totals = sum(self._exposed), sum(self._on_the_wire)
        self._exposed.clear()
        self._on_the_wire.clear()
        return totals

    def _deadline(self, peer, messages):
        ends = max(time.perf_counter(), self._free.get(peer, 0.0)) + messages * self._delay_s
        self._free[peer] = ends
        self._on_the_wire.append(messages * self._delay_s)
        return ends

    def _messages(self, ops):
        works = self._post(ops)
        if self.mode == "no delay":
            return works
        (send,) = [op for op in ops if op.op is dist.isend]
        held = HeldBack(works[0], self._deadline(send.peer, 1), self._exposed)
        if self.mode == "serial":
            held.wait()
            for work in works[1:]:
                work.wait()
            return []
        # Its send and its receive end together, so one of them carries the delay.
        return [held, *works[1:]]

    def _collective(self, plain, *args, group, **kwargs):
        work = plain(*args, group=group, **kwargs)
        HeldBack(work, self._deadline("ring", group.size() - 1), self._exposed).wait()


def run(options):
    group, n = dist.group.WORLD, dist.get_world_size()
    smallest = product_s(options)
    slowest = torch.tensor(smallest)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    delay = float(slowest) * options.delay_share
    blocks = {}
    for overlapped in (True, False):
        torch.manual_seed(0)
        heads = options.dim // 64
        model = Llama(
            LlamaArgs(
                dim=options.dim,
                num_layers=1,
                num_heads=heads,
                num_kv_heads=heads,
                ffn_dim=options.ffn_dim,
                vocab_size=64,
            )
        )
        apply_tensor_parallel(model, group, table=table_for(model), sequence_parallel=True, async_tp=overlapped)
        blocks[overlapped] = model.layers["0"]
    context = model.sequence_context(torch.zeros(1, options.tokens * n, dtype=torch.int64), None, None)
    x = torch.randn(1, options.tokens, options.dim, requires_grad=True)
    links = Links(delay)
    results = {mode: [] for mode in MODES}
    for repeat in range(options.repeats + 1):
        for mode in MODES:
            links.mode = mode
            dist.barrier()
            start = time.perf_counter()
            blocks[mode != "collectives"](x, context).sum().backward()
            seconds = time.perf_counter() - start
            if repeat > 0:  # the first is a warm-up
                results[mode].append((seconds, *links.take()))
            else:
                links.take()
    return smallest, delay, results


def product_s(options):
    """Time of the smallest product that a message can hide behind: one part through this rank's columns of ``wo``."""
    columns = options.dim // options.ranks
    a, b = torch.randn(options.tokens, columns), torch.randn(options.dim, columns)
    times = []
    dist.barrier()  # all ranks at once, as in the block
    for _ in range(30):
        start = time.perf_counter()
        a @ b.t()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def summarize(ranks, mode):
    runs = list(zip(*(results[mode] for _, _, results in ranks), strict=True))
    milliseconds = statistics.median(max(seconds for seconds, _, _ in run) for run in runs) * 1e3
    wire = max(wire for _, _, wire in runs[0]) * 1e3
    if wire == 0:
        return milliseconds, None, wire
    return milliseconds, statistics.median(1 - max(e for _, e, _ in run) / run[0][2] for run in runs), wire


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dim", type=int, default=512, help="width of the residual stream, a multiple of 64 * ranks")
    parser.add_argument("--ffn-dim", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=512, help="tokens a rank")
    parser.add_argument(
        "--delay-share", type=float, default=0.8, help="time of a message / time of the smallest product"
    )
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    ranks = run_ranks(run, options.ranks, options, timeout_s=580)
    smallest, delay = max(smallest for smallest, _, _ in ranks) * 1e3, ranks[0][1] * 1e3
    rows = {mode: summarize(ranks, mode) for mode in MODES}
    for mode, (milliseconds, hidden, wire) in rows.items():
        share = "" if hidden is None else f"   hidden {hidden:.3f} of {wire:.0f} ms on the wire"
        print(f"{mode:<12} {milliseconds:8.1f} ms{share}")
    print(f"the smallest product takes {smallest:.2f} ms, a message {delay:.2f} ms")
    print(
        json.dumps(
            {
                "benchmark": "async_tp",
                "config": vars(options),
                "smallest_product_ms": smallest,
                "message_ms": delay,
                "hidden_share": {mode: row[1] for mode, row in rows.items()},
                "on_the_wire_ms": {mode: row[2] for mode, row in rows.items()},
                "forward_backward_ms": {mode: row[0] for mode, row in rows.items()},
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
