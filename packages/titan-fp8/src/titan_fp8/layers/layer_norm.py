"""LayerNorm and GELU before float8 linears, with the cast in the same kernel, as in `titan_fp8.layers.fused`.

`layer_norm_linears` is ``linears(layer_norm(x))`` and `gelu_linear` is ``linear(gelu(x))``, with the same gradients. Gain and
shift may differ from sample to sample: the modulated norms of diffusion transformers (arXiv:2212.09748).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from titan_fp8 import ops, reference
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


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) · gain + shift`` over the last dimension, in float32, rounded once.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32.
        gain: ``[K]``, or one for each sample: ``[B, 1, K]`` for an ``x`` of ``[B, S, K]``.
        shift: As ``gain``.
        eps: Added to the variance.

    Returns:
        ``[..., K]`` in ``x``'s dtype. Differentiable once.

    Raises:
        ValueError: If the shapes do not fit.
    """
    gain, shift = _rows(x, gain, "gain"), _rows(x, shift, "shift")
    return cast(Tensor, _LayerNorm.apply(x.reshape(-1, x.shape[-1]), gain, shift, eps)).view(x.shape)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, in float32, rounded once (arXiv:1606.08415). ``[..., F]``, bfloat16, float16 or float32."""
    return cast(Tensor, _Gelu.apply(x.reshape(-1, x.shape[-1]))).view(x.shape)


def layer_norm_linears(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    recipe: str | Recipe = "blockwise",
    *,
    caches: Sequence[WeightCache | None] | None = None,
) -> tuple[Tensor, ...]:
    """`linears` of `layer_norm` of ``x``, which is normalized and cast in one pass where the recipe is blockwise.

    Args:
        x: ``[..., K]``.
        gain: ``[K]`` or ``[B, 1, K]``, see `layer_norm`.
        shift: As ``gain``.
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
        return linears(layer_norm(x, gain, shift, eps), weights, biases, chosen, caches=caches)
    more = gain.requires_grad or shift.requires_grad
    rows, call, found, parameters = fused_call(chosen, x, weights, biases, caches, more_input_grad=more)
    gain, shift = _rows(x, gain, "gain"), _rows(x, shift, "shift")
    outs = _LayerNormLinears.apply(rows, gain, shift, eps, call, found, *parameters)
    return tuple(unflatten(out, x) for out in cast("tuple[Tensor, ...]", outs))


def gelu_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "blockwise",
    *,
    cache: WeightCache | None = None,
) -> Tensor:
    """`linear` of `gelu` of ``x``, which is computed and cast in one pass where the recipe is blockwise.

    Args:
        x: ``[..., K]``.
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
        return linear(gelu(x), w, bias, chosen, cache=cache)
    rows, call, found, parameters = fused_call(chosen, x, [w], [bias], [cache])
    out = _GeluLinear.apply(rows, call, found, *parameters)
    return unflatten(cast(Tensor, out), x)


def _rows(x: Tensor, vector: Tensor, name: str) -> Tensor:
    """``[1, K]`` or ``[B, K]``."""
    width = x.shape[-1]
    if vector.shape != (width,) and vector.shape != (*x.shape[:-2], 1, width):
        samples = ", ".join(map(str, (*x.shape[:-2], 1, width)))
        raise ValueError(
            f"{name} has shape {tuple(vector.shape)}; expected ({width},) or, one per sample, ({samples})."
        )
    return vector.reshape(-1, width)


def _layer_norm_backward(
    grad: Tensor, x: Tensor, gain: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, gain and shift, each in its dtype. Sums run in float32."""
    width, groups = x.shape[1], gain.shape[0]
    row = (mean[:, None], rstd[:, None])
    backward = torch.ops.aten.native_layer_norm_backward
    if not x.is_cuda:  # the CPU's kernel keeps mean and rstd in x's dtype
        grad, wide = grad.float(), x.float()
    else:
        grad, wide = grad.to(x.dtype), x
    if groups == 1:
        weight = gain[0].to(wide.dtype)
        dx, dgain, dshift = backward(grad, wide, [width], *row, weight, weight, [True, True, True])
        return dx.to(x.dtype), dgain[None].to(gain.dtype), dshift[None].to(gain.dtype)
    parts = grad.view(groups, -1, width)
    scaled = (parts * gain[:, None].to(wide.dtype)).view_as(grad)
    dx, _, _ = backward(scaled, wide, [width], *row, None, None, [True, False, False])
    normed = ((wide.float() - row[0]) * row[1]).view(groups, -1, width)
    dgain, dshift = (parts * normed).sum(1), parts.sum(1, dtype=torch.float32)
    return dx.to(x.dtype), dgain.to(gain.dtype), dshift.to(gain.dtype)


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad.float(), x.float(), approximate="tanh").to(x.dtype)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
        y, mean, rstd = reference.layernorm(x, gain, shift, eps)
        ctx.save_for_backward(x, gain, mean, rstd)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        return *_layer_norm_backward(grads[0], *ctx.saved_tensors), None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return reference.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gelu_backward(grads[0], *ctx.saved_tensors)


class _LayerNormLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        shift: Tensor,
        eps: float,
        call: Call,
        caches: tuple[WeightCache | None, ...],
        *parameters: Any,
    ) -> Any:
        scaling = call.recipe.x
        op = ops.layernorm_cast_block
        *quantized, mean, rstd = run_op(op, x, gain, shift, eps, scaling.dtype, scaling.pow2)
        ctx.x_dtype = x.dtype
        return multiply(ctx, call, caches, parameters, QTensor(x.shape[0], x.shape[1], *quantized), x, gain, mean, rstd)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gain, mean, rstd, *saved = ctx.saved_tensors
        need = ctx.needs_input_grad
        dy, parameters = gradients(ctx, grads, saved, any(need[:3]), need[6:])
        norm = (None, None, None) if dy is None else _layer_norm_backward(dy, x, gain, mean, rstd)
        return *norm, None, None, None, *parameters


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, caches: tuple[WeightCache | None, ...], *parameters: Any) -> Any:
        scaling = call.recipe.x
        quantized = run_op(ops.gelu_cast_block, x, scaling.dtype, scaling.pow2)
        ctx.x_dtype = x.dtype
        (out,) = multiply(ctx, call, caches, parameters, QTensor(x.shape[0], x.shape[1], *quantized), x)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *saved = ctx.saved_tensors
        need = ctx.needs_input_grad
        dy, parameters = gradients(ctx, grads, saved, need[0], need[3:])
        return None if dy is None else _gelu_backward(dy, x), None, None, *parameters
