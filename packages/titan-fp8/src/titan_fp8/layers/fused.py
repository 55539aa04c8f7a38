"""RMSNorm and SwiGLU before float8 linears, with the cast in the same kernel: their result is never written to memory.

`norm_linears` is ``linears(rms_norm(x))`` and `swiglu_linear` is ``linear(swiglu(gate, up))``, with the same gradients. Where the
recipe has a kernel for both in one (``blockwise``), that runs, and a layer saves one write and one read of its input; with
other recipes the two run one after the other. `rms_norm` and `swiglu` alone are the unfused twins: the same roundings in
the same places, so that fused and unfused layers compute the same.

What is kept for backward is what the unfused pair would keep.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from titan_fp8 import ops
from titan_fp8.differentiable import differentiable_once
from titan_fp8.layers.functional import (
    Call,
    fused_call,
    gradients,
    is_fused,
    linear,
    linears,
    multiply,
    unflatten,
)
from titan_fp8.ops.declare import run_op
from titan_fp8.products import QTensor
from titan_fp8.recipe import Recipe
from titan_fp8.weights.cache import WeightCache


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, in float32, rounded once.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32.
        weight: ``[K]``.
        eps: Added to the mean square.

    Returns:
        ``[..., K]`` in ``x``'s dtype.
    """
    return cast(Tensor, _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps)).view(x.shape)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up`` in float32, rounded once (arXiv:2002.05202).

    Args:
        gate: ``[..., F]``, bfloat16, float16 or float32.
        up: The same shape and dtype.
    """
    width = gate.shape[-1]
    return cast(Tensor, _SwiGLU.apply(gate.reshape(-1, width), up.reshape(-1, width))).view(gate.shape)


def norm_linears(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    recipe: str | Recipe = "blockwise",
    *,
    caches: Sequence[WeightCache | None] | None = None,
) -> tuple[Tensor, ...]:
    """`linears` of `rms_norm` of ``x``, which is normalized and cast in one pass where the recipe is blockwise.

    Args:
        x: ``[..., K]``.
        norm_weight: ``[K]``.
        eps: Of the norm.
        weights: Each ``[N_i, K]``.
        biases: One per weight; None where no layer has a bias.
        recipe: A recipe or its name.
        caches: One per weight; see `titan_fp8.linear`.

    Returns:
        One output per weight, ``[..., N_i]``.

    Raises:
        ValueError: If the shapes do not fit.
    """
    chosen = Recipe.get(recipe)
    if not is_fused(chosen):
        return linears(rms_norm(x, norm_weight, eps), weights, biases, chosen, caches=caches)
    more = norm_weight.requires_grad
    rows, call, found, parameters = fused_call(chosen, x, weights, biases, caches, more_input_grad=more)
    outs = cast("tuple[Tensor, ...]", _NormLinears.apply(rows, norm_weight, eps, call, found, *parameters))
    return tuple(unflatten(out, x) for out in outs)


def swiglu_linear(
    gate: Tensor,
    up: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "blockwise",
    *,
    cache: WeightCache | None = None,
) -> Tensor:
    """`linear` of `swiglu` of ``gate`` and ``up``, which is computed and cast in one pass where the recipe is blockwise.

    Args:
        gate: ``[..., K]``.
        up: The same shape and dtype.
        w: ``[N, K]``.
        bias: ``[N]``.
        recipe: A recipe or its name.
        cache: See `titan_fp8.linear`.

    Returns:
        ``[..., N]``.

    Raises:
        ValueError: If the shapes do not fit.
    """
    chosen = Recipe.get(recipe)
    if not is_fused(chosen):
        return linear(swiglu(gate, up), w, bias, chosen, cache=cache)
    rows, call, found, parameters = fused_call(chosen, gate, [w], [bias], [cache], more_input_grad=up.requires_grad)
    out = cast(Tensor, _SwiGLULinear.apply(rows, up.reshape(rows.shape), call, found, *parameters))
    return unflatten(out, gate)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = run_op(ops.rmsnorm, x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = run_op(ops.rmsnorm_backward, grads[0], x, weight, rstd)
        return dx, dweight.to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return run_op(ops.swiglu, gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return run_op(ops.swiglu_backward, grads[0], *ctx.saved_tensors)


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        call: Call,
        caches: tuple[WeightCache | None, ...],
        *parameters: Any,
    ) -> Any:
        scaling = call.recipe.x
        q, scale, qt, scale_t, rstd = run_op(ops.rmsnorm_cast_block, x, norm_weight, eps, scaling.dtype, scaling.pow2)
        ctx.x_dtype = x.dtype
        return multiply(ctx, call, caches, parameters, QTensor(*_sizes(x), q, scale, qt, scale_t), x, norm_weight, rstd)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        x, norm_weight, rstd, *saved = ctx.saved_tensors
        need = ctx.needs_input_grad
        dy, parameters = gradients(ctx, grads, saved, need[0] or need[1], need[5:])
        dx = dweight = None
        if dy is not None:
            dx, dweight = run_op(ops.rmsnorm_backward, dy, x, norm_weight, rstd)
            dweight = dweight.to(norm_weight.dtype)
        return dx, dweight, None, None, None, *parameters


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, call: Call, caches: tuple[WeightCache | None, ...], *parameters: Any
    ) -> Any:
        scaling = call.recipe.x
        cast_of_product = run_op(ops.swiglu_cast_block, gate, up, scaling.dtype, scaling.pow2)
        ctx.x_dtype = gate.dtype
        (out,) = multiply(ctx, call, caches, parameters, QTensor(*_sizes(gate), *cast_of_product), gate, up)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up, *saved = ctx.saved_tensors
        need = ctx.needs_input_grad
        dh, parameters = gradients(ctx, grads, saved, need[0] or need[1], need[4:])
        of_gate = of_up = None
        if dh is not None:
            of_gate, of_up = run_op(ops.swiglu_backward, dh, gate, up)
        return of_gate, of_up, None, None, *parameters


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.shape[1]
