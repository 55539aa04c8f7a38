"""The casts and the three products of a linear layer, each on its own.

`linear` ties them to autograd. A framework that runs weight gradients at another time than input gradients (a
zero-bubble pipeline), or overlaps them with communication, calls them itself::

    xq = cast_input(x, recipe)                        # rows for y, columns for dw: one read of x
    wq = cast_weight(w, recipe)                       # rows for y, columns for dx
    y  = forward_product(xq, wq, recipe)
    gq = cast_grad(g, recipe)                         # rows for dx, columns for dw: one read of g
    dx = input_gradient(gq, wq, recipe)
    dw = weight_gradient(gq, xq.for_weight_gradient(), recipe)

Every product contracts the last dimension of both operands, the one layout Hopper's float8 tensor cores read. So a
tensor that is summed over its rows needs its transpose in memory, and a cast makes both layouts in one read. Sizes that
are no multiple of what the products need are padded with zeros inside the cast and cut off again here.
"""

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8 import ops
from titan_fp8.ops.direct import run_op
from titan_fp8.recipe import Recipe, Scaling

Layouts = Literal["rows", "both"]


class QTensor(NamedTuple):
    """A matrix ``[rows, columns]`` in float8, in one layout or both; sizes in memory are padded (see `cast`)."""

    rows: int
    """Rows of what was cast, without padding."""
    columns: int
    """Columns of what was cast, without padding."""
    data: Tensor | None = None
    """Codes ``[Mp, Kp]``, the operand of products that sum over columns."""
    scale: Tensor | None = None
    """Decode scales of ``data``: what its codes are multiplied by."""
    data_t: Tensor | None = None
    """Codes of the transpose ``[Kp, Mp]``, the operand of products that sum over rows."""
    scale_t: Tensor | None = None
    """Decode scales of ``data_t``."""
    hp: Tensor | None = None
    """The matrix itself, where the recipe keeps the weight gradient in high precision."""

    def for_weight_gradient(self) -> "QTensor":
        """Only what the weight gradient needs, so that the rest can be freed."""
        return QTensor(self.rows, self.columns, data_t=self.data_t, scale_t=self.scale_t, hp=self.hp)


def cast(x: Tensor, scaling: Scaling, *, layouts: Layouts = "both", amax: Tensor | None = None) -> QTensor:
    """Cast a matrix to float8.

    NaN and infinities become NaN; other values saturate; an all-zero block has scale 1. The same bits on every torch
    version and device.

    Args:
        x: ``[M, K]``, bfloat16, float16 or float32.
        scaling: Granularity, format, and whether scales are powers of two.
        layouts: ``"both"`` for products that sum over columns and over rows, ``"rows"`` for the former alone.
        amax: For one scale per tensor: the largest magnitude, float32 ``[]``, if it is known (or must be larger: where
            ``x`` is one part of a tensor cut over ranks).

    Returns:
        Codes and decode scales. Padded to multiples of 16 (tensor, row) or 128 (blocks), with zeros.

    Raises:
        ValueError: If ``x`` is not a matrix, or ``amax`` is given for scales that are not one per tensor.
    """
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, but a cast takes a matrix; use x.reshape(-1, x.shape[-1]).")
    if amax is not None and scaling.gran != "tensor":
        raise ValueError(
            f"amax is only used with one scale per tensor, but gran={scaling.gran!r} has many; leave it out."
        )
    rows, columns = x.shape
    x = x.contiguous()
    if scaling.gran == "block128" and layouts == "rows":
        return QTensor(rows, columns, *run_op(ops.cast_weight_rows, x, scaling.dtype, scaling.pow2))
    if scaling.gran == "block128":
        return QTensor(rows, columns, *run_op(ops.cast_weight_block, x, scaling.dtype, scaling.pow2))
    if scaling.gran == "tensor":
        if layouts == "rows":
            return QTensor(rows, columns, *run_op(ops.cast_tensor, x, scaling.dtype, scaling.pow2, amax))
        data, data_t, scale = run_op(ops.cast_tensor_dual, x, scaling.dtype, scaling.pow2, amax)
        return QTensor(rows, columns, data, scale, data_t, scale)
    if scaling.gran == "mx32":
        parts = (
            run_op(ops.cast_mx, x, scaling.dtype) if layouts == "rows" else run_op(ops.cast_mx_dual, x, scaling.dtype)
        )
        return QTensor(rows, columns, *parts)
    if scaling.gran == "row":
        op = ops.cast_row if layouts == "rows" else ops.cast_row_dual
    else:
        op = ops.cast_block if layouts == "rows" else ops.cast_block_dual
    return QTensor(rows, columns, *run_op(op, x, scaling.dtype, scaling.pow2))


def cast_input(
    x: Tensor, recipe: Recipe, *, for_weight_grad: bool = True, amax_group: dist.ProcessGroup | None = None
) -> QTensor:
    """The input ``[M, K]``: rows for the forward product, columns (or ``x`` itself) for the weight gradient.

    Args:
        x: The input.
        recipe: The recipe.
        for_weight_grad: False where no weight gradient will be computed.
        amax_group: Ranks that hold the other parts of ``x``, for one scale per tensor: the amax is their largest.
    """
    if recipe.wgrad == "hp":
        rows = cast(x, recipe.x, layouts="rows")
        return rows._replace(hp=x) if for_weight_grad else rows
    layouts: Layouts = "both" if for_weight_grad else "rows"
    return cast(x, recipe.x, layouts=layouts, amax=group_amax(x, recipe.x, amax_group))


def cast_weight(
    w: Tensor, recipe: Recipe, *, for_input_grad: bool = True, amax_group: dist.ProcessGroup | None = None
) -> QTensor:
    """The weight ``[N, K]``: rows for the forward product, columns for the input gradient."""
    layouts: Layouts = "both" if for_input_grad else "rows"
    return cast(w, recipe.w, layouts=layouts, amax=group_amax(w, recipe.w, amax_group))


def cast_grad(
    g: Tensor,
    recipe: Recipe,
    *,
    for_weight_grad: bool = True,
    amax_group: dist.ProcessGroup | None = None,
) -> QTensor:
    """The gradient of the output ``[M, N]``: rows for the input gradient, columns (or itself) for the weight's."""
    if recipe.wgrad == "hp":
        rows = cast(g, recipe.g, layouts="rows")
        return rows._replace(hp=g) if for_weight_grad else rows
    layouts: Layouts = "both" if for_weight_grad else "rows"
    return cast(g, recipe.g, layouts=layouts, amax=group_amax(g, recipe.g, amax_group))


def forward_product(
    x: QTensor, w: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None
) -> Tensor:
    """``x · wᵀ + bias``: ``[M, N]``."""
    if bias is not None:
        assert w.data is not None
        padding = w.data.shape[0] - bias.shape[0]
        bias = torch.nn.functional.pad(bias, (0, padding)) if padding else bias
        bias = bias.to(out_dtype)
    return scaled_mm(x, w, recipe.x, recipe.w, out_dtype=out_dtype, fast_accum=recipe.fast_accum[0], bias=bias)


def input_gradient(g: QTensor, w: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``g · w``: ``[M, K]``."""
    return scaled_mm(g, transposed(w), recipe.g, recipe.w, out_dtype=out_dtype, fast_accum=recipe.fast_accum[1])


def weight_gradient(g: QTensor, x: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``gᵀ · x``: ``[N, K]``."""
    if recipe.wgrad == "hp":
        assert g.hp is not None
        assert x.hp is not None
        return (g.hp.t() @ x.hp.to(g.hp.dtype)).to(out_dtype)
    return scaled_mm(
        transposed(g), transposed(x), recipe.g, recipe.x, out_dtype=out_dtype, fast_accum=recipe.fast_accum[2]
    )


def transposed(q: QTensor) -> QTensor:
    """The transpose, without moving anything: the two layouts change places."""
    return QTensor(q.columns, q.rows, q.data_t, q.scale_t, q.data, q.scale)


def scaled_mm(
    a: QTensor,
    b: QTensor,
    scaling_a: Scaling,
    scaling_b: Scaling,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """``a · bᵀ`` of two float8 matrices, both contracted along their columns.

    Args:
        a: ``[M, K]``, with the layout for sums over columns.
        b: ``[N, K]``, likewise.
        scaling_a: How ``a`` was cast.
        scaling_b: How ``b`` was cast.
        out_dtype: Of the result.
        fast_accum: Hopper's short accumulator; nothing on other devices.
        bias: Added to each row before the one rounding, ``[Np]``.

    Returns:
        ``[M, N]``.

    Raises:
        ValueError: If the sizes differ or a layout is missing; `titan_fp8.ops` checks what devices need.
    """
    if a.data is None or a.scale is None or b.data is None or b.scale is None:
        raise ValueError("scaled_mm got a QTensor without the layout for sums over columns; cast with layouts='both'.")
    if a.columns != b.columns:
        raise ValueError(
            f"scaled_mm contracts columns, but a has {a.columns} columns and b has {b.columns}; transpose one, or check the "
            "shapes."
        )
    out = run_op(
        ops.scaled_mm, a.data, a.scale, b.data, b.scale, scaling_a.gran, scaling_b.gran, out_dtype, fast_accum, bias
    )
    if out.shape[0] != a.rows or out.shape[1] != b.rows:
        out = out[: a.rows, : b.rows].clone()  # a view could not be changed in place, as a linear layer's output can
    return out


def group_amax(x: Tensor, scaling: Scaling, group: dist.ProcessGroup | None) -> Tensor | None:
    """The largest magnitude over all ranks of ``group`` for one scale per tensor; None where none is needed.

    One all-reduce (MAX) of one float, on every rank alike.
    """
    if group is None or scaling.gran != "tensor":
        return None
    amax = run_op(ops.amax, x)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax
