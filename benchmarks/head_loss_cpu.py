"""The loss in the head against whole logits, on the CPU: CPU time and peak memory.

Question: what do the head and its cross-entropy cost, forward and backward, a chunk of tokens at a time and with whole
logits in float32?

Method: one thread, each case in a process of its own, in turn; medians of the thread's CPU time; memory is how much the
process's largest resident size grows in the first call after a small one.

Output: a row per case; one JSON object on the last line.

    python benchmarks/head_loss_cpu.py
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from titan_train.parallel.head_loss import linear_cross_entropy_sum

CASES = {"quick start": (1024, 256, 4096), "vocabulary of 128k": (2048, 64, 128 * 1024)}


def whole(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def measure(kind: str, tokens: int, width: int, vocab: int, repeats: int, queue) -> None:
    """Milliseconds and MiB of one case, into ``queue``."""
    torch.set_num_threads(1)
    run = whole if kind == "whole" else linear_cross_entropy_sum
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = (torch.randn(vocab, width) * 0.1).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,))

    def step(rows: int) -> None:
        torch.autograd.grad(run(hidden[:rows], weight, labels[:rows]), (hidden, weight))

    step(16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(tokens)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        step(tokens)
        taken.append((time.thread_time() - began) * 1e3)
    queue.put({"ms": statistics.median(taken), "mib": grown})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = {}
    for name, shape in CASES.items():
        for kind in ("whole", "chunked"):
            queue = context.Queue()
            process = context.Process(target=measure, args=(kind, *shape, arguments.repeats, queue))
            process.start()
            rows[f"{name}, {kind}"] = found = queue.get()
            process.join()
            print(f"{name:20} {kind:8} {found['ms']:8.0f} ms {found['mib']:8.0f} MiB", flush=True)
    print(json.dumps({"benchmark": "head_loss_cpu", "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
