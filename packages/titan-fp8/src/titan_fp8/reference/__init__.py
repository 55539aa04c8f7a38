"""Casts, products and fusions in plain torch: what the kernels must equal, and what runs where there are none."""

from titan_fp8.reference.cast import (
    amax,
    cast_block,
    cast_block_dual,
    cast_mx,
    cast_mx_dual,
    cast_row,
    cast_row_dual,
    cast_tensor,
    cast_tensor_dual,
    cast_weight_block,
    cast_weights_block,
    pad_matrix,
    round_up,
)
from titan_fp8.reference.fused import (
    rmsnorm_backward,
    rmsnorm_cast_block,
    swiglu,
    swiglu_backward,
    swiglu_backward_cast_block,
    swiglu_cast_block,
)
from titan_fp8.reference.grouped import (
    cast_grouped,
    grouped_scaled_mm,
    grouped_scaled_mm_wgrad,
    padded_offsets,
    padded_tokens,
)
from titan_fp8.reference.matmul import dequantize, scaled_mm
from titan_fp8.reference.round import round_to_float8
from titan_fp8.reference.scale import FLOAT8_EMAX, FLOAT8_MAX, encode_decode_scales, encode_exponent, finite_amax

__all__ = [
    "FLOAT8_EMAX",
    "FLOAT8_MAX",
    "amax",
    "cast_block",
    "cast_block_dual",
    "cast_grouped",
    "cast_mx",
    "cast_mx_dual",
    "cast_row",
    "cast_row_dual",
    "cast_tensor",
    "cast_tensor_dual",
    "cast_weight_block",
    "cast_weights_block",
    "dequantize",
    "encode_decode_scales",
    "encode_exponent",
    "finite_amax",
    "grouped_scaled_mm",
    "grouped_scaled_mm_wgrad",
    "pad_matrix",
    "padded_offsets",
    "padded_tokens",
    "rmsnorm_backward",
    "rmsnorm_cast_block",
    "round_to_float8",
    "round_up",
    "scaled_mm",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_cast_block",
    "swiglu_cast_block",
]
