"""Does Muon's step hide its messages behind its updates?

Question: with a link that takes a known time for each message, what share of that time does a rank spend waiting?

Method: real gloo ranks hold row shards of matrices, as FSDP cuts them, and of an embedding that AdamW updates. Each all-to-all is
held back until ``--delay-ms`` after it was posted. A message's *exposed* time is what is left of its delay when the rank comes to
wait for it. ``serial`` posts the same messages and waits at once: what no overlap costs. The weights after all steps are the same
bits in each mode, or the command fails. Median over steps, of the slowest rank.

Output: a table, and one JSON object on the last line.

Limits: the delay stands for latency, not for bandwidth that is shared; compute is a CPU's. Of b buckets' 2 b messages the first
one and the last one have only AdamW's updates beside them.

Example: ``python packages/titan-train/benchmarks/muon_overlap.py --ranks 2 --matrices 8 --buckets 4 --delay-ms 20``
"""

import argparse
import json
import os
import platform
import statistics
import time

import torch
import torch.distributed as dist
from async_tp import HeldBack
from titan_testing import preload, run_ranks
from titan_train.config.optimizer import MuonConfig, OptimizerConfig
from titan_train.optim import build_optimizer, ownership
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def run(mode, options):
    """One rank: seconds, exposed seconds and messages of each step, and a digest of its weights."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = nn.Module()
    model.words = nn.Embedding(options.vocab, options.width)
    model.layers = nn.ModuleList(nn.Linear(options.width, options.width, bias=False) for _ in range(options.matrices))
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = torch.randn(parameter.shape, generator=generator)
            setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    ownership.plan_ownership.__kwdefaults__["bucket_elements"] = (
        options.matrices * options.width**2 // (options.buckets * size)
    )
    optimizer = build_optimizer(
        model, OptimizerConfig(name="muon", lr=1e-2, muon=MuonConfig(dtype="fp32")), group=dist.group.WORLD
    )
    exposed, posted, post = [], [], dist.all_to_all_single

    def delayed(*args, **kwargs):
        work = post(*args, **kwargs)
        posted.append(time.perf_counter() + options.delay_ms / 1e3)
        held = HeldBack(work, posted[-1], exposed)
        if mode == "serial":
            held.wait()
        return held

    if mode != "plain":
        dist.all_to_all_single = delayed
    found = []
    for step in range(options.steps + 1):
        for parameter in model.parameters():
            parameter.grad = distribute_tensor(
                torch.randn(parameter.shape, generator=generator.manual_seed(step)), mesh, [Shard(0)]
            )
        exposed.clear()
        posted.clear()
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        found.append((time.perf_counter() - start, sum(exposed), len(posted)))
    digest = [p.to_local().double().sum().item() for p in model.parameters()]
    return found[1:], digest  # the first is a warm-up


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--matrices", type=int, default=8)
    parser.add_argument("--buckets", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--vocab", type=int, default=4096, help="rows of the embedding")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="time a message takes")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    preload("titan_train.optim.build", "torch.distributed.tensor")
    rows, digests = {}, []
    for mode in ("plain", "overlapped", "serial"):
        ranks = run_ranks(run, options.ranks, mode, options, timeout_s=600)
        digests.append([digest for _, digest in ranks])
        steps = [found for found, _ in ranks]
        seconds = statistics.median(max(r[i][0] for r in steps) for i in range(options.steps))
        exposed = statistics.median(max(r[i][1] for r in steps) for i in range(options.steps))
        rows[mode] = {"step_ms": 1e3 * seconds, "exposed_ms": 1e3 * exposed, "messages": steps[0][0][2]}
        print(
            f"{mode:<11} {1e3 * seconds:8.1f} ms a step, exposed {1e3 * exposed:7.1f} ms of {steps[0][0][2]} messages"
        )
    assert digests[0] == digests[1] == digests[2], "the order of messages changed the weights"
    print(
        json.dumps(
            {
                "benchmark": "muon_overlap",
                "config": vars(options),
                "modes": rows,
                "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
