"""LayerNorm and GELU fused with the block cast, as `titan_fp8.kernels.triton.fused` does with RMSNorm and SwiGLU.

LayerNorm needs each row's mean and deviation first, one more read of ``x``: 6.06 bytes per element against 8.06 for norm and
cast; GELU: 4.06 against 6.06.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.round import load_tile, round_like, row_major, store_block_tile, widen
from titan_fp8.reference.results import empty_block_dual


@triton.jit
def layer_stats_kernel(
    x, mean, rstd, K, stride_x, eps, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HARDWARE: tl.constexpr
):
    """Mean, and ``1 / sqrt(variance + eps)``, of one row per program; the second pass reads the cache."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        total += widen(tl.load(x + row * stride_x + columns, mask=columns < K, other=0.0), HARDWARE)
    centre = tl.sum(total, axis=0) / K
    squares = tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        values = widen(tl.load(x + row * stride_x + columns, mask=columns < K, other=0.0), HARDWARE)
        off = tl.where(columns < K, values - centre, 0.0)
        squares += off * off
    tl.store(mean + row, centre)
    tl.store(rstd + row, 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / K + eps))


@triton.jit
def layernorm_cast_kernel(
    x, gain, shift, mean, rstd, q, scale, qt, scale_t, M, K, stride_x, stride_q, stride_qt, rows_each,
    MASKED: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """``cast_block_dual((x - mean) · rstd · gain + shift)``, one tile per program; ``rows_each`` rows share a gain."""
    tiles_k = stride_q // 128
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    lanes = tl.arange(0, 128)
    rows, columns = tile_m * 128 + lanes, tile_k * 128 + lanes
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    tile = load_tile(x, M, K, stride_x, tile_m, tile_k, MASKED, HARDWARE)
    centre = tl.load(mean + rows, mask=rows < M, other=0.0)
    factor = tl.load(rstd + rows, mask=rows < M, other=0.0)
    tile = (tile - centre[:, None]) * factor[:, None]
    group = (rows // rows_each)[:, None] * K + columns[None, :]
    tile = tile * widen(tl.load(gain + group, mask=mask, other=0.0), HARDWARE)
    tile = tile + widen(tl.load(shift + group, mask=mask, other=0.0), HARDWARE)
    tile = round_like(tile, x.dtype.element_ty, HARDWARE)
    if MASKED:
        tile = tl.where(mask, tile, 0.0)
    tile = tl.fma(tile, 0.0, tile)  # the product may have overflowed
    store_block_tile(tile, q, scale, qt, scale_t, tile_m, tile_k, stride_q, stride_qt, True, E4M3, POW2, HARDWARE)


@triton.jit
def gelu_cast_kernel(
    x, q, scale, qt, scale_t, M, K, stride_x, stride_q, stride_qt,
    MASKED: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """``cast_block_dual(gelu(x))`` in the tanh form, one tile per program: ``(1 + tanh z) / 2`` is ``sigmoid(2 z)``."""
    tiles_k = stride_q // 128
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    lanes = tl.arange(0, 128)
    rows, columns = tile_m * 128 + lanes, tile_k * 128 + lanes
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    value = load_tile(x, M, K, stride_x, tile_m, tile_k, MASKED, HARDWARE)
    twice = 1.5957691216057308 * (value + 0.044715 * value * value * value)  # 2 sqrt(2 / pi) (x + 0.044715 x^3)
    tile = round_like(value * tl.sigmoid(twice), x.dtype.element_ty, HARDWARE)
    if MASKED:
        tile = tl.where(mask, tile, 0.0)
    store_block_tile(tile, q, scale, qt, scale_t, tile_m, tile_k, stride_q, stride_qt, True, E4M3, POW2, HARDWARE)


def layernorm_cast_block(
    x: Tensor, gain: Tensor, shift: Tensor, eps: float, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.layernorm_cast_block`."""
    q, scale, qt, scale_t = results = empty_block_dual(x, dtype)
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    if q.numel() == 0:
        return *results, mean, rstd
    x, gain, shift = row_major(x), gain.contiguous(), shift.contiguous()
    block = min(triton.next_power_of_2(x.shape[1]), 4096)
    launch(
        layer_stats_kernel, (x.shape[0],),
        x, mean, rstd, x.shape[1], x.stride(0), eps, BLOCK=block, BLOCKS=triton.cdiv(x.shape[1], block),
        HARDWARE=x.is_cuda, num_warps=4,
    )  # fmt: skip
    launch(
        layernorm_cast_kernel, (q.numel() // 128**2,),
        x, gain, shift, mean, rstd, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t,
        *x.shape, x.stride(0), q.shape[1], q.shape[0], x.shape[0] // gain.shape[0],
        MASKED=x.shape != q.shape, E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=x.is_cuda, num_warps=4,
    )  # fmt: skip
    return *results, mean, rstd


def gelu_cast_block(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.gelu_cast_block`."""
    q, scale, qt, scale_t = results = empty_block_dual(x, dtype)
    if q.numel() == 0:
        return results
    x = row_major(x)
    launch(
        gelu_cast_kernel, (q.numel() // 128**2,),
        x, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t,
        *x.shape, x.stride(0), q.shape[1], q.shape[0],
        MASKED=x.shape != q.shape, E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=x.is_cuda, num_warps=8,
    )  # fmt: skip
    return results
