"""What the ring's steps cost against one monolithic flash call, on one device and without any transfer.

Question: cutting attention into N steps means smaller kernels, merges, and float32 sums. What share of the monolithic
kernel's speed is left?

Method: the tiles, backend and accumulators of one rank, as `ring_attention` runs them, with every rank's keys already
here; forward and backward, averaged over the first, middle and last rank. The ideal is the same backend over the whole
sequence in one call, divided by N. Efficiency = ideal / measured; 1 means that steps cost nothing. ``packed`` has
log-normal documents of 4096 tokens on average and the per-document layout.

Output: a table, and one JSON object on the last line. Goals on an H100-class GPU: at least 0.92 at 8k tokens a rank and
0.97 at 32k.

Limits: no communication, so this bounds a real ring from above. The whole sequence must fit the device.

Example, one GPU (not yet measured): ``python packages/titan-cp/benchmarks/simulated_ring.py --tokens 8192 32768``
Without a GPU: ``python packages/titan-cp/benchmarks/simulated_ring.py --device cpu --tokens 512 --heads 4 --kv-heads 2``
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path

import torch
from titan_cp import backends, plan


def time_of(run, device, repeats):
    """Median seconds of ``run()``, after two warm-ups."""
    seconds = []
    for i in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def one_rank(p, rank, whole, backend, scale):
    """A function that runs all ring steps of ``rank``, forward and backward; its output and dQ come back."""
    mine = p.for_rank(rank)
    q, grad_out = (mine.shard(t, 2) for t in (whole["q"], whole["grad_out"]))
    blocks = [torch.stack([p.for_rank(r).shard(whole[t], 2) for t in "kv"]) for r in range(p.size)]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32

    def run():
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        for step in range(p.hops + 1):
            holder = (mine.ring_rank - step) % p.size
            backend.forward(q, *blocks[holder], mine.tiles(holder), scale, out, lse)
        out = out.to(q.dtype)
        grad_q, arriving = torch.zeros(q.shape, dtype=wide, device=q.device), None
        for step in range(p.hops + 1):
            holder = (mine.ring_rank - step) % p.size
            grad_kv = torch.zeros(blocks[holder].shape, dtype=wide, device=q.device)
            saved = backends.Saved(grad_out, q, *blocks[holder], out, lse)
            backend.backward(saved, mine.tiles(holder), scale, backends.Grads(grad_q, *grad_kv))
            arriving = grad_kv if arriving is None else grad_kv.add_(arriving)
        return out, grad_q.to(q.dtype)

    return run


def documents(seq_len, mean):
    rng = random.Random(0)
    bounds = [0]
    while bounds[-1] < seq_len:
        bounds.append(min(seq_len, bounds[-1] + max(1, int(rng.lognormvariate(0, 1) * mean / 1.65))))
    return bounds


def measure(tokens, size, packed, options, device, dtype):
    seq_len = tokens * size
    heads = {"num_heads": options.heads, "num_kv_heads": options.kv_heads, "head_dim": options.head_dim}
    lengths = {"cu_seqlens": documents(seq_len, min(4096, tokens))} if packed else {"seq_len": seq_len}
    p = plan(size=size, rank=0, method="ring", dtype=dtype, **lengths, **heads)
    request = backends.Request(device, dtype, options.head_dim, packed, False)
    backend = backends.select(options.backend, request)
    torch.manual_seed(0)
    counts = {"q": options.heads, "k": options.kv_heads, "v": options.kv_heads, "grad_out": options.heads}
    whole = {n: torch.randn(1, h, seq_len, options.head_dim, device=device, dtype=dtype) for n, h in counts.items()}
    scale = options.head_dim**-0.5
    single = plan(size=1, rank=0, method="ring", dtype=dtype, **lengths, **heads)
    with torch.no_grad():
        monolithic = one_rank(single, 0, whole, backend, scale)
        whole_s = time_of(monolithic, device, options.repeats)
        want = monolithic()
        ranks = sorted({0, size // 2, size - 1})
        seconds = []
        for rank in ranks:
            run = one_rank(p, rank, whole, backend, scale)
            seconds.append(time_of(run, device, options.repeats))
            for got, expected in zip(run(), want, strict=True):
                error = (got - p.for_rank(rank).shard(expected, 2)).abs().max().item()
                assert error < (0.1 if dtype == torch.bfloat16 else 1e-4), f"rank {rank} is off by {error}"
    efficiency = whole_s / size / statistics.mean(seconds)
    return {
        "tokens_per_rank": tokens,
        "ranks": size,
        "packed": packed,
        "backend": backend.name,
        "monolithic_ms": whole_s * 1e3,
        "rank_ms": statistics.mean(seconds) * 1e3,
        "efficiency": efficiency,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    rows = []
    for tokens in options.tokens:
        for size in options.ranks:
            for packed in (False, True):
                row = measure(tokens, size, packed, options, device, dtype)
                rows.append(row)
                kind = "packed, per document" if packed else "one document, zigzag"
                print(
                    f"{tokens:>6} tokens a rank, {size} ranks, {kind:<21} {row['backend']:<11} "
                    f"one call / {size} {row['monolithic_ms'] / size:9.2f} ms   ring {row['rank_ms']:9.2f} ms   "
                    f"efficiency {row['efficiency']:.3f}",
                    flush=True,
                )
    cuda = device.type == "cuda"
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:  # images for GPUs often have no git
        head = ""
    print(
        json.dumps(
            {
                "benchmark": "cp_simulated_ring",
                "config": vars(options),
                "rows": rows,
                "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "commit": head or "unknown",
            }
        )
    )


if __name__ == "__main__":
    main()
