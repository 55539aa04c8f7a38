"""Attention as the models call it: causal, packed with a dense mask, and packed with a variable-length kernel.

Question: what does packing cost in time and memory, with the path that the models take today, against the causal
kernel and against torch's variable-length attention of the same documents?

Method: 8B heads (32 query, 8 key-value, width 128), one row of documents with log-normal lengths of about 1,024 tokens;
forward and backward; medians of whole calls. Memory is the allocator's peak beyond the inputs.

Output: a row per case; one JSON object on the last line.

    python benchmarks/gpu/attention.py --device cuda
    python benchmarks/gpu/attention.py --device cpu --tiny
"""

import argparse
import itertools
import json
import random

import torch
from timing import median_ms, peak_gib
from titan_train.models.common.attention import attend, document_mask


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
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    heads, kv_heads, width = (4, 2, 16) if arguments.tiny else (32, 8, 128)
    rows = {}
    for seq_len in (64,) if arguments.tiny else (4096, 8192, 16384):
        q = torch.randn(1, heads, seq_len, width, device=device, dtype=dtype).requires_grad_()
        k, v = (torch.randn(1, kv_heads, seq_len, width, device=device, dtype=dtype).requires_grad_() for _ in range(2))
        ends = documents(seq_len, 16 if arguments.tiny else 1024)
        mask = document_mask(torch.tensor([ends], device=device, dtype=torch.int32), seq_len)
        cases = {
            "causal": lambda a=q, b=k, c=v: attend(a, b, c, None),
            "dense mask": lambda a=q, b=k, c=v, m=mask: attend(a, b, c, m),
        }
        if device.type == "cuda":
            cases["variable length"] = _varlen(q, k, v, ends)
        for name, forward in cases.items():
            try:
                step = lambda f=forward, i=(q, k, v): torch.autograd.grad(f().sum(), i)  # noqa: E731
                row = {"ms": median_ms(step, device, repeats=5, inner=2), "gib": peak_gib(step, device)}
            except (RuntimeError, ImportError, TypeError) as err:
                row = {"error": f"{type(err).__name__}: {err}"[:200]}
            rows[f"{name}, {seq_len}"] = row
            print(
                f"{name:18} {seq_len:6} tokens  "
                + "  ".join(
                    f"{key} {value if isinstance(value, str) else f'{value:.3f}'}" for key, value in row.items()
                ),
                flush=True,
            )
    print(json.dumps({"benchmark": "gpu_attention", "device": str(device), "torch": torch.__version__, "rows": rows}))


def _varlen(q, k, v, ends):
    """Torch's variable-length attention of the same documents, ``[T, H, D]``."""

    def forward():
        from torch.nn.attention.varlen import varlen_attn

        cu = torch.tensor(ends, device=q.device, dtype=torch.int32)
        longest = max(b - a for a, b in itertools.pairwise(ends))
        parts = [x[0].transpose(0, 1) for x in (q, k, v)]
        groups = q.shape[1] // k.shape[1]
        parts[1:] = [x.repeat_interleave(groups, dim=1) for x in parts[1:]]  # without grouped heads, on every version
        return varlen_attn(*parts, cu, cu, longest, longest, is_causal=True)

    return forward


if __name__ == "__main__":
    main()
