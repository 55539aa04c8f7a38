"""`grouped_mm`: one float8 product for each expert, with the contract of ``torch.nn.functional.grouped_mm``.

Rows are sorted by expert; ``offs[e]`` is where expert e's rows end. Groups may be empty, of any size, and need no
alignment: the cast pads each to a multiple of 128 tokens for the weight gradient, whose blocks of tokens must not
straddle experts. Offsets stay on the device: nothing waits for them, so the host runs ahead.

    y[rows of e]  = x[rows of e] · w[e]            rows need no padding: the contraction is over features
    dx[rows of e] = g[rows of e] · w[e]ᵀ           likewise
    dw[e]         = x[rows of e]ᵀ · g[rows of e]   contracts tokens: from the padded, transposed codes

Kept for backward are the input's transposed codes. Rows at or beyond ``offs[-1]`` belong to no expert: their outputs and
input gradients are zero (torch leaves them uninitialised).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_fp8 import ops
from titan_fp8.differentiable import differentiable_once
from titan_fp8.layers.functional import output_dtype
from titan_fp8.ops.declare import run_op
from titan_fp8.products import saved_scale
from titan_fp8.recipe import Recipe
from titan_fp8.reference import pad_matrix, round_up


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    recipe: str | Recipe = "blockwise",
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each group of rows by its expert's matrix, in float8, differentiable.

    Args:
        x: ``[M, K]``, rows sorted by expert.
        w: ``[E, K, N]``; as fast if it is the transpose (``.mT``) of contiguous ``[E, N, K]``.
        offs: End of each group, int32 ``[E]``, on the device of ``x``; ``offs[-1] <= M``.
        recipe: A recipe or its name.
        out_dtype: Of the result; None takes ``x``'s, or autocast's where that is on.

    Returns:
        ``[M, N]``.

    Raises:
        ValueError: If the shapes do not fit.
    """
    call = GroupedCall(Recipe.get(recipe), out_dtype or output_dtype(x), None)
    check_grouped(x, w, offs)
    return cast(Tensor, _GroupedMM.apply(x, w, offs, None, call))


def grouped_mm_deferred(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    recipe: str | Recipe = "blockwise",
    *,
    anchor: Tensor,
    parameter: Tensor,
    defer: Callable[..., None],
    to_parameter: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`grouped_mm` whose backward hands the weight gradient to the caller to run later; see `linear_deferred`.

    Args:
        x: ``[M, K]``.
        w: ``[E, K, N]``: ``parameter``, or a view of it.
        offs: As in `grouped_mm`.
        recipe: A recipe or its name.
        anchor: Any tensor that requires a gradient; it gets none.
        parameter: Passed to ``defer`` as the owner of the gradient.
        defer: Called in backward as ``defer(parameter, compute, *given)``.
        to_parameter: From ``w``'s gradient to the parameter's, where ``w`` is a view: ``lambda dw: dw.mT``.
    """
    call = GroupedCall(Recipe.get(recipe), output_dtype(x), (parameter, defer, to_parameter))
    check_grouped(x, w, offs)
    return cast(Tensor, _GroupedMM.apply(x, w.detach(), offs, anchor, call))


class Float8GroupedMM(nn.Module):
    """`grouped_mm` as a module without parameters, for models whose experts call one: ``experts.grouped_mm = …``.

    Args:
        recipe: A recipe or its name.
    """

    def __init__(self, recipe: str | Recipe = "blockwise") -> None:
        super().__init__()
        self.recipe = Recipe.get(recipe)

    def forward(self, mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> Tensor:
        """``mat_a [M, K]``, ``mat_b [E, K, N]``, ``offs [E]`` int32 to ``[M, N]``."""
        return grouped_mm(mat_a, mat_b, offs, self.recipe)

    def extra_repr(self) -> str:
        """The recipe."""
        return f"recipe={self.recipe.name}"


class Float8GroupedExpertsMixin:
    """Overrides ``_grouped_mm(A, B_t, offs)``, the method that torchtitan's grouped experts call.

    Put it before the experts class: ``class Float8Experts(Float8GroupedExpertsMixin, GroupedExperts)``.
    """

    recipe: str | Recipe = "blockwise"
    """A recipe or its name."""

    def _grouped_mm(self, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return grouped_mm(A, B_t, offs, self.recipe)


class GroupedCall(NamedTuple):
    """What one call needs to know beyond its tensors."""

    recipe: Recipe
    out_dtype: torch.dtype
    later: tuple[Tensor, Callable[..., None], Callable[[Tensor], Tensor] | None] | None


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor, anchor: Tensor | None, call: GroupedCall) -> Tensor:
        recipe = call.recipe
        q, scale, qt, scale_t, offs_padded = _cast_rows(x, offs, recipe)
        wq, w_scale = cast_experts(w, recipe, contract_rows=True)
        out = _product(q, scale, wq, w_scale, offs, recipe, call.out_dtype, w.shape[2])
        ctx.call, ctx.sizes = call, (x.shape[1], w.shape[2])
        ctx.dtypes = (x.dtype, w.dtype)
        if recipe.wgrad == "hp":
            ctx.save_for_backward(x, None, offs, offs_padded, w)
        else:
            ctx.save_for_backward(qt, scale_t, offs, offs_padded, w)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        call: GroupedCall = ctx.call
        recipe = call.recipe
        saved, scale_t, offs, offs_padded, w = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        q, g_scale, gt, g_scale_t, _ = _cast_rows(g, offs, recipe, of_grad=True)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            wq, w_scale = cast_experts(w, recipe, contract_rows=False)
            dx = _product(q, g_scale, wq, w_scale, offs, recipe, x_dtype, w.shape[1])
        given: tuple[Any, ...]
        if recipe.wgrad == "hp":
            compute, given = _weight_gradient_hp, (saved, g, offs, w_dtype)
        else:
            compute, given = (
                _weight_gradient,
                (saved, saved_scale(scale_t), gt, g_scale_t, offs_padded, recipe, w_dtype, ctx.sizes),
            )
        if call.later is not None:
            parameter, defer, to_parameter = call.later
            if parameter.requires_grad:
                defer(parameter, _computed_for, to_parameter, compute, *given)
        elif ctx.needs_input_grad[1]:
            dw = compute(*given)
        return dx, dw, None, None, None


def cast_experts(w: Tensor, recipe: Recipe, *, contract_rows: bool) -> tuple[Tensor, Tensor]:
    """Cast experts' matrices ``w[E, K, N]`` for one product: codes ``[E, R, C]``, contracted over C, and decode scales.

    Args:
        w: Any strides.
        recipe: How.
        contract_rows: Contract K (forward, codes ``[E, Np, Kp]``) rather than N (input gradient, ``[E, Kp, Np]``).
    """
    dtype, pow2 = recipe.w.dtype, recipe.w.pow2
    # Contiguous [E, N, K], handed over as its transpose, is the common case: its memory order is kept.
    is_transpose = not w.is_contiguous() and w.mT.is_contiguous()
    stored = w.mT if is_transpose else w.contiguous()
    as_stored = contract_rows == is_transpose
    if recipe.w.gran == "block128":
        if as_stored:
            return run_op(ops.cast_weight_rows, stored, dtype, pow2)
        return run_op(ops.cast_weight_block, stored, dtype, pow2)[2:]
    matrices = stored if as_stored else stored.mT
    padded = pad_matrix(matrices, 128).contiguous()
    flat = padded.view(-1, padded.shape[2])
    if recipe.w.gran == "tensor":
        q, scale = run_op(ops.cast_tensor, flat, dtype, pow2)
        return q.view(padded.shape), scale
    q, scale = run_op(ops.cast_row, flat, dtype, pow2) if recipe.w.gran == "row" else run_op(ops.cast_mx, flat, dtype)
    return q.view(padded.shape), scale.view(*padded.shape[:2], -1)


def _cast_rows(
    x: Tensor, offs: Tensor, recipe: Recipe, *, of_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    scaling = recipe.g if of_grad else recipe.x
    return run_op(ops.cast_grouped, x.contiguous(), offs, scaling.dtype, scaling.pow2, scaling.gran)


def _product(
    q: Tensor,
    scale: Tensor,
    wq: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    recipe: Recipe,
    out_dtype: torch.dtype,
    columns: int,
) -> Tensor:
    out = run_op(ops.grouped_scaled_mm, q, scale, wq, w_scale, offs, recipe.x.gran, recipe.w.gran, out_dtype)
    return out if out.shape[1] == columns else out[:, :columns].clone()


def _weight_gradient(
    xt: Tensor,
    x_scale_t: Tensor,
    gt: Tensor,
    g_scale_t: Tensor,
    offs_padded: Tensor,
    recipe: Recipe,
    dtype: torch.dtype,
    sizes: tuple[int, int],
) -> Tensor:
    # The grouped cast lays out the transposed scales of all recipes but MX as blocks of 128 tokens.
    scaling = "mx32" if recipe.x.gran == "mx32" else "block1x128"
    dw = run_op(ops.grouped_scaled_mm_wgrad, xt, x_scale_t, gt, g_scale_t, offs_padded, scaling, dtype)
    return dw if tuple(dw.shape[1:]) == sizes else dw[:, : sizes[0], : sizes[1]].contiguous()


def _weight_gradient_hp(x: Tensor, g: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = x.shape[1], g.shape[1]
    # grouped_mm takes rows of a multiple of 16 bytes.
    x = F.pad(x.to(g.dtype), (0, round_up(rows, 16) - rows)).contiguous()
    g = F.pad(g, (0, round_up(columns, 16) - columns)).contiguous()
    return F.grouped_mm(x.t(), g, offs=offs)[:, :rows, :columns].to(dtype)


@torch.no_grad()
def _computed_for(
    to_parameter: Callable[[Tensor], Tensor] | None, compute: Callable[..., Tensor], *given: Any
) -> Tensor:
    dw = compute(*given)
    return dw if to_parameter is None else to_parameter(dw)


def check_grouped(x: Tensor, w: Tensor, offs: Tensor) -> None:
    """Refuse operands that do not fit."""
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"grouped_mm got x {tuple(x.shape)} and w {tuple(w.shape)}: x is [M, K], rows sorted by expert, and w [E, K, N]. "
            "For weights stored [E, N, K] pass w.mT."
        )
    if offs.shape != w.shape[:1] or offs.dtype != torch.int32:
        raise ValueError(
            f"offs is {offs.dtype} {tuple(offs.shape)}; expected int32 [{w.shape[0]}], the end of each expert's rows: "
            "counts.cumsum(0, dtype=torch.int32)."
        )
