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
are not multiples of what the products need are padded with zeros inside the cast and cut off again here.

`Products` holds these functions for one recipe. They go through the ops of `titan_fp8.ops`, which check operands that a user may
have made. Between a layer's own casts and its own products that is not needed, and on a GPU it costs more than the kernels of
a small layer: `products_for` then gives the same functions with the kernels of a device looked up once. They run the same
kernels on the same operands, and give the same bits.
"""

import functools
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_fp8 import ops
from titan_fp8.dispatch import implementation
from titan_fp8.ops.checks import INPUT_DTYPES
from titan_fp8.ops.declare import run_op, watched
from titan_fp8.recipe import Recipe, Scaling

Layouts = Literal["rows", "both"]
Role = Literal["x", "w", "g"]

_CASTS = {
    "tensor": ("cast_tensor", "cast_tensor_dual"),
    "row": ("cast_row", "cast_row_dual"),
    "block1x128": ("cast_block", "cast_block_dual"),
    "block128": ("cast_weight_rows", "cast_weight_block"),
    "mx32": ("cast_mx", "cast_mx_dual"),
}
"""Granularity to the op that casts rows, and the one that casts both layouts."""

_OPERANDS: tuple[tuple[Role, Role], ...] = (("x", "w"), ("g", "w"), ("g", "x"))
"""Of the forward product, the input gradient and the weight gradient."""


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


def saved_scale(scale: Tensor | None) -> Tensor | None:
    """A saved ``scale_t`` in its cast's memory order; saved tensors that were offloaded to pinned memory come back row by row."""
    if scale is None or scale.dim() != 2 or scale.dtype == torch.float8_e8m0fnu or scale.stride(0) == 1:
        return scale
    return scale.t().contiguous().t()


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
    rows, both = _CASTS[scaling.gran]
    op = getattr(ops, both if layouts == "both" else rows)
    return _quantized(x, scaling, run_op(op, x.contiguous(), *_arguments(scaling, amax)))


def _arguments(scaling: Scaling, amax: Tensor | None = None) -> tuple[Any, ...]:
    """What the ops of a granularity take after the matrix."""
    if scaling.gran == "mx32":
        return (scaling.dtype,)
    return (scaling.dtype, scaling.pow2, amax) if scaling.gran == "tensor" else (scaling.dtype, scaling.pow2)


def _quantized(x: Tensor, scaling: Scaling, results: Any) -> QTensor:
    if scaling.gran == "tensor" and len(results) == 3:
        data, data_t, scale = results
        return QTensor(x.shape[0], x.shape[1], data, scale, data_t, scale)
    return QTensor(x.shape[0], x.shape[1], *results)


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
    return Products(recipe).cast_input(x, for_weight_grad=for_weight_grad, amax_group=amax_group)


def cast_weight(
    w: Tensor, recipe: Recipe, *, for_input_grad: bool = True, amax_group: dist.ProcessGroup | None = None
) -> QTensor:
    """The weight ``[N, K]``: rows for the forward product, columns for the input gradient."""
    return Products(recipe).cast_weight(w, for_input_grad=for_input_grad, amax_group=amax_group)


def cast_grad(
    g: Tensor, recipe: Recipe, *, for_weight_grad: bool = True, amax_group: dist.ProcessGroup | None = None
) -> QTensor:
    """The gradient of the output ``[M, N]``: rows for the input gradient, columns (or itself) for the weight's."""
    return Products(recipe).cast_grad(g, for_weight_grad=for_weight_grad, amax_group=amax_group)


def forward_product(
    x: QTensor, w: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None
) -> Tensor:
    """``x · wᵀ + bias``: ``[M, N]``."""
    return Products(recipe).forward_product(x, w, out_dtype, bias)


def input_gradient(g: QTensor, w: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``g · w``: ``[M, K]``."""
    return Products(recipe).input_gradient(g, w, out_dtype)


def weight_gradient(g: QTensor, x: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``gᵀ · x``: ``[N, K]``."""
    return Products(recipe).weight_gradient(g, x, out_dtype)


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
        fast_accum: Allow Hopper's short accumulator; nothing on other devices and for block scales.
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
    return _cut(out, a, b)


def group_amax(x: Tensor, scaling: Scaling, group: dist.ProcessGroup | None) -> Tensor | None:
    """The largest magnitude over all ranks of ``group`` for one scale per tensor; None where none is needed.

    One all-reduce (MAX) of one float, on every rank alike.
    """
    if group is None or scaling.gran != "tensor":
        return None
    amax = run_op(ops.amax, x)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


class Products:
    """The casts and products of a recipe, through the ops. Arguments are those of the functions of the same names."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def cast_input(
        self, x: Tensor, *, for_weight_grad: bool = True, amax_group: dist.ProcessGroup | None = None
    ) -> QTensor:
        return self._cast_activation(x, "x", for_weight_grad, amax_group)

    def cast_grad(
        self, g: Tensor, *, for_weight_grad: bool = True, amax_group: dist.ProcessGroup | None = None
    ) -> QTensor:
        return self._cast_activation(g, "g", for_weight_grad, amax_group)

    def cast_weight(
        self, w: Tensor, *, for_input_grad: bool = True, amax_group: dist.ProcessGroup | None = None
    ) -> QTensor:
        return self._cast(w, "w", for_input_grad, group_amax(w, self.recipe.w, amax_group))

    def forward_product(self, x: QTensor, w: QTensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            assert w.data is not None
            padding = w.data.shape[0] - bias.shape[0]
            bias = torch.nn.functional.pad(bias, (0, padding)) if padding else bias
            bias = bias.to(out_dtype)
        return self._multiply(0, x, w, out_dtype, bias)

    def input_gradient(self, g: QTensor, w: QTensor, out_dtype: torch.dtype) -> Tensor:
        return self._multiply(1, g, transposed(w), out_dtype)

    def weight_gradient(self, g: QTensor, x: QTensor, out_dtype: torch.dtype) -> Tensor:
        if self.recipe.wgrad == "hp":
            assert g.hp is not None
            assert x.hp is not None
            return (g.hp.t() @ x.hp.to(g.hp.dtype)).to(out_dtype)
        return self._multiply(2, transposed(g), transposed(x), out_dtype)

    def _cast_activation(
        self, x: Tensor, role: Role, for_weight_grad: bool, amax_group: dist.ProcessGroup | None
    ) -> QTensor:
        hp = self.recipe.wgrad == "hp"
        q = self._cast(x, role, for_weight_grad and not hp, group_amax(x, self._scaling(role), amax_group))
        return q._replace(hp=x) if hp and for_weight_grad else q

    def _scaling(self, role: Role) -> Scaling:
        return getattr(self.recipe, role)

    def _cast(self, x: Tensor, role: Role, both: bool, amax: Tensor | None) -> QTensor:
        return cast(x, self._scaling(role), layouts="both" if both else "rows", amax=amax)

    def _multiply(
        self, number: int, a: QTensor, b: QTensor, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        scaling_a, scaling_b = map(self._scaling, _OPERANDS[number])
        fast_accum = self.recipe.fast_accum[number]
        return scaled_mm(a, b, scaling_a, scaling_b, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias)


class _Eager(Products):
    """Through the kernels of a device, for plain tensors without groups of ranks."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        super().__init__(recipe)
        scalings = {"x": recipe.x, "w": recipe.w, "g": recipe.g}
        self._casts = {
            (role, both): (implementation(_CASTS[scaling.gran][both], device), scaling, _arguments(scaling))
            for role, scaling in scalings.items()
            for both in (False, True)
        }
        grans = [(scalings[a].gran, scalings[b].gran) for a, b in _OPERANDS]
        self._products = [
            (implementation("scaled_mm", device, "auto", f"{a}·{b}"), a, b, fast_accum)
            for (a, b), fast_accum in zip(grans, recipe.fast_accum, strict=True)
        ]

    def _cast(self, x: Tensor, role: Role, both: bool, amax: Tensor | None) -> QTensor:
        kernel, scaling, arguments = self._casts[role, both]
        return _quantized(x, scaling, kernel(x.contiguous(), *arguments))

    def _multiply(
        self, number: int, a: QTensor, b: QTensor, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        if bias is not None:
            return super()._multiply(number, a, b, out_dtype, bias)
        kernel, gran_a, gran_b, fast_accum = self._products[number]
        return _cut(kernel(a.data, a.scale, b.data, b.scale, gran_a, gran_b, out_dtype, fast_accum, None), a, b)


_eager = functools.cache(_Eager)


def products_for(recipe: Recipe, x: Tensor, amax_group: dist.ProcessGroup | None) -> Products:
    """The recipe's products: a device's kernels where that gives the same and nothing has to see ops as ops."""
    if amax_group is not None or not _is_plain(x) or not (x.is_cuda or x.is_cpu) or watched():
        return Products(recipe)
    return _eager(recipe, x.device)


def unwatched(chosen: Products, operands: Iterable[Tensor]) -> Products:
    """What `products_for` chose, unless something watches now, gradients are recorded, or an operand is special."""
    if type(chosen) is Products or watched() or torch.is_grad_enabled() or not all(map(_is_plain, operands)):
        return Products(chosen.recipe)
    return chosen


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype in INPUT_DTYPES


def _cut(out: Tensor, a: QTensor, b: QTensor) -> Tensor:
    """Without the padding; a copy, as a view could not be changed in place like a linear layer's output."""
    return out if out.shape == (a.rows, b.rows) else out[: a.rows, : b.rows].clone()
