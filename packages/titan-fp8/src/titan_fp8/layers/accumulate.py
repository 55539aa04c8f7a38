"""Weight gradients added to a float32 buffer by the product that computes them.

`titan_fp8.MainGradients` sets ``main_grad`` on weights, the name that Megatron-LM's gradient accumulation fusion gave it. A
backward that finds it adds there and gives autograd nothing. Where torch has a product that adds (``addmm`` with an output
dtype; ``scaled_addmm_``, since 2.15), the sum costs no pass of its own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_fp8.dispatch import implementation
from titan_fp8.ops.declare import watched
from titan_fp8.products import Products, QTensor
from titan_fp8.recipe import Recipe


def main_grad_of(w: Tensor) -> Tensor | None:
    """The buffer of a weight, float32 ``[N, K]``; None where autograd accumulates."""
    return None if torch.compiler.is_compiling() else getattr(w, "main_grad", None)


def add_float8(main: Tensor, products: Products, g: QTensor, x: QTensor) -> None:
    """``main += gᵀ · x`` of an output gradient and an input that were cast for a weight gradient."""
    if products.recipe.wgrad == "hp":
        assert g.hp is not None
        assert x.hp is not None
        add_product(main, g.hp, x.hp)
    elif not _add_scaled(main, g, x, products.recipe):
        main.add_(products.weight_gradient(g, x, torch.float32))


def add_product(main: Tensor, g: Tensor, x: Tensor) -> None:
    """``main += gᵀ · x``, multiplied in ``g``'s dtype and summed in float32."""
    x = x.to(g.dtype)
    if g.is_cuda and g.dtype != torch.float32:
        torch.addmm(main, g.t(), x, out_dtype=torch.float32, out=main)
    else:
        main.addmm_(g.t().float(), x.float())


def _add_scaled(main: Tensor, g: QTensor, x: QTensor, recipe: Recipe) -> bool:
    """The float8 product that adds to its result, where there is one: False, and nothing done, otherwise."""
    a, b = g.data_t, x.data_t
    if a is None or b is None or not main.is_cuda or watched() or not hasattr(F, "scaled_addmm_"):
        return False
    case = f"{recipe.g.gran}·{recipe.x.gran}"
    # One scale per row runs on CUTLASS, which adds nothing; what is padded is larger than the buffer.
    if (
        case not in ("tensor·tensor", "block1x128·block1x128")
        or main.shape != (a.shape[0], b.shape[0])
        or not a.numel()
    ):
        return False
    from titan_fp8.kernels.products import add_scaled_mm_cublaslt, scaled_mm_cublaslt

    if implementation("scaled_mm", main.device, "auto", case) is not scaled_mm_cublaslt:
        return False
    assert g.scale_t is not None
    assert x.scale_t is not None
    add_scaled_mm_cublaslt(main, a, g.scale_t, b, x.scale_t, recipe.g.gran, recipe.x.gran, recipe.fast_accum[2])
    return True


class AccumulatingLinear(nn.Linear):
    """``nn.Linear``, whose backward adds to its weight's ``main_grad`` where that is set."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``."""
        w = self.weight
        plain = main_grad_of(w) is None or not torch.is_grad_enabled() or not w.requires_grad
        if plain or watched() or input.dtype != w.dtype or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, w, self.bias)
        out = _Accumulating.apply(input.reshape(-1, input.shape[-1]), w, self.bias)
        return torch.ops.aten._unsafe_view.default(out, [*input.shape[:-1], self.out_features])


class _Accumulating(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.owner = w  # what is saved may come back as a copy, without main_grad
        return F.linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        x, w = ctx.saved_tensors
        dx = g @ w if ctx.needs_input_grad[0] else None
        db = g.sum(0) if ctx.needs_input_grad[2] else None
        main = main_grad_of(ctx.owner)
        if main is None:  # the block was left between forward and backward
            return dx, g.t() @ x, db
        add_product(main, g, x)
        return dx, None, db
