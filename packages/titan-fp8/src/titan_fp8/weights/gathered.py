"""A weight that FSDP2 gathered in float8: codes and decode scales, with the shape and dtype of the weight it stands for.

Float8 layers take its codes as they are. The transpose that the input gradient needs is made once per gather, at the
first backward, and freed with the gathered weight. Any other operation sees the values in the weight's dtype, so a model
that reads ``layer.weight`` still works.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from titan_fp8 import ops
from titan_fp8.ops.declare import run_op
from titan_fp8.products import QTensor
from titan_fp8.recipe import Recipe, Scaling
from titan_fp8.reference import dequantize, round_up

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_RESHAPES = (torch.ops.aten.as_strided.default, torch.ops.aten.view.default)


class _Transpose:
    """The transposed operand of one gather; shared by all aliases of the gathered weight."""

    def __init__(self) -> None:
        self.operand: QTensor | None = None


class GatheredWeight(torch.Tensor):
    """A weight ``[N, K]`` held as float8 codes and scales.

    Args:
        codes: Float8 codes as bytes (``torch.uint8``), ``[N, K]``.
        scale: Decode scales: ``[]``, or one for each 128x128 block, ``[ceil(N / 128), ceil(K / 128)]``.
        scaling: How the codes were made.
        dtype: Of the weight it stands for.
    """

    codes: Tensor
    scale: Tensor
    scaling: Scaling

    @staticmethod
    def __new__(
        cls: type[torch.Tensor],
        codes: Tensor,
        scale: Tensor,
        scaling: Scaling,
        dtype: torch.dtype,
        transpose: _Transpose | None = None,
    ) -> "GatheredWeight":
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]
            cls, codes.size(), strides=codes.stride(), dtype=dtype, device=codes.device
        )

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        scaling: Scaling,
        dtype: torch.dtype,
        transpose: _Transpose | None = None,
    ) -> None:
        self.codes = codes
        self.scale = scale
        self.scaling = scaling
        self._transpose = _Transpose() if transpose is None else transpose

    def operand(self, recipe: Recipe, *, for_input_grad: bool) -> QTensor:
        """What a product takes. The transpose is kept until `forget_transpose`, except in compiled graphs."""
        if not for_input_grad or torch.compiler.is_compiling():
            return gathered_operand(self.codes, self.scale, recipe, for_input_grad=for_input_grad)
        kept = self._transpose.operand
        if kept is None:
            kept = gathered_operand(self.codes, self.scale, recipe, for_input_grad=True)
            self._transpose.operand = kept
        return kept

    def forget_transpose(self) -> None:
        """The codes are about to be freed, or have been gathered again."""
        self._transpose.operand = None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.scaling, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> "GatheredWeight":
        return GatheredWeight(inner["codes"], inner["scale"], *meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = args[0] if args and isinstance(args[0], GatheredWeight) else None
        # FSDP2 passes what it gathered through as_strided, detach and Parameter: it must come out the same.
        same_shape = func in _RESHAPES and weight is not None and tuple(args[1]) == tuple(weight.shape)
        if weight is not None and (func in _SAME or same_shape):
            return GatheredWeight(weight.codes, weight.scale, weight.scaling, weight.dtype, weight._transpose)
        args, kwargs = tree_map_only(GatheredWeight, _dequantized, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"GatheredWeight({tuple(self.shape)}, {self.scaling.gran}, {self.dtype})"


def gathered_operand(codes: Tensor, scale: Tensor, recipe: Recipe, *, for_input_grad: bool) -> QTensor:
    """What a product takes: codes padded as it needs, and their transpose for the input gradient alone."""
    rows, columns = codes.shape
    multiple = 16 if recipe.w.gran == "tensor" else 128
    pad_rows, pad_columns = round_up(rows, multiple) - rows, round_up(columns, multiple) - columns
    if not for_input_grad:
        if pad_rows or pad_columns:
            codes = F.pad(codes, (0, pad_columns, 0, pad_rows))
        return QTensor(rows, columns, data=codes.view(recipe.w.dtype), scale=_padded_to_four(scale, recipe))
    scale_t = scale if recipe.w.gran == "tensor" else scale.t()
    data_t = run_op(ops.transpose_codes, codes, multiple).view(recipe.w.dtype)
    return QTensor(rows, columns, data_t=data_t, scale_t=_padded_to_four(scale_t, recipe))


def _padded_to_four(scale: Tensor, recipe: Recipe) -> Tensor:
    """128x128 scales with their last size padded with ones to a multiple of 4, as cuBLASLt reads them."""
    if recipe.w.gran == "tensor":
        return scale
    padding = round_up(scale.shape[-1], 4) - scale.shape[-1]
    return (F.pad(scale, (0, padding), value=1.0) if padding else scale).contiguous()


def _dequantized(weight: GatheredWeight) -> Tensor:
    scaling = weight.scaling
    values = dequantize(weight.codes.view(scaling.dtype), weight.scale, scaling.gran)
    return values.to(weight.dtype)
