"""The casts of tokens sorted by expert, with the padding that the weight gradient needs.

Tiles are numbered in the padded order, where every group starts at a multiple of 128 tokens (`group_tiles`), so a tile holds
rows of one group only. Its rows go to ``q`` where they were (no padding there) and its columns to ``qt`` where the padded
order puts them, zeros included. The tokens of no group, those at or beyond ``offs[-1]``, are written to ``q`` alone.

Blocks of 128 or 32 find their scales in the tile: one read. A scale of a whole tensor, of a row, or of a group's column is
known only after all of ``x`` was read: a first launch leaves the maxima in memory, combined by atomic maxima on the bits, and
a second reads ``x`` again and casts.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.kernels.triton.group_tiles import group_tiles
from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.mx import exponent_byte
from titan_fp8.kernels.triton.round import load_finite, row_major, scales_of, to_float8
from titan_fp8.reference.results import empty_grouped


@triton.jit
def tile_of(tiles, tiles_k):
    """The program's tile: its first row in the padded order, its column of tiles, its group, its first row in ``x``, its rows."""
    tile_m, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    own = tiles + tile_m * 4
    group, row_start, row_end = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    return tile_m.to(tl.int64) * 128, tile_k.to(tl.int64), group, row_start.to(tl.int64), row_end - row_start


@triton.jit
def load_grouped(x, tiles, K, stride_x, tiles_k, HARDWARE: tl.constexpr):
    """The program's 128×128 tile of the padded order, and where it lies.

    In order: its first row in the padded order, its column of tiles, its group, its first row in ``x``, whether each row is of
    this group, and the values in float32, zero where there are none.
    """
    first, tile_k, group, row_start, num_rows = tile_of(tiles, tiles_k)
    lanes = tl.arange(0, 128)
    readable = lanes < num_rows
    mask = readable[:, None] & (lanes < (K - tile_k * 128).to(tl.int32))[None, :]
    # Offsets from the tile's corner fit 32 bits: fewer registers.
    x += row_start * stride_x + tile_k * 128
    tile = load_finite(x + (lanes[:, None] * stride_x + lanes[None, :]), mask, True, HARDWARE)
    return first, tile_k, group, row_start, readable, tile


@triton.jit
def cast_grouped_kernel(
    x, tiles, q, scale, qt, scale_t, M, K, E, stride_x, stride_q, stride_qt, tiles_k,
    E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of the padded order per program."""
    first, tile_k, group, row_start, readable, tile = load_grouped(x, tiles, K, stride_x, tiles_k, HARDWARE)
    lanes = tl.arange(0, 128)
    encode, decode = scales_of(tl.max(tl.abs(tile), axis=1), E4M3, POW2)
    codes = to_float8(tile * encode[:, None], E4M3, HARDWARE)
    q += row_start * stride_q + tile_k * 128
    tl.store(q + (lanes[:, None] * stride_q + lanes[None, :]), codes, mask=readable[:, None])
    tl.store(scale + tile_k * M + row_start + lanes, decode, mask=readable)
    if first < stride_qt:
        own = tl.where(group < E, tile, 0.0)
        encode_t, decode_t = scales_of(tl.max(tl.abs(own), axis=0), E4M3, POW2)
        codes_t = to_float8(own * encode_t[None, :], E4M3, HARDWARE)
        qt += tile_k * 128 * stride_qt + first
        tl.store(qt + (lanes[:, None] * stride_qt + lanes[None, :]), tl.trans(codes_t))
        tl.store(scale_t + first // 128 * stride_q + tile_k * 128 + lanes, decode_t)


@triton.jit
def cast_grouped_mx_kernel(
    x, tiles, q, scale, qt, scale_t, M, K, E, stride_x, stride_q, stride_qt, tiles_k,
    E4M3: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of the padded order in 1×32 blocks, 32 rows at a time, as `mx.cast_mx_kernel` does it."""
    first, tile_k, group, row_start, num_rows = tile_of(tiles, tiles_k)
    # Offsets from the tile's corner fit 32 bits: fewer registers, so that three programs fit on a multiprocessor.
    x += row_start * stride_x + tile_k * 128
    q += row_start * stride_q + tile_k * 128
    scale += row_start * (stride_q // 32) + tile_k * 4
    qt += tile_k * 128 * stride_qt + first
    scale_t += tile_k * 128 * (stride_qt // 32) + first // 32
    num_columns = (K - tile_k * 128).to(tl.int32)
    columns, four = tl.arange(0, 128), tl.arange(0, 4)
    for slab in range(4):
        rows = slab * 32 + tl.arange(0, 32)
        readable = (rows < num_rows)[:, None]
        mask = readable & (columns < num_columns)[None, :]
        tile = load_finite(x + (rows[:, None] * stride_x + columns[None, :]), mask, True, HARDWARE)
        blocks = tl.reshape(tile, (32, 4, 32))
        encode, decode = scales_of(tl.max(tl.abs(blocks), axis=2), E4M3, True)
        codes = tl.reshape(to_float8(blocks * encode[:, :, None], E4M3, HARDWARE), (32, 128))
        tl.store(q + (rows[:, None] * stride_q + columns[None, :]), codes, mask=readable)
        tl.store(scale + (rows[:, None] * (stride_q // 32) + four[None, :]), exponent_byte(decode), mask=readable)
        if first < stride_qt:
            own = tl.where(group < E, tile, 0.0)
            encode_t, decode_t = scales_of(tl.max(tl.abs(own), axis=0), E4M3, True)
            codes_t = to_float8(own * encode_t[None, :], E4M3, HARDWARE)
            tl.store(qt + (columns[:, None] * stride_qt + rows[None, :]), tl.trans(codes_t))
            tl.store(scale_t + columns * (stride_qt // 32) + slab, exponent_byte(decode_t))


@triton.jit
def grouped_amax_kernel(
    x, tiles, row_bits, column_bits, K, E, stride_x, stride_q, tiles_k, VECTOR: tl.constexpr, HARDWARE: tl.constexpr
):
    """Largest finite magnitudes: with ``VECTOR`` of each row, ``[M]``, and of each column of each group, ``[E + 1, Kp]``; else
    one of all rows of groups, in ``row_bits``.
    """
    _, tile_k, group, row_start, readable, tile = load_grouped(x, tiles, K, stride_x, tiles_k, HARDWARE)
    lanes = tl.arange(0, 128)
    value = tl.abs(tile)
    # A maximum of nothing but NaN is NaN; compare with zero so that the bits stay those of a number.
    by_row = tl.max(value, axis=1)
    by_row = tl.where(by_row > 0.0, by_row, 0.0)
    if VECTOR:
        by_column = tl.max(value, axis=0)
        by_column = tl.where(by_column > 0.0, by_column, 0.0)
        tl.atomic_max(row_bits + row_start + lanes, by_row.to(tl.int32, bitcast=True), mask=readable)
        columns = tile_k * 128 + lanes
        own = column_bits + group.to(tl.int64) * stride_q + columns
        tl.atomic_max(own, by_column.to(tl.int32, bitcast=True), mask=columns < tl.where(group < E, K, 0))
    else:
        tl.atomic_max(row_bits, tl.max(by_row, axis=0).to(tl.int32, bitcast=True), mask=group < E)


@triton.jit
def cast_grouped_with_amax_kernel(
    x, tiles, row_amax, column_amax, q, scale, qt, scale_t, K, E, stride_x, stride_q, stride_qt, tiles_k,
    VECTOR: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of the padded order: with ``VECTOR`` an amax per row and per column of a group, else one in all."""
    first, tile_k, group, row_start, readable, tile = load_grouped(x, tiles, K, stride_x, tiles_k, HARDWARE)
    lanes = tl.arange(0, 128)
    if VECTOR:
        encode, decode = scales_of(tl.load(row_amax + row_start + lanes, mask=readable, other=0.0), E4M3, POW2)
        codes = to_float8(tile * encode[:, None], E4M3, HARDWARE)
        if tile_k == 0:
            tl.store(scale + row_start + lanes, decode, mask=readable)
    else:
        encode, decode = scales_of(tl.load(row_amax), E4M3, POW2)
        codes = to_float8(tile * encode, E4M3, HARDWARE)
        if tl.program_id(0) == 0:
            tl.store(scale, decode)
    q += row_start * stride_q + tile_k * 128
    tl.store(q + (lanes[:, None] * stride_q + lanes[None, :]), codes, mask=readable[:, None])
    if first < stride_qt:
        if VECTOR:
            own = column_amax + group.to(tl.int64) * stride_q + tile_k * 128 + lanes
            encode_t, decode_t = scales_of(tl.load(own), E4M3, POW2)
            codes_t = to_float8(tl.where(group < E, tile, 0.0) * encode_t[None, :], E4M3, HARDWARE)
        else:
            decode_t = tl.zeros((128,), tl.float32) + decode
            codes_t = tl.where(group < E, codes, 0).to(tl.uint8)
        qt += tile_k * 128 * stride_qt + first
        tl.store(qt + (lanes[:, None] * stride_qt + lanes[None, :]), tl.trans(codes_t))
        tl.store(scale_t + first // 128 * stride_q + tile_k * 128 + lanes, decode_t)


def cast_grouped(
    x: Tensor, offs: Tensor, dtype: torch.dtype, pow2: bool, scaling: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.cast_grouped`; ``scaling`` is ``block1x128``, ``mx32``, ``tensor`` or ``row``."""
    q, scale, qt, scale_t, offs_padded = results = empty_grouped(x, offs, dtype, scaling)
    num_groups, num_rows = offs.shape[0], x.shape[0]
    x, tiles = row_major(x), group_tiles(offs, num_rows, offs_padded)
    tiles_k = q.shape[1] // 128
    programs, e4m3 = ((tiles.shape[0] - 1) * tiles_k,), dtype == torch.float8_e4m3fn
    codes, codes_t = q.view(torch.uint8), qt.view(torch.uint8)
    strides = (x.stride(0), q.shape[1], qt.shape[1], tiles_k)
    if scaling == "block1x128":
        launch(
            cast_grouped_kernel, programs, x, tiles, codes, scale, codes_t, scale_t, *x.shape, num_groups, *strides,
            E4M3=e4m3, POW2=pow2, HARDWARE=x.is_cuda, num_warps=4,
        )  # fmt: skip
        return results
    if scaling == "mx32":
        launch(
            cast_grouped_mx_kernel, programs, x, tiles, codes, scale.view(torch.uint8), codes_t, scale_t.view(torch.uint8),
            *x.shape, num_groups, *strides, E4M3=e4m3, HARDWARE=x.is_cuda, num_warps=8,
        )  # fmt: skip
        return results
    vector = scaling == "row"
    sizes = (num_rows, (num_groups + 1) * q.shape[1]) if vector else (1, 0)
    row_bits, column_bits = torch.zeros(sum(sizes), dtype=torch.int32, device=x.device).split(sizes)
    launch(
        grouped_amax_kernel, programs, x, tiles, row_bits, column_bits, x.shape[1], num_groups, x.stride(0), q.shape[1],
        tiles_k, VECTOR=vector, HARDWARE=x.is_cuda, num_warps=4,
    )  # fmt: skip
    row_amax, column_amax = row_bits.view(torch.float32), column_bits.view(torch.float32)
    launch(
        cast_grouped_with_amax_kernel, programs, x, tiles, row_amax, column_amax, codes, scale, codes_t, scale_t,
        x.shape[1], num_groups, *strides, VECTOR=vector, E4M3=e4m3, POW2=pow2, HARDWARE=x.is_cuda, num_warps=4,
    )  # fmt: skip
    return results
