"""The head and its loss on this device: a chunk of tokens at a time, beside whole logits in float32.

Question: what do the head and its cross-entropy cost, forward and backward, in chunks of several sizes and with whole logits;
and what do the kernels of the softmax and adding to the weight's gradient inside the product save?

Method: hidden states of 8,192 tokens of width 4,096 and a vocabulary of 128,256 in bfloat16, medians of whole calls, in turn.
The gradients are compared with those of whole logits first. "added
apart" makes each product in float32 and adds it then; "plain softmax" is that of torch, in float32.

Output: a row per way; one JSON object on the last line.

    python benchmarks/gpu/head_loss.py --device cuda
    python benchmarks/gpu/head_loss.py --device cpu --tiny
"""

import argparse
import json

import torch
import torch.nn.functional as F
from timing import median_ms, peak_gib
from titan_train.models.shape import head_chunk_rows
from titan_train.parallel import head_loss
from torch import Tensor


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss as a loop by hand writes it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def never(self: object, logits: Tensor) -> bool:
    """Whether kernels take the logits: plain torch does."""
    del self, logits
    return False


def added_apart(into: Tensor, of_logits: Tensor, hidden: Tensor, *, first: bool) -> None:
    """As `titan_train.parallel.head_loss` does it where no product can add."""
    more = {"out_dtype": into.dtype} if into.is_cuda else {}
    product = torch.mm(of_logits.t(), hidden, **more)
    into.copy_(product) if first else into.add_(product)


def main() -> None:
    """Measure each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes: the code is checked, the figures mean nothing"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    tokens, width, vocab = (192, 32, 320) if arguments.tiny else (8192, 4096, 128_256)
    usual = 64 if arguments.tiny else head_chunk_rows(vocab, device.type)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=device) * width**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=device)
    inside, kernels = head_loss._add_product, head_loss._Sums._by_kernels
    ways = {"whole logits": (0, inside, kernels)}
    ways |= {f"chunks of {rows}": (rows, inside, kernels) for rows in (usual // 2, usual, 2 * usual, 4 * usual)}
    ways |= {f"chunks of {usual}, plain softmax": (usual, inside, never)}
    ways |= {f"chunks of {usual}, plain softmax, added apart": (usual, added_apart, never)}
    want = torch.autograd.grad(whole(hidden, weight, labels), (hidden, weight))
    rows = {}
    for name, (chunk, add, by_kernels) in ways.items():
        head_loss._add_product, head_loss._Sums._by_kernels = add, by_kernels

        def step(chunk: int = chunk) -> tuple[Tensor, ...]:
            if not chunk:
                loss = whole(hidden, weight, labels)
            else:
                loss = head_loss.linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk)
            return torch.autograd.grad(loss, (hidden, weight))

        apart = max(
            ((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(step(), want, strict=True)
        )
        rows[name] = {"ms": median_ms(step, device, repeats=8, inner=2), "gib": peak_gib(step, device), "apart": apart}
        print(
            f"{name:44}{rows[name]['ms']:9.2f} ms  {rows[name]['gib']:6.2f} GiB  gradients apart {apart:.1e}",
            flush=True,
        )
        assert apart < 0.02, f"{name}: the gradients differ by {apart}"
    print(json.dumps({"benchmark": "gpu_head_loss", "device": str(device), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
