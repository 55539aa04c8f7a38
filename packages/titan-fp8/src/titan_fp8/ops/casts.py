"""Casts of one matrix, of weights, and of tokens sorted by expert."""

import torch
from torch import Tensor

from titan_fp8.ops.checks import check_cast, check_codes, check_grouped_cast, check_weight, check_weights
from titan_fp8.ops.declare import float8_op
from titan_fp8.reference.results import (
    empty_block_dual,
    empty_grouped,
    empty_weight_block,
    padded_shape,
    round_up,
)

E4M3 = torch.float8_e4m3fn


@float8_op(lambda: None)
def amax(x: Tensor) -> Tensor:
    """The largest finite magnitude of ``x`` (any shape), float32 ``[]``; 0 where there is none."""
    return x.new_empty((), dtype=torch.float32)


@float8_op(check_cast)
def cast_tensor(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One scale: ``x[M, K]`` → ``q[Mp, Kp], scale[]``. Values beyond a given ``amax`` (float32 ``[]``) saturate."""
    return x.new_empty(padded_shape(x, 16), dtype=dtype), x.new_empty((), dtype=torch.float32)


@float8_op(check_cast)
def cast_tensor_dual(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One scale: ``x[M, K]`` → ``q[Mp, Kp], qt[Kp, Mp], scale[]``. Values beyond a given ``amax`` saturate."""
    rows, columns = padded_shape(x, 16)
    scale = x.new_empty((), dtype=torch.float32)
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype), scale


@float8_op(check_cast)
def cast_row(x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """One scale per row: ``x[M, K]`` → ``q[Mp, Kp], scale[Mp, 1]``."""
    rows, columns = padded_shape(x, 16)
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(rows, 1, dtype=torch.float32)


@float8_op(check_cast)
def cast_row_dual(x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One scale per row and per column: ``x[M, K]`` → ``q[Mp, Kp], scale[Mp, 1], qt[Kp, Mp], scale_t[Kp, 1]``."""
    rows, columns = padded_shape(x, 16)
    codes = x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)
    scales = x.new_empty(rows, 1, dtype=torch.float32), x.new_empty(columns, 1, dtype=torch.float32)
    return codes[0], scales[0], codes[1], scales[1]


@float8_op(check_cast)
def cast_block(x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """1×128 blocks: ``x[M, K]`` → ``q[Mp, Kp], scale[Mp, Kp/128]`` with strides ``(1, Mp)``."""
    return empty_block_dual(x, dtype, dual=False)[:2]


@float8_op(check_cast)
def cast_block_dual(x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1×128 blocks both ways, one read: ``q, scale[Mp, Kp/128], qt[Kp, Mp], scale_t[Kp, Mp/128]``."""
    return empty_block_dual(x, dtype)


@float8_op(check_cast)
def cast_mx(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """1×32 blocks: ``x[M, K]`` → ``q[Mp, Kp]``, e8m0 ``scale[Mp, Kp/32]`` (row-major)."""
    return _empty_mx(x, *padded_shape(x, 128), dtype)


@float8_op(check_cast)
def cast_mx_dual(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1×32 blocks both ways: ``q, scale[Mp, Kp/32], qt[Kp, Mp], scale_t[Kp, Mp/32]``, scales e8m0."""
    rows, columns = padded_shape(x, 128)
    return *_empty_mx(x, rows, columns, dtype), *_empty_mx(x, columns, rows, dtype)


def _empty_mx(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(rows, columns // 32, dtype=torch.float8_e8m0fnu)


@float8_op(check_weight)
def cast_weight_block(w: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """128×128 tiles of ``w[N, K]`` or ``w[E, N, K]``: ``q[Np, Kp], scale[Np/128, L4], qt[Kp, Np], scale_t[Kp/128, L4]``."""
    return empty_weight_block(w, dtype)


@float8_op(check_weight)
def cast_weight_rows(w: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """`cast_weight_block` without the transpose: ``q[Np, Kp], scale[Np/128, L4]``."""
    return empty_weight_block(w, dtype, dual=False)[:2]


@float8_op(check_weights)
def cast_weights_block(weights: list[Tensor], dtype: torch.dtype = E4M3, pow2: bool = True) -> list[Tensor]:
    """`cast_weight_block` of every weight in one launch: the four results of the first, of the second, …"""
    return [tensor for w in weights for tensor in empty_weight_block(w, dtype)]


@float8_op(check_codes)
def transpose_codes(codes: Tensor, multiple: int = 128) -> Tensor:
    """Bytes ``codes[N, K]`` (uint8) to their transpose ``[Kp, Np]``, contiguous, sizes rounded up to ``multiple`` with zeros."""
    return codes.new_empty(round_up(codes.shape[1], multiple), round_up(codes.shape[0], multiple))


@float8_op(check_grouped_cast)
def cast_grouped(
    x: Tensor, offs: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, scaling: str = "block1x128"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cast ``x[M, K]``, rows sorted by group, for the forward product and the weight gradient, in one read.

    Rows need no alignment in ``q``; in ``qt`` every group is padded with zeros to a multiple of 128 tokens, within the
    static bound ``Mp = round_up(M + 127·E, 128)``. ``offs`` (int32 ``[E]``, group ends) is never read on the host.

    Returns:
        ``(q[M, Kp], scale, qt[Kp, Mp], scale_t, offs_padded[E])``. ``scale``: ``[]``, ``[M, 1]``, ``[M, Kp/128]`` with
        strides ``(1, M)``, or e8m0 ``[M, Kp/32]``, by ``scaling``. ``scale_t``: ``[Kp, Mp/128]`` with strides ``(1, Kp)``, or
        e8m0 ``[Kp, Mp/32]``. ``Kp`` rounds K up to a multiple of 128.
    """
    return empty_grouped(x, offs, dtype, scaling)
