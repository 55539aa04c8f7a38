"""Packed rows on the CPU: document by document against a dense mask.

Question: what do forward and backward of one attention cost by `packed_attention`, and by torch's attention with a mask
[B, 1, S, S] of the same documents, in CPU time and in bytes of the mask?

Method: one thread; documents with log-normal lengths of a mean of 512 tokens, 4 heads of 64 channels; both are called in
turn, medians of the thread's CPU time. Results are compared first.

Output: a row per length; one JSON object on the last line.

    python benchmarks/packed_attention_cpu.py --seq-lens 256 2048 4096
"""

import argparse
import json
import random
import statistics
import time

import torch
from titan_train.models.common.attention import attend, document_mask
from titan_train.models.common.packed import packed_attention, packed_boundaries


def documents(rng: random.Random, seq_len: int) -> list[int]:
    """Cumulative lengths of one row."""
    ends = [0]
    while ends[-1] < seq_len:
        ends.append(min(seq_len, ends[-1] + max(1, int(rng.lognormvariate(0, 1) * 310))))
    return ends


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seq_len in arguments.seq_lens:
        rng, batch = random.Random(0), max(1, 1024 // seq_len)
        each = [documents(rng, seq_len) for _ in range(batch)]
        width = max(map(len, each))
        cu_seqlens = torch.tensor([ends + [seq_len] * (width - len(ends)) for ends in each], dtype=torch.int32)
        q, k, v = (torch.randn(batch, seq_len, 4, 64).requires_grad_() for _ in range(3))
        probe = torch.randn(batch, seq_len, 4, 64)

        def packed(q=q, k=k, v=v, cu_seqlens=cu_seqlens, seq_len=seq_len, batch=batch):
            flat = (x.flatten(0, 1) for x in (q, k, v))
            return packed_attention(*flat, packed_boundaries(cu_seqlens, seq_len), seq_len).unflatten(0, (batch, -1))

        def dense(q=q, k=k, v=v, cu_seqlens=cu_seqlens, seq_len=seq_len):
            mask = document_mask(cu_seqlens, seq_len)
            return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2)

        assert (packed() - dense()).abs().max() < 1e-5
        taken = {"packed": [], "dense": []}
        for _ in range(arguments.repeats):
            for name, run in (("packed", packed), ("dense", dense)):
                began = time.thread_time()
                torch.autograd.grad(run(), (q, k, v), probe)
                taken[name].append((time.thread_time() - began) * 1e3)
        row = {
            "seq_len": seq_len,
            "rows": batch,
            "documents": sum(len(ends) - 1 for ends in each),
            "packed_ms": statistics.median(taken["packed"]),
            "dense_ms": statistics.median(taken["dense"]),
            "ratio": statistics.median(d / p for d, p in zip(taken["dense"], taken["packed"], strict=True)),
            "mask_mib": batch * seq_len**2 / 2**20,
        }
        rows.append(row)
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    print(json.dumps({"benchmark": "packed_attention_cpu", "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
