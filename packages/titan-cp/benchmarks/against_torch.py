"""titan-cp against torch's own context parallelism, where that runs without a GPU.

Question: on the same ranks, tensors and kernel, how do time and error of torch's all-gather context parallel compare?

Method: torch's public ``context_parallel`` does not run on the CPU (its SDPA dispatcher has no CPU flash), so its two
private ring functions are called with CPU flash as the kernel; they are what it runs on a GPU. Both sides attend to one
causal document in the zigzag layout, forward and backward, taking turns in rotated order. Medians of the slowest rank's time,
of the processor time of all ranks, and of the ratio of torch's processor time to ours in the same round; largest error
against float64 full attention.

Output: a table, and one JSON object on the last line. Above 1, the ratio says that torch takes longer.

Limits: CPU, gloo over loopback; private functions of the installed torch (checked on 2.15); KV heads equal query heads.

Example: ``python packages/titan-cp/benchmarks/against_torch.py --ranks 4 --tokens 512``
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
from titan_cp import attention, plan, reference_attention
from titan_testing import run_ranks


def torch_forward(query, key, value, is_causal, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)


def torch_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale
    )


def run(tokens, heads, head_dim, repeats):
    from torch.distributed.tensor.experimental._context_parallel import _attention as peer

    rank, size = dist.get_rank(), dist.get_world_size()
    group, scale = dist.group.WORLD, head_dim**-0.5
    plans = {
        f"titan {method}": plan(
            tokens * size, size=size, rank=rank, num_heads=heads, head_dim=head_dim, method=method, layout="zigzag"
        )
        for method in ("ring", "allgather", "ulysses")
    }
    p = plans["titan ring"]
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, p.seq_len, head_dim) for _ in range(4)]
    q, k, v, grad_out = (p.shard(t, 2) for t in whole)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def titan(name):
        out = attention(*leaves, plan=plans[name], group=group)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))

    def torch_all_gather():
        out, lse, *_ = peer._templated_ring_attention(group, 2, torch_forward, q, k, v, is_causal=True, scale=scale)
        grads = peer._templated_ring_attention_backward(
            group, 2, torch_backward, grad_out, "grad_out", q, k, v, out, lse, is_causal=True, scale=scale
        )
        return (out, *grads[:3])

    contenders = {"torch all-gather": torch_all_gather, **{n: (lambda n=n: titan(n)) for n in plans}}
    wide = [t.double().requires_grad_() for t in whole[:3]]
    want, _ = reference_attention(*wide)
    wanted = [p.shard(t, 2) for t in (want.detach(), *torch.autograd.grad(want, wide, whole[3].double()))]
    result = {name: {"seconds": [], "cpu": [], "error": 0.0} for name in contenders}
    names = list(contenders)
    for i in range(repeats + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            got = contenders[name]()
            seconds, cpu = time.perf_counter() - start, time.process_time() - used
            if i == 0:  # the first is a warm-up, and is checked
                errors = [float((a.double() - b).abs().max()) for a, b in zip(got, wanted, strict=True)]
                result[name]["error"] = max(errors)
            else:
                result[name]["seconds"].append(seconds)
                result[name]["cpu"].append(cpu)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="tokens a rank")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    sizes = (options.tokens, options.heads, options.head_dim, options.repeats)
    ranks = run_ranks(run, options.ranks, *sizes, timeout_s=500)
    rows = {}
    cpu = {name: [sum(r[name]["cpu"][i] for r in ranks) for i in range(options.repeats)] for name in ranks[0]}
    for name in ranks[0]:
        slowest = [max(r[name]["seconds"][i] for r in ranks) for i in range(options.repeats)]
        rows[name] = {"median_ms": statistics.median(slowest) * 1e3, "fastest_ms": min(slowest) * 1e3}
        rows[name]["cpu_ms"] = statistics.median(cpu[name]) * 1e3
        rows[name]["cpu_ratio"] = statistics.median(
            theirs / ours for theirs, ours in zip(cpu["torch all-gather"], cpu[name], strict=True)
        )
        rows[name]["max_error"] = max(r[name]["error"] for r in ranks)
        print(
            f"{name:<17} median {rows[name]['median_ms']:8.1f} ms   fastest {rows[name]['fastest_ms']:8.1f} ms   "
            f"CPU {rows[name]['cpu_ms']:8.1f} ms   ratio {rows[name]['cpu_ratio']:.2f}   "
            f"max error {rows[name]['max_error']:.1e}"
        )
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    print(
        json.dumps(
            {
                "benchmark": "cp_against_torch",
                "config": vars(options),
                "rows": rows,
                "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
                "load_average": os.getloadavg()[0],
                "torch": torch.__version__,
                "commit": head.stdout.strip() or "unknown",
            }
        )
    )


if __name__ == "__main__":
    main()
