"""Grouped products of experts, forward and backward, against torch's bfloat16 grouped_mm."""

import torch
import torch.nn.functional as F
from measure import Bench
from titan_fp8 import grouped_mm, ops


def run(bench: Bench) -> dict:
    """8 experts, 32768 tokens, 2048×7168: equal groups and skewed ones."""
    experts, tokens = 8, bench.size(32768, 512)
    inputs, outputs = bench.size(7168, 256), bench.size(2048, 128)
    x = bench.random(tokens, inputs, requires_grad=True)
    w = (bench.random(experts, outputs, inputs, seed=1) * inputs**-0.5).requires_grad_()
    g = bench.random(tokens, outputs, seed=2)
    equal = torch.full((experts,), tokens // experts)
    skewed = tokens * torch.tensor([0.5, 0.2, 0.1, 0.08, 0.06, 0.04, 0.02, 0.0])
    skewed = torch.cat([skewed[:-1].int(), (tokens - skewed[:-1].int().sum()).reshape(1)])
    result = {}
    for name, counts in (("equal groups", equal), ("skewed groups", skewed)):
        offs = counts.cumsum(0).to(torch.int32).to(bench.device)
        baseline = bench.median_ms([lambda o=offs: torch.autograd.grad(F.grouped_mm(x, w.mT, offs=o), (x, w), g)])
        row = {"bf16": {"ms": baseline, "speedup": 1.0}}
        for recipe in ("blockwise", "rowwise"):
            ms = bench.median_ms([lambda o=offs, r=recipe: torch.autograd.grad(grouped_mm(x, w.mT, o, r), (x, w), g)])
            row[recipe] = {"ms": ms, "speedup": baseline / ms}
        row |= _products(bench, x.detach(), w.detach(), g, offs)
        result[name] = row
    return result


def _products(bench: Bench, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, offs: torch.Tensor) -> dict:
    """The two grouped products alone, casts done."""
    q, scale, xt, xt_scale, padded = ops.cast_grouped(x, offs)
    _, _, gt, gt_scale, _ = ops.cast_grouped(g, offs)
    weight, weight_scale, *_ = ops.cast_weight_block(w)
    forward = bench.median_ms(
        [lambda: ops.grouped_scaled_mm(q, scale, weight, weight_scale, offs, "block1x128", "block128")]
    )
    wgrad = bench.median_ms([lambda: ops.grouped_scaled_mm_wgrad(gt, gt_scale, xt, xt_scale, padded, "block1x128")])
    tera_flop = 2 * x.shape[0] * x.shape[1] * g.shape[1] / 1e12
    return {
        "forward product": {"tflops": tera_flop / forward * 1e3},
        "weight gradient product": {"tflops": tera_flop / wgrad * 1e3},
    }
