"""The block cast of tokens sorted by expert, with the padding that the weight gradient needs, in one read.

Tiles are numbered in the padded order, where every group starts at a multiple of 128 tokens, so a tile holds rows of
one group only. Its rows go to ``q`` where they were (no padding there) and its columns to ``qt`` where the padded order
puts them, zeros included. The tokens of no group, those at or beyond ``offs[-1]``, form one more group that is written
to ``q`` alone. Each program finds its group from the offsets on the device: the host never reads them.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.round import load_finite, row_major, scales_of, to_float8
from titan_fp8.ops.grouped import empty_grouped
from titan_fp8.reference import padded_tokens


@triton.jit
def cast_grouped_kernel(
    x, offs, offs_padded, q, scale, qt, scale_t, M, K, E, stride_x, stride_q, stride_qt, tiles_k,
    GROUPS: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of the padded order per program; ``GROUPS`` is a power of two above ``E``."""
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    ends = tl.load(offs + groups, mask=groups < E, other=M)  # beyond E: the tokens of no group
    starts = tl.load(offs + groups - 1, mask=(groups > 0) & (groups <= E), other=M)
    starts = tl.where(groups == 0, 0, starts)
    sizes = ends - starts
    padded_ends = tl.cumsum((sizes + 127) // 128 * 128, axis=0)
    if tl.program_id(0) == 0:
        tl.store(offs_padded + groups, padded_ends, mask=groups < E)

    first = tile_m * 128
    group = tl.sum((padded_ends <= first).to(tl.int32), axis=0)
    here = groups == group
    in_group = first - tl.sum(tl.where(here, padded_ends - (sizes + 127) // 128 * 128, 0), axis=0)
    row_start = tl.sum(tl.where(here, starts, 0), axis=0) + in_group
    row_end = tl.sum(tl.where(here, ends, 0), axis=0)  # 0 beyond the last tile of all groups: nothing to read

    lanes = tl.arange(0, 128)
    rows, columns = row_start + lanes, tile_k * 128 + lanes
    readable = rows < row_end
    mask = readable[:, None] & (columns < K)[None, :]
    tile = load_finite(x + rows[:, None] * stride_x + columns[None, :], mask, True, HARDWARE)
    magnitude = tl.abs(tile)
    encode, decode = scales_of(tl.max(magnitude, axis=1), E4M3, POW2)
    codes = to_float8(tile * encode[:, None], E4M3, HARDWARE)
    tl.store(
        q + rows[:, None] * stride_q + columns[None, :], codes, mask=readable[:, None] & (columns < stride_q)[None, :]
    )
    tl.store(scale + tile_k * M + rows, decode, mask=readable)
    if first < stride_qt:
        weight = tl.where(group < E, 1.0, 0.0)
        column_amax = tl.max(magnitude, axis=0) * weight
        encode_t, decode_t = scales_of(column_amax, E4M3, POW2)
        codes_t = to_float8(tl.where(group < E, tile, 0.0) * encode_t[None, :], E4M3, HARDWARE)
        tl.store(qt + columns[:, None] * stride_qt + (first + lanes)[None, :], tl.trans(codes_t))
        tl.store(scale_t + tile_m * stride_q + columns, decode_t)


def cast_grouped(
    x: Tensor, offs: Tensor, dtype: torch.dtype, pow2: bool, scaling: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.cast_grouped`; ``scaling`` is ``block1x128``."""
    q, scale, qt, scale_t, offs_padded = results = empty_grouped(x, offs, dtype, scaling)
    x, offs = row_major(x), offs.contiguous()
    num_groups = offs.shape[0]
    tiles_m, tiles_k = padded_tokens(x.shape[0], num_groups + 1) // 128, q.shape[1] // 128
    launch(
        cast_grouped_kernel, (tiles_m * tiles_k,),
        x, offs, offs_padded, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t,
        *x.shape, num_groups, x.stride(0), q.shape[1], qt.shape[1], tiles_k,
        GROUPS=triton.next_power_of_2(num_groups + 1),
        E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=x.is_cuda, num_warps=8 if pow2 else 16,
    )  # fmt: skip
    return results
