"""The casts and products of one recipe on one device, looked up once: what eager code on plain tensors runs.

`titan_fp8.products` decides at every call which op a recipe means, goes through `torch`'s dispatcher where something
watches, and checks operands that a user may have made. Between a layer's own casts and its own products none of that is
needed, and on a GPU it costs more than the kernels of a small layer. `Eager` has the functions of `products` that a layer
uses, bound to a recipe and a device: the same kernels on the same operands, and so the same bits.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_fp8 import products
from titan_fp8.dispatch import implementation
from titan_fp8.ops.checks import INPUT_DTYPES
from titan_fp8.ops.direct import watched
from titan_fp8.products import QTensor
from titan_fp8.recipe import Recipe, Scaling


class Products(Protocol):
    """What a layer asks of the module `titan_fp8.products`, or of `Eager`."""

    def cast_input(
        self, x: Tensor, recipe: Recipe, *, for_weight_grad: bool = True, amax_group: dist.ProcessGroup | None = None
    ) -> QTensor:
        """See `titan_fp8.products.cast_input`."""
        ...

    def cast_weight(
        self, w: Tensor, recipe: Recipe, *, for_input_grad: bool = True, amax_group: dist.ProcessGroup | None = None
    ) -> QTensor:
        """See `titan_fp8.products.cast_weight`."""
        ...

    def cast_grad(
        self, g: Tensor, recipe: Recipe, *, for_weight_grad: bool = True, amax_group: dist.ProcessGroup | None = None
    ) -> QTensor:
        """See `titan_fp8.products.cast_grad`."""
        ...

    def forward_product(
        self, x: QTensor, w: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = ..., bias: Tensor | None = None
    ) -> Tensor:
        """See `titan_fp8.products.forward_product`."""
        ...

    def input_gradient(self, g: QTensor, w: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = ...) -> Tensor:
        """See `titan_fp8.products.input_gradient`."""
        ...

    def weight_gradient(self, g: QTensor, x: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = ...) -> Tensor:
        """See `titan_fp8.products.weight_gradient`."""
        ...


def products_for(recipe: Recipe, x: Tensor, amax_group: dist.ProcessGroup | None) -> Products:
    """`Eager` where it gives the same and nothing has to see ops as ops; else `titan_fp8.products`."""
    if amax_group is not None or not _is_plain(x) or not (x.is_cuda or x.is_cpu) or watched():
        return products
    return eager(recipe, x.device)


def unwatched(chosen: Products, operands: Iterable[Tensor]) -> Products:
    """What `products_for` chose, unless something watches now, gradients are recorded, or an operand is special."""
    if chosen is products or watched() or torch.is_grad_enabled() or not all(map(_is_plain, operands)):
        return products
    return chosen


def _is_plain(x: Tensor) -> bool:
    return type(x) in _PLAIN and x.dtype in INPUT_DTYPES


@functools.cache
def eager(recipe: Recipe, device: torch.device) -> "Eager":
    """The one of this recipe and device."""
    return Eager(recipe, device)


class Eager:
    """The functions of `titan_fp8.products` for plain tensors without groups of ranks. Their ``recipe`` is its own."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._keeps_hp = recipe.wgrad == "hp"
        x, w, g = recipe.x, recipe.w, recipe.g
        self._x = (_caster(x, device, both=False), _caster(x, device, both=not self._keeps_hp))
        self._w = (_caster(w, device, both=False), _caster(w, device, both=True))
        self._g = (_caster(g, device, both=False), _caster(g, device, both=not self._keeps_hp))
        fast = recipe.fast_accum
        self._forward = _product(x, w, device, fast[0])
        self._of_input = _product(g, w, device, fast[1])
        self._of_weight = None if self._keeps_hp else _product(g, x, device, fast[2])

    def cast_input(self, x: Tensor, recipe: Recipe, *, for_weight_grad: bool = True, amax_group: Any = None) -> QTensor:
        """See `titan_fp8.products.cast_input`."""
        q = self._x[for_weight_grad](x)
        return q._replace(hp=x) if self._keeps_hp and for_weight_grad else q

    def cast_weight(self, w: Tensor, recipe: Recipe, *, for_input_grad: bool = True, amax_group: Any = None) -> QTensor:
        """See `titan_fp8.products.cast_weight`."""
        return self._w[for_input_grad](w)

    def cast_grad(self, g: Tensor, recipe: Recipe, *, for_weight_grad: bool = True, amax_group: Any = None) -> QTensor:
        """See `titan_fp8.products.cast_grad`."""
        q = self._g[for_weight_grad](g)
        return q._replace(hp=g) if self._keeps_hp and for_weight_grad else q

    def forward_product(
        self,
        x: QTensor,
        w: QTensor,
        recipe: Recipe,
        *,
        out_dtype: torch.dtype = torch.bfloat16,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See `titan_fp8.products.forward_product`."""
        if bias is not None:
            return products.forward_product(x, w, recipe, out_dtype=out_dtype, bias=bias)
        return _cut(self._forward(x.data, x.scale, w.data, w.scale, out_dtype), x.rows, w.rows)

    def input_gradient(
        self, g: QTensor, w: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """See `titan_fp8.products.input_gradient`."""
        return _cut(self._of_input(g.data, g.scale, w.data_t, w.scale_t, out_dtype), g.rows, w.columns)

    def weight_gradient(
        self, g: QTensor, x: QTensor, recipe: Recipe, *, out_dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """See `titan_fp8.products.weight_gradient`."""
        if self._of_weight is None:
            return products.weight_gradient(g, x, recipe, out_dtype=out_dtype)
        return _cut(self._of_weight(g.data_t, g.scale_t, x.data_t, x.scale_t, out_dtype), g.columns, x.columns)


def _caster(scaling: Scaling, device: torch.device, *, both: bool) -> Callable[[Tensor], QTensor]:
    """`titan_fp8.products.cast` with its choices made."""
    dtype, pow2 = scaling.dtype, scaling.pow2
    kernel = implementation(_CASTS[scaling.gran][both], device)
    if scaling.gran == "tensor" and both:

        def cast_tensor_dual(x: Tensor) -> QTensor:
            data, data_t, scale = kernel(x.contiguous(), dtype, pow2, None)
            return QTensor(x.shape[0], x.shape[1], data, scale, data_t, scale)

        return cast_tensor_dual
    special: dict[str, tuple[Any, ...]] = {"tensor": (dtype, pow2, None), "mx32": (dtype,)}
    arguments = special.get(scaling.gran, (dtype, pow2))
    return lambda x: QTensor(x.shape[0], x.shape[1], *kernel(x.contiguous(), *arguments))


def _product(a: Scaling, b: Scaling, device: torch.device, fast_accum: bool) -> Callable[..., Tensor]:
    """`titan_fp8.ops.scaled_mm` of operands that casts of these two scalings made."""
    kernel = implementation("scaled_mm", device, "auto", f"{a.gran}·{b.gran}")
    gran_a, gran_b = a.gran, b.gran

    def product(data_a: Any, scale_a: Any, data_b: Any, scale_b: Any, out_dtype: torch.dtype) -> Tensor:
        return kernel(data_a, scale_a, data_b, scale_b, gran_a, gran_b, out_dtype, fast_accum, None)

    return product


def _cut(out: Tensor, rows: int, columns: int) -> Tensor:
    """Without the padding; no view, which could not be changed in place."""
    return out if out.shape == (rows, columns) else out[:rows, :columns].clone()


_PLAIN = (Tensor, nn.Parameter)
_CASTS = {
    "tensor": ("cast_tensor", "cast_tensor_dual"),
    "row": ("cast_row", "cast_row_dual"),
    "block1x128": ("cast_block", "cast_block_dual"),
    "block128": ("cast_weight_rows", "cast_weight_block"),
    "mx32": ("cast_mx", "cast_mx_dual"),
}
