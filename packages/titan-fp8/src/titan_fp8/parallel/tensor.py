"""Tensor parallelism that communicates activations in float8, on plain local tensors and a process group.

With sequence parallelism (arXiv:2205.05198) a region starts with an all-gather of tokens and ends with a
reduce-scatter. What is gathered is then cast to float8 anyway, so cast first and send codes: half the bytes.

    `all_gather_linears`      gather the tokens of all ranks in float8, multiply by each weight (cut by rows)
    `linear_reduce_scatter`   multiply by a weight (cut by columns), sum over ranks, keep own tokens
    `all_gather_float8`       gather in float8, for a consumer that is not a linear layer

Sums are not sent in float8: a reduce-scatter adds, and eight bits do not add.

Scales: one per tensor needs an all-reduce (MAX) of one float, so that all ranks' codes mean the same; 1x128 blocks travel
with their rows. Kept for backward: this rank's codes alone, an n-th of the gathered input's; backward gathers them once
more, in the layout the weight gradient takes. A weight's own scale is its shard's: no rank needs another's.

Shapes: n ranks, s tokens per rank, S = n * s; parts are ``[..., s, K]``, wholes ``[..., S, K]``.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from titan_fp8 import products
from titan_fp8.differentiable import differentiable_once
from titan_fp8.layers.functional import Call, check_shapes, output_dtype, weight_cast
from titan_fp8.products import QTensor
from titan_fp8.recipe import Recipe, Scaling
from titan_fp8.reference import dequantize, round_up

_LOSES_GRADIENTS = TorchVersion(torch.__version__) < "2.15"
"""torch 2.11, not 2.15: the gradient of a collective's result that leaves a compiled graph as it is becomes zero."""


def all_gather_linears(
    part: Tensor,
    weights: Sequence[Tensor],
    recipe: str | Recipe = "blockwise",
    *,
    group: dist.ProcessGroup,
) -> tuple[Tensor, ...]:
    """Gather the tokens of all ranks, in float8, and multiply them by each of ``weights``.

    Args:
        part: This rank's tokens, ``[..., s, K]``, as many on every rank.
        weights: Each ``[N_i, K]``, this rank's rows.
        recipe: tensorwise or blockwise.
        group: The ranks.

    Returns:
        For each weight ``[..., S, N_i]``: the bits of `linears` of the whole input (with its amax, for tensorwise).

    Raises:
        ValueError: If the recipe has scales that span ranks, or (blockwise) s is not a multiple of 128.
    """
    chosen = _communicable(recipe, part.shape[-2])
    check_shapes(part, weights, [None] * len(weights))
    call = Call(chosen, output_dtype(part), any(w.requires_grad for w in weights), part.requires_grad, None)
    return cast("tuple[Tensor, ...]", _GatherLinears.apply(part, call, group, *weights))


def linear_reduce_scatter(
    x: Tensor, w: Tensor, recipe: str | Recipe = "blockwise", *, group: dist.ProcessGroup
) -> Tensor:
    """Multiply by ``w``, sum over the ranks, and keep this rank's tokens. Backward gathers the gradient in float8.

    Args:
        x: ``[..., S, K]``: all tokens, this rank's columns.
        w: ``[N, K]``, the same columns.
        recipe: tensorwise or blockwise.
        group: The ranks.

    Returns:
        ``[..., s, N]``. The sum is taken in the output's dtype.

    Raises:
        ValueError: As `all_gather_linears`, or if S is not a multiple of n.
    """
    if x.shape[-2] % group.size():
        raise ValueError(
            f"x has {x.shape[-2]} tokens, which cannot be split evenly over {group.size()} ranks; pad the sequence to a "
            f"multiple of {group.size()}."
        )
    chosen = _communicable(recipe, x.shape[-2] // group.size())
    check_shapes(x, [w], [None])
    call = Call(chosen, output_dtype(x), w.requires_grad, x.requires_grad, None)
    return cast(Tensor, _LinearScatter.apply(x, call, group, w))


def all_gather_float8(part: Tensor, scaling: Scaling, *, group: dist.ProcessGroup) -> Tensor:
    """Gather the tokens of all ranks in float8; their gradient is summed in their own dtype and cut again.

    With power-of-two scales, casting the result along rows again loses nothing.

    Args:
        part: ``[..., s, K]``.
        scaling: One scale per tensor (shared by all ranks), per row, or per 1x128 or 1x32 values.
        group: The ranks.

    Returns:
        ``[..., S, K]`` in ``part``'s dtype: the values of the codes.
    """
    return cast(Tensor, _Gather.apply(part, scaling, group))


class _GatherLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, call: Call, group: dist.ProcessGroup, *weights: Tensor) -> Any:
        recipe = call.recipe
        flat = part.reshape(-1, part.shape[-1])
        xq = products.cast_input(flat, recipe, for_weight_grad=call.weight_grad, amax_group=group)
        whole = gather_rows(xq, recipe.x, part.shape, group)
        ctx.call, ctx.group, ctx.shape, ctx.dtype = call, group, part.shape, part.dtype
        kept = xq if recipe.x.gran == "tensor" else xq.for_weight_gradient()
        ctx.save_for_backward(kept.data, kept.scale, kept.data_t, kept.scale_t, *weights)
        sizes = (*part.shape[:-2], part.shape[-2] * group.size())
        outs = (
            products.forward_product(whole, weight_cast(w, call, None), recipe, out_dtype=call.out_dtype)
            for w in weights
        )
        return tuple(torch.ops.aten._unsafe_view.default(out, [*sizes, out.shape[-1]]) for out in outs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx.call
        recipe, group, shape = call.recipe, ctx.group, ctx.shape
        data, scale, data_t, scale_t, *weights = ctx.saved_tensors
        need_x, need = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        rows = _num_rows(shape)
        xq = QTensor(rows, shape[-1], data, scale, data_t, scale_t)
        whole = gather_columns(xq, recipe.x, shape, group) if any(need) else xq
        dx: Tensor | None = None
        dws: list[Tensor | None] = []
        for g, w, need_w in zip(grads, weights, need, strict=True):
            gq = products.cast_grad(g.reshape(-1, g.shape[-1]), recipe, for_weight_grad=need_w)
            if need_x:
                wq = weight_cast(w, call, None, in_backward=True)
                summand = products.input_gradient(gq, wq, recipe, out_dtype=ctx.dtype)
                dx = summand if dx is None else dx + summand
            dws.append(products.weight_gradient(gq, whole, recipe, out_dtype=w.dtype) if need_w else None)
        part = None if dx is None else reduce_scatter(dx.view(*shape[:-2], -1, shape[-1]), group)
        return part, None, None, *dws


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, group: dist.ProcessGroup, w: Tensor) -> Tensor:
        recipe = call.recipe
        xq = products.cast_input(x.reshape(-1, x.shape[-1]), recipe, for_weight_grad=call.weight_grad)
        out = products.forward_product(xq, weight_cast(w, call, None), recipe, out_dtype=call.out_dtype)
        ctx.call, ctx.group, ctx.shape, ctx.dtype = call, group, x.shape, x.dtype
        ctx.save_for_backward(xq.data_t, xq.scale_t, w)
        return reduce_scatter(out.view(*x.shape[:-1], out.shape[-1]), group)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        call: Call = ctx.call
        recipe, group = call.recipe, ctx.group
        data_t, scale_t, w = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        part = products.cast_grad(g.reshape(-1, g.shape[-1]), recipe, for_weight_grad=need_w, amax_group=group)
        dx = dw = None
        if need_x:
            wq = weight_cast(w, call, None, in_backward=True)
            rows = gather_rows(part, recipe.g, g.shape, group)
            dx = products.input_gradient(rows, wq, recipe, out_dtype=ctx.dtype).view(ctx.shape)
        if need_w:
            columns = gather_columns(part, recipe.g, g.shape, group)
            xq = QTensor(_num_rows(ctx.shape), ctx.shape[-1], data_t=data_t, scale_t=products.saved_scale(scale_t))
            dw = products.weight_gradient(columns, xq, recipe, out_dtype=w.dtype)
        return dx, None, None, dw


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, scaling: Scaling, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        flat = part.reshape(-1, part.shape[-1])
        amax = products.group_amax(flat, scaling, group)
        whole = gather_rows(products.cast(flat, scaling, layouts="rows", amax=amax), scaling, part.shape, group)
        assert whole.data is not None
        assert whole.scale is not None
        values = dequantize(whole.data, whole.scale, scaling.gran)[:, : part.shape[-1]]
        return values.to(part.dtype).view(*part.shape[:-2], -1, part.shape[-1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce_scatter(grads[0], ctx.group), None, None


def gather_rows(part: QTensor, scaling: Scaling, shape: Sequence[int], group: dist.ProcessGroup) -> QTensor:
    """The rows layout of all ranks' tokens, from each rank's; ``shape`` is the part's, ``[..., s, K]``."""
    assert part.data is not None
    assert part.scale is not None
    data = _gather_tokens(part.data.view(torch.uint8)[: part.rows], shape, group).view(scaling.dtype)
    scale = part.scale
    if scaling.gran != "tensor":
        own = scale[: part.rows].contiguous()
        wire = own.view(torch.uint8) if scaling.gran == "mx32" else own  # not every backend sends e8m0
        scale = _gather_tokens(wire, shape, group).view(scale.dtype)
        if scaling.gran == "block1x128":
            scale = scale.t().contiguous().t()
    return QTensor(data.shape[0], part.columns, data, scale)


def gather_columns(part: QTensor, scaling: Scaling, shape: Sequence[int], group: dist.ProcessGroup) -> QTensor:
    """The columns layout of all ranks' tokens, from each rank's part ``[..., s, K]`` in float8."""
    n, s = group.size(), shape[-2]
    batch = part.rows // s if s else 0
    if scaling.gran == "tensor":
        assert part.data is not None
        codes = _gather_tokens(part.data.view(torch.uint8)[: part.rows], shape, group)
        missing = round_up(codes.shape[0], 16) - codes.shape[0]
        codes = F.pad(codes, (0, 0, 0, missing)) if missing else codes
        data_t = codes.t().contiguous().view(scaling.dtype)
        return QTensor(n * part.rows, part.columns, data_t=data_t, scale_t=part.scale)
    assert part.data_t is not None
    assert part.scale_t is not None
    codes = _all_gather(part.data_t.view(torch.uint8), group)  # [n, Kp, batch * s]
    data_t = codes.unflatten(2, (batch, s)).permute(1, 2, 0, 3).reshape(codes.shape[1], -1).view(scaling.dtype)
    scales = _all_gather(part.scale_t.t().contiguous(), group)  # [n, batch * s / 128, Kp]
    scales = scales.unflatten(1, (batch, s // 128)).movedim(0, 1).reshape(-1, scales.shape[-1])
    return QTensor(n * part.rows, part.columns, data_t=data_t, scale_t=scales.t())


def reduce_scatter(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Own tokens of the sum over ranks: ``[..., S, K]`` to ``[..., s, K]``."""
    n = group.size()
    parts = partial.unflatten(-2, (n, -1)).movedim(-3, 0).contiguous()
    own = parts.new_empty(parts.shape[1:])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=group)
    return own.clone() if _LOSES_GRADIENTS and torch.compiler.is_compiling() else own


def _gather_tokens(part: Tensor, shape: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows ``[batch * s, C]`` of each rank → ``[batch * S, C]``: a sequence's tokens in rank order."""
    gathered = _all_gather(part, group)
    batch = _num_rows(shape[:-1])
    if batch == 1:
        return gathered.flatten(0, 1)
    return gathered.unflatten(1, (batch, shape[-2])).movedim(0, 1).reshape(-1, part.shape[1])


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(out, part.contiguous(), group=group)
    return out.unflatten(0, (group.size(), -1))


def _num_rows(shape: Sequence[int]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def _communicable(recipe: str | Recipe, tokens: int) -> Recipe:
    chosen = Recipe.get(recipe)
    if chosen.x.gran not in ("tensor", "block1x128") or chosen.wgrad != "fp8":
        raise ValueError(
            f"recipe {chosen.name!r} cannot be gathered in float8: its weight gradient takes scales that span all ranks' "
            "tokens. Use blockwise or tensorwise, or gather in high precision and call titan_fp8.linears."
        )
    if chosen.x.gran == "block1x128" and tokens % 128:
        raise ValueError(
            f"each rank holds {tokens} tokens, and the weight gradient's blocks of 128 tokens would span ranks. Use a "
            "sequence length that gives each rank a multiple of 128, or recipe tensorwise."
        )
    return chosen
