"""Which kernels of fla-core and of torch equal plain torch on this device, and how fast they are.

Question: layers with a state, packed attention, and attention within a window with and without sinks: which candidate does
the first call take (`titan_cp.backends.choose_kernel`), why not the others, and what does a call cost with it and in
plain torch, forward and backward?

Method: shapes of Qwen3-Next and Kimi Linear (32 value heads, 128 channels) and of gpt-oss (64 query, 8 key heads, 64 channels,
window 128), bfloat16, one row of 8,192 tokens in four documents. Medians of whole calls. What the first call itself costs is
beside it: it compiles the kernels.

Output: a row per operation; one JSON object on the last line. A kernel that is not equal is a finding, not a failure.

    python benchmarks/gpu/kernel_choices.py --device cuda
    python benchmarks/gpu/kernel_choices.py --device cpu --tiny
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator

import torch
from timing import median_ms
from titan_cp import backends, local_linear_attention
from titan_cp.state.linear import plain_rows
from titan_train.models.common.packed import packed_attention, plain_attention
from titan_train.models.common.windowed import plain_windowed, windowed_attention
from torch import Tensor

Step = Callable[[], object]


def cases(device: torch.device, tiny: bool) -> Iterator[tuple[str, Step, Step]]:
    """Name, the operation as models call it, and in plain torch: forward and backward."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokens, heads, width, window = (96, 2, 16, 24) if tiny else (8192, 32, 128, 128)
    ends = [0, 3, tokens // 4, tokens // 2, tokens]
    bounds = torch.tensor(ends, dtype=torch.int32, device=device)
    documents = torch.bucketize(torch.arange(tokens, device=device), bounds[1:], right=True).unsqueeze(0)

    def leaf(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(kind).requires_grad_()

    for name, channels, delta in (
        ("gated delta rule", False, True), ("KDA", True, True), ("Mamba-2", False, False), ("gated linear", True, False)
    ):  # fmt: skip
        q, k = (
            torch.nn.functional.normalize(leaf(1, heads, tokens, width).detach(), dim=-1).requires_grad_() for _ in "qk"
        )
        v = leaf(1, heads, tokens, width)
        decay = (
            -leaf(1, heads, tokens, *((width,) if channels else ()), kind=torch.float32).detach().abs()
        ).requires_grad_()
        beta = leaf(1, heads, tokens).detach().sigmoid().requires_grad_() if delta else None
        given = (q, k, v, decay, beta)

        def run(given=given):
            return local_linear_attention(*given, documents=documents, boundaries=bounds)[0]

        def plain(given=given):
            return plain_rows(*given, bounds=bounds.long(), scale=width**-0.5)[0]

        yield name, both_ways(run, given), both_ways(plain, given)
    query_heads, key_heads, narrow = (4, 2, 16) if tiny else (64, 8, 64)
    q, k, v = (
        leaf(1, tokens, query_heads, narrow),
        leaf(1, tokens, key_heads, narrow),
        leaf(1, tokens, key_heads, narrow),
    )
    flat = tuple(x.detach()[0].requires_grad_() for x in (q, k, v))
    yield (
        "packed attention",
        both_ways(lambda: packed_attention(*flat, bounds, tokens), flat),
        both_ways(lambda: plain_attention(*flat, bounds, tokens, causal=True), flat),
    )
    places = torch.arange(tokens, device=device)
    apart = places[:, None] - places
    mask = ((apart >= 0) & (apart < window) & (documents.mT == documents))[None]
    for name, sinks in (("windowed attention", None), ("windowed attention with sinks", leaf(query_heads))):
        given = (q, k, v, *(() if sinks is None else (sinks,)))

        def run(sinks=sinks):
            return windowed_attention(q, k, v, mask, boundaries=bounds, window=window, sinks=sinks)

        def plain(sinks=sinks):
            return plain_windowed(q, k, v, bounds, window, sinks)

        yield name, both_ways(run, given), both_ways(plain, given)


def both_ways(forward: Callable[[], Tensor], given: tuple[Tensor | None, ...]) -> Step:
    """Forward and backward."""
    wanted = [x for x in given if x is not None]
    return lambda: torch.autograd.grad(forward().float().square().sum(), wanted)


def main() -> None:
    """Try, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    repeats = {"repeats": 2, "inner": 1} if arguments.tiny else {"repeats": 5, "inner": 2}
    rows: dict[str, dict[str, object]] = {}
    for name, run, plain in cases(device, arguments.tiny):
        known, row = len(backends.kernel_choices()), {}
        try:
            began = time.perf_counter()
            run()
            row["first_s"] = round(time.perf_counter() - began, 2)
            row["chosen"] = [str(choice) for choice in backends.kernel_choices()[known:]]
            row |= {"ms": median_ms(run, device, **repeats), "plain_ms": median_ms(plain, device, **repeats)}
        except Exception as err:  # the next operation may still tell something
            row["error"] = f"{type(err).__name__}: {err}"[:300]
        rows[name] = row
        print(f"{name:30} {row}", flush=True)
    print(
        json.dumps({"benchmark": "gpu_kernel_choices", "device": str(device), "torch": torch.__version__, "rows": rows})
    )


if __name__ == "__main__":
    main()
