"""Attention as the models call it: causal, packed with a dense mask, and packed with a variable-length kernel.

Question: what does packing cost in time and memory, with the path that the models take, against the causal kernel and a
dense mask of the same documents? And latent attention, whose values are narrower than its keys, against padded values?

Method: 8B heads (32 query, 8 key-value, width 128), one row of documents with log-normal lengths of about 1,024 tokens;
forward and backward; medians of whole calls. Memory is the allocator's peak beyond the inputs.

Output: a row per case; one JSON object on the last line.

    python benchmarks/gpu/attention.py --device cuda
    python benchmarks/gpu/attention.py --device cpu --tiny
    python benchmarks/gpu/attention.py --device cpu --seq-lens 2048 8192 --mean 512
"""

import argparse
import json
import random

import torch
import torch.nn.functional as F
from timing import median_ms, peak_gib
from titan_train.models.common.attention import attend, document_mask
from titan_train.models.common.packed import packed_attention, packed_boundaries


def documents(seq_len: int, mean: int) -> list[int]:
    """Cumulative lengths."""
    rng = random.Random(0)
    ends = [0]
    while ends[-1] < seq_len:
        ends.append(min(seq_len, ends[-1] + max(1, int(rng.lognormvariate(0, 1) * mean / 1.65))))
    return ends


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--mean", type=int, default=1024, help="mean length of a document")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows = {}
    for seq_len in (64,) if arguments.tiny else arguments.seq_lens:
        ends = documents(seq_len, 16 if arguments.tiny else arguments.mean)
        for name, (forward, inputs) in cases(ends, dtype, device, arguments.tiny).items():
            try:
                step = lambda f=forward, i=inputs: torch.autograd.grad(f(*i).sum(), i)  # noqa: E731
                row = {"ms": median_ms(step, device, repeats=5, inner=2), "gib": peak_gib(step, device)}
            except (RuntimeError, ImportError, TypeError) as err:
                row = {"error": f"{type(err).__name__}: {err}"[:200]}
            rows[f"{name}, {seq_len}"] = row
            print(
                f"{name:22} {seq_len:6} tokens  "
                + "  ".join(
                    f"{key} {value if isinstance(value, str) else f'{value:.3f}'}" for key, value in row.items()
                ),
                flush=True,
            )
    print(json.dumps({"benchmark": "gpu_attention", "device": str(device), "torch": torch.__version__, "rows": rows}))


def cases(ends, dtype, device, tiny):
    """Name to a function and its inputs ``[1, heads, S, width]``."""
    seq_len = ends[-1]

    def leaf(heads, width):
        return torch.randn(1, heads, seq_len, width, device=device, dtype=dtype).requires_grad_()

    # the 8B shape's grouped heads, and DeepSeek-V3's latent attention on one of eight tensor-parallel ranks
    grouped = [leaf(*shape) for shape in (((4, 16), (2, 16), (2, 16)) if tiny else ((32, 128), (8, 128), (8, 128)))]
    latent = [leaf(*shape) for shape in (((2, 24), (2, 24), (2, 16)) if tiny else ((16, 192), (16, 192), (16, 128)))]
    cu_seqlens = torch.tensor([ends], device=device, dtype=torch.int32)
    mask, boundaries = document_mask(cu_seqlens, seq_len), packed_boundaries(cu_seqlens, seq_len)

    def packed(q, k, v):
        return packed_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), boundaries, seq_len)

    def repeated(q, k, v):  # a dense mask, as the only kernel that takes one on CUDA wants it
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def padded(q, k, v):
        return packed(q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])))

    return {
        "causal": (lambda q, k, v: attend(q, k, v, None), grouped),
        "packed": (packed, grouped),
        "packed, dense mask": (repeated, grouped),
        "latent, causal": (lambda q, k, v: attend(q, k, v, None), latent),
        "latent, packed": (packed, latent),
        "latent, packed, padded": (padded, latent),
    }


if __name__ == "__main__":
    main()
