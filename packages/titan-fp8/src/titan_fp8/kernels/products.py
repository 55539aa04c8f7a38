"""Dense products on a CUDA device: cuBLASLt through torch, or bfloat16 where the hardware has no such scales.

float8 operands with power-of-two scales are exact in bfloat16 (4 significant bits, the exponents of float32), so the
bfloat16 product emulates them without loss; only its speed and its memory are bfloat16's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from titan_fp8.reference import dequantize
from titan_fp8.reference.matmul import no_autocast

_SHORT_ACCUMULATOR = ("tensor", "row")
"""Scalings whose products have Hopper's short accumulator. A product of blocks is promoted to float32 every 128 values, and
torch refuses ``use_fast_accum`` for it."""

_RECIPES = {
    "tensor": ScalingType.TensorWise,
    "row": ScalingType.RowWise,
    "block1x128": ScalingType.BlockWise1x128,
    "block128": ScalingType.BlockWise128x128,
    "mx32": ScalingType.BlockWise1x32,
}


def scaled_mm_cublaslt(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None,
) -> Tensor:
    """See `titan_fp8.ops.scaled_mm`. Row scales give bfloat16 only, other output dtypes are converted from it; a bias
    of a block-scaled product is added after the product is rounded.
    """
    if 0 in (*a.shape, *b.shape):
        empty = a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
        return empty if bias is None else empty + bias
    swizzle = SwizzleType.NO_SWIZZLE
    if scaling_a == "mx32":
        scale_a, scale_b, swizzle = swizzle_mx_scale(scale_a), swizzle_mx_scale(scale_b), SwizzleType.SWIZZLE_32_4_4
    if scaling_b == "row" or scaling_b == "block128":
        scale_b = scale_b.t()
    product_dtype = torch.bfloat16 if scaling_a == "row" else out_dtype
    fused_bias = bias if scaling_a in ("tensor", "row") and product_dtype == out_dtype != torch.float32 else None
    product = F.scaled_mm(
        a,
        b.t(),
        scale_a,
        _RECIPES[scaling_a],
        scale_b,
        _RECIPES[scaling_b],
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        bias=fused_bias,
        output_dtype=product_dtype,
        use_fast_accum=fast_accum and scaling_a in _SHORT_ACCUMULATOR,
    )
    if bias is not None and fused_bias is None:
        product = product.add_(bias)
    return product.to(out_dtype)


def add_scaled_mm_cublaslt(
    out: Tensor,
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    fast_accum: bool,
) -> None:
    """``out += a · bᵀ`` in one product, ``out`` float32 ``[M, N]``; torch 2.15, tensor and 1×128 scales.

    Other arguments as in `titan_fp8.ops.scaled_mm`.
    """
    F.scaled_addmm_(
        out,
        a,
        b.t(),
        scale_a,
        _RECIPES[scaling_a],
        scale_b,
        _RECIPES[scaling_b],
        use_fast_accum=fast_accum and scaling_a in _SHORT_ACCUMULATOR,
    )


def scaled_mm_bf16(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None,
) -> Tensor:
    """See `titan_fp8.ops.scaled_mm`: dequantised to bfloat16 (exact with power-of-two scales) and multiplied there."""
    del fast_accum
    left = dequantize(a, scale_a, scaling_a).bfloat16()
    right = dequantize(b, scale_b, scaling_b).bfloat16()
    with no_autocast(a.device):
        product = left @ right.t()
    return (product if bias is None else product + bias).to(out_dtype)


def swizzle_mx_scale(scale: Tensor) -> Tensor:
    """e8m0 scales ``[R, C]`` in the order Blackwell's tensor cores read them (cuBLAS: 128×4 tiles of 32×4×4 bytes).

    ``R`` must be a multiple of 128 and ``C`` of 4, as `titan_fp8.ops.cast_mx` pads them. Flat, same size.
    """
    rows, columns = scale.shape
    tiles = scale.view(torch.uint8).view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten().view(torch.float8_e8m0fnu)
