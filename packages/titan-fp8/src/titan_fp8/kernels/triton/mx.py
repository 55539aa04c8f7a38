"""MX casts: 1×32 blocks with one-byte scales, both layouts from one read of a 128×128 tile."""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.round import load_finite, row_major, scales_of, to_float8
from titan_fp8.reference import round_up


@triton.jit
def exponent_byte(decode):
    """The e8m0 code of a power of two: its biased exponent."""
    return (decode.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def cast_mx_kernel(
    x, q, scale, qt, scale_t, M, K, stride_x, stride_q, stride_qt,
    DUAL: tl.constexpr, MASKED: tl.constexpr, E4M3: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile per program, 32 rows at a time: the rows of one block of the transpose, and few registers."""
    tiles_k = stride_q // 128
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    four = tl.arange(0, 4)
    columns = tile_k * 128 + tl.arange(0, 128)
    for slab in range(4):
        rows = tile_m * 128 + slab * 32 + tl.arange(0, 32)
        mask = (rows < M)[:, None] & (columns < K)[None, :]
        tile = load_finite(x + rows[:, None] * stride_x + columns[None, :], mask, MASKED, HARDWARE)
        blocks = tl.reshape(tile, (32, 4, 32))
        encode, decode = scales_of(tl.max(tl.abs(blocks), axis=2), E4M3, True)
        codes = tl.reshape(to_float8(blocks * encode[:, :, None], E4M3, HARDWARE), (32, 128))
        tl.store(q + rows[:, None] * stride_q + columns[None, :], codes)
        tl.store(scale + rows[:, None] * (stride_q // 32) + (tile_k * 4 + four)[None, :], exponent_byte(decode))
        if DUAL:
            encode_t, decode_t = scales_of(tl.max(tl.abs(tile), axis=0), E4M3, True)
            codes_t = to_float8(tile * encode_t[None, :], E4M3, HARDWARE)
            tl.store(qt + columns[:, None] * stride_qt + rows[None, :], tl.trans(codes_t))
            tl.store(scale_t + columns * (stride_qt // 32) + (tile_m * 4 + slab), exponent_byte(decode_t))


def cast_mx(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `titan_fp8.reference.cast_mx`."""
    q, scale, _, _ = _launch(x, dtype, dual=False)
    return q, scale


def cast_mx_dual(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.cast_mx_dual`."""
    return _launch(x, dtype, dual=True)


def _launch(x: Tensor, dtype: torch.dtype, dual: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = row_major(x)
    rows, columns = round_up(x.shape[0], 128), round_up(x.shape[1], 128)
    q = x.new_empty(rows, columns, dtype=dtype)
    scale = x.new_empty(rows, columns // 32, dtype=torch.uint8)
    qt = x.new_empty((columns, rows) if dual else (0, 0), dtype=dtype)
    scale_t = x.new_empty((columns, rows // 32) if dual else (0, 0), dtype=torch.uint8)
    if q.numel():
        launch(
            cast_mx_kernel, (q.numel() // 128**2,),
            x, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t, *x.shape, x.stride(0), columns, rows,
            DUAL=dual, MASKED=x.shape != q.shape, E4M3=dtype == torch.float8_e4m3fn, HARDWARE=x.is_cuda,
            num_warps=8,
        )  # fmt: skip
    return q, scale.view(torch.float8_e8m0fnu), qt, scale_t.view(torch.float8_e8m0fnu)
