"""1×128 block casts: one read of ``x``, both layouts written from the same tile.

A program owns a 128×128 tile. Its row maxima scale the 1×128 blocks of ``x``, its column maxima those of the transpose,
so the transposed copy that the weight gradient contracts costs no second read: 2 bytes in, 1 + 1 out, and 8/128 of
scales, 4.06 bytes per element against 6.06 for two casts.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.round import load_tile, row_major, store_block_tile
from titan_fp8.reference.results import empty_block_dual


@triton.jit
def cast_block_kernel(
    x, q, scale, qt, scale_t, M, K, stride_x, stride_q, stride_qt,
    DUAL: tl.constexpr, MASKED: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile per program, tiles of one band of rows next to each other."""
    tiles_k = stride_q // 128
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    tile = load_tile(x, M, K, stride_x, tile_m, tile_k, MASKED, HARDWARE)
    store_block_tile(tile, q, scale, qt, scale_t, tile_m, tile_k, stride_q, stride_qt, DUAL, E4M3, POW2, HARDWARE)


def cast_block(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """See `titan_fp8.reference.cast_block`."""
    q, scale, _, _ = _launch(x, dtype, pow2, dual=False)
    return q, scale


def cast_block_dual(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.cast_block_dual`."""
    return _launch(x, dtype, pow2, dual=True)


def _launch(x: Tensor, dtype: torch.dtype, pow2: bool, dual: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, scale, qt, scale_t = results = empty_block_dual(x, dtype, dual)
    if q.numel() == 0:
        return results
    x = row_major(x)
    launch(
        cast_block_kernel, (q.numel() // 128**2,),
        x, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t, *x.shape, x.stride(0), q.shape[1], q.shape[0],
        DUAL=dual, MASKED=x.shape != q.shape, E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=x.is_cuda,
        num_warps=4,
    )  # fmt: skip
    return results
