"""The casts of tokens sorted by expert, with the padding that the weight gradient needs.

Tiles are numbered in the padded order, where every group starts at a multiple of 128 tokens, so a tile holds rows of
one group only. Its rows go to ``q`` where they were (no padding there) and its columns to ``qt`` where the padded order
puts them, zeros included. The tokens of no group, those at or beyond ``offs[-1]``, form one more group that is written
to ``q`` alone. Each program finds its group from the offsets on the device: the host never reads them.

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

from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.mx import exponent_byte
from titan_fp8.kernels.triton.round import load_finite, row_major, scales_of, to_float8
from titan_fp8.kernels.triton.tensor import amax
from titan_fp8.reference import padded_tokens
from titan_fp8.reference.results import empty_grouped


@triton.jit
def group_of(offs, offs_padded, first, M, E, GROUPS: tl.constexpr, store):
    """The group whose tile starts at ``first`` of the padded order, its first row there and the end of its rows in ``x``.

    ``GROUPS`` is a power of two above ``E``. Group ``E`` are the tokens of no group; beyond the last tile of all the end is 0, so
    that nothing is read. ``store`` says whether to write where groups end in the padded order.
    """
    groups = tl.arange(0, GROUPS)
    ends = tl.load(offs + groups, mask=groups < E, other=M)  # beyond E: the tokens of no group
    starts = tl.load(offs + groups - 1, mask=(groups > 0) & (groups <= E), other=M)
    starts = tl.where(groups == 0, 0, starts)
    sizes = ends - starts
    padded_ends = tl.cumsum((sizes + 127) // 128 * 128, axis=0)
    if store:
        tl.store(offs_padded + groups, padded_ends, mask=groups < E)
    group = tl.sum((padded_ends <= first).to(tl.int32), axis=0)
    here = groups == group
    in_group = first - tl.sum(tl.where(here, padded_ends - (sizes + 127) // 128 * 128, 0), axis=0)
    row_start = tl.sum(tl.where(here, starts, 0), axis=0) + in_group
    return group, row_start, tl.sum(tl.where(here, ends, 0), axis=0)


@triton.jit
def load_grouped(x, offs, offs_padded, M, K, E, stride_x, tiles_k, store, GROUPS: tl.constexpr, HARDWARE: tl.constexpr):
    """The program's 128×128 tile of the padded order, and where it lies.

    In order: its first row in the padded order, its column of tiles, its group, its rows in ``x`` and whether each is of this
    group, its columns, and the values in float32, zero where there are none.
    """
    first, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64) * 128, (tl.program_id(0) % tiles_k).to(tl.int64)
    group, row_start, row_end = group_of(offs, offs_padded, first, M, E, GROUPS, store)
    rows, columns = row_start + tl.arange(0, 128), tile_k * 128 + tl.arange(0, 128)
    readable = rows < row_end
    mask = readable[:, None] & (columns < K)[None, :]
    tile = load_finite(x + rows[:, None] * stride_x + columns[None, :], mask, True, HARDWARE)
    return first, tile_k, group, rows, readable, columns, tile


@triton.jit
def cast_grouped_kernel(
    x, offs, offs_padded, q, scale, qt, scale_t, M, K, E, stride_x, stride_q, stride_qt, tiles_k,
    GROUPS: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of the padded order per program; ``GROUPS`` is a power of two above ``E``."""
    first, tile_k, group, rows, readable, columns, tile = load_grouped(
        x, offs, offs_padded, M, K, E, stride_x, tiles_k, tl.program_id(0) == 0, GROUPS, HARDWARE
    )
    magnitude = tl.abs(tile)
    encode, decode = scales_of(tl.max(magnitude, axis=1), E4M3, POW2)
    codes = to_float8(tile * encode[:, None], E4M3, HARDWARE)
    tl.store(q + rows[:, None] * stride_q + columns[None, :], codes, mask=readable[:, None])
    tl.store(scale + tile_k * M + rows, decode, mask=readable)
    if first < stride_qt:
        weight = tl.where(group < E, 1.0, 0.0)
        column_amax = tl.max(magnitude, axis=0) * weight
        encode_t, decode_t = scales_of(column_amax, E4M3, POW2)
        codes_t = to_float8(tl.where(group < E, tile, 0.0) * encode_t[None, :], E4M3, HARDWARE)
        tl.store(qt + columns[:, None] * stride_qt + (first + tl.arange(0, 128))[None, :], tl.trans(codes_t))
        tl.store(scale_t + first // 128 * stride_q + columns, decode_t)


@triton.jit
def cast_grouped_mx_kernel(
    x, offs, offs_padded, q, scale, qt, scale_t, M, K, E, stride_x, stride_q, stride_qt, tiles_k,
    GROUPS: tl.constexpr, E4M3: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of the padded order in 1×32 blocks, 32 rows at a time, as `mx.cast_mx_kernel` does it."""
    first, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64) * 128, (tl.program_id(0) % tiles_k).to(tl.int64)
    group, row_start, row_end = group_of(offs, offs_padded, first, M, E, GROUPS, tl.program_id(0) == 0)
    # Offsets from the tile's corner fit 32 bits: fewer registers, so that three programs fit on a multiprocessor.
    x += row_start * stride_x + tile_k * 128
    q += row_start * stride_q + tile_k * 128
    scale += row_start * (stride_q // 32) + tile_k * 4
    qt += tile_k * 128 * stride_qt + first
    scale_t += tile_k * 128 * (stride_qt // 32) + first // 32
    num_rows, num_columns = (row_end - row_start).to(tl.int32), (K - tile_k * 128).to(tl.int32)
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
    x, offs, offs_padded, row_bits, column_bits, M, K, E, stride_x, stride_q, tiles_k,
    GROUPS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The largest finite magnitude of each row, ``[M]``, and of each column of each group, ``[E + 1, Kp]``."""
    _, _, group, rows, readable, columns, tile = load_grouped(
        x, offs, offs_padded, M, K, E, stride_x, tiles_k, False, GROUPS, HARDWARE
    )
    value = tl.abs(tile)
    # A maximum of nothing but NaN is NaN; compare with zero so that the bits stay those of a number.
    by_row, by_column = tl.max(value, axis=1), tl.max(value, axis=0)
    by_row, by_column = tl.where(by_row > 0.0, by_row, 0.0), tl.where(by_column > 0.0, by_column, 0.0)
    tl.atomic_max(row_bits + rows, by_row.to(tl.int32, bitcast=True), mask=readable)
    own = column_bits + tl.minimum(group, E).to(tl.int64) * stride_q + columns
    tl.atomic_max(own, by_column.to(tl.int32, bitcast=True), mask=columns < tl.where(group < E, K, 0))


@triton.jit
def cast_grouped_with_amax_kernel(
    x, offs, offs_padded, row_amax, column_amax, q, scale, qt, scale_t, M, K, E, stride_x, stride_q, stride_qt, tiles_k,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of the padded order: with ``VECTOR`` an amax per row and per column of a group, else one in all."""
    first, tile_k, group, rows, readable, columns, tile = load_grouped(
        x, offs, offs_padded, M, K, E, stride_x, tiles_k, tl.program_id(0) == 0, GROUPS, HARDWARE
    )
    if VECTOR:
        encode, decode = scales_of(tl.load(row_amax + rows, mask=readable, other=0.0), E4M3, POW2)
        codes = to_float8(tile * encode[:, None], E4M3, HARDWARE)
        if tile_k == 0:
            tl.store(scale + rows, decode, mask=readable)
    else:
        encode, decode = scales_of(tl.load(row_amax), E4M3, POW2)
        codes = to_float8(tile * encode, E4M3, HARDWARE)
        if tl.program_id(0) == 0:
            tl.store(scale, decode)
    tl.store(q + rows[:, None] * stride_q + columns[None, :], codes, mask=readable[:, None])
    if first < stride_qt:
        if VECTOR:
            own = column_amax + tl.minimum(group, E).to(tl.int64) * stride_q + columns
            encode_t, decode_t = scales_of(tl.load(own), E4M3, POW2)
            codes_t = to_float8(tl.where(group < E, tile, 0.0) * encode_t[None, :], E4M3, HARDWARE)
        else:
            decode_t = tl.zeros((128,), tl.float32) + decode
            codes_t = tl.where(group < E, codes, 0).to(tl.uint8)
        tl.store(qt + columns[:, None] * stride_qt + (first + tl.arange(0, 128))[None, :], tl.trans(codes_t))
        tl.store(scale_t + first // 128 * stride_q + columns, decode_t)


def cast_grouped(
    x: Tensor, offs: Tensor, dtype: torch.dtype, pow2: bool, scaling: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.cast_grouped`; ``scaling`` is ``block1x128``, ``mx32``, ``tensor`` or ``row``."""
    q, scale, qt, scale_t, offs_padded = results = empty_grouped(x, offs, dtype, scaling)
    num_groups = offs.shape[0]
    x, offs = row_major(x), offs.contiguous()
    tiles_m, tiles_k = padded_tokens(x.shape[0], num_groups + 1) // 128, q.shape[1] // 128
    groups, e4m3 = triton.next_power_of_2(num_groups + 1), dtype == torch.float8_e4m3fn
    codes, codes_t = q.view(torch.uint8), qt.view(torch.uint8)
    if scaling == "block1x128":
        launch(
            cast_grouped_kernel, (tiles_m * tiles_k,),
            x, offs, offs_padded, codes, scale, codes_t, scale_t,
            *x.shape, num_groups, x.stride(0), q.shape[1], qt.shape[1], tiles_k,
            GROUPS=groups, E4M3=e4m3, POW2=pow2, HARDWARE=x.is_cuda, num_warps=8 if pow2 else 16,
        )  # fmt: skip
        return results
    if scaling == "mx32":
        launch(
            cast_grouped_mx_kernel, (tiles_m * tiles_k,),
            x, offs, offs_padded, codes, scale.view(torch.uint8), codes_t, scale_t.view(torch.uint8),
            *x.shape, num_groups, x.stride(0), q.shape[1], qt.shape[1], tiles_k,
            GROUPS=groups, E4M3=e4m3, HARDWARE=x.is_cuda, num_warps=8,
        )  # fmt: skip
        return results
    if scaling == "tensor":
        row_amax = column_amax = amax(x)
    else:
        bits = torch.zeros(x.shape[0] + (num_groups + 1) * q.shape[1], dtype=torch.int32, device=x.device)
        row_bits, column_bits = bits[: x.shape[0]], bits[x.shape[0] :]
        launch(
            grouped_amax_kernel, (tiles_m * tiles_k,),
            x, offs, offs_padded, row_bits, column_bits, *x.shape, num_groups, x.stride(0), q.shape[1], tiles_k,
            GROUPS=groups, HARDWARE=x.is_cuda, num_warps=16,
        )  # fmt: skip
        row_amax, column_amax = row_bits.view(torch.float32), column_bits.view(torch.float32)
    launch(
        cast_grouped_with_amax_kernel, (tiles_m * tiles_k,),
        x, offs, offs_padded, row_amax, column_amax, codes, scale, codes_t, scale_t,
        *x.shape, num_groups, x.stride(0), q.shape[1], qt.shape[1], tiles_k,
        GROUPS=groups, VECTOR=scaling == "row", E4M3=e4m3, POW2=pow2, HARDWARE=x.is_cuda, num_warps=16,
    )  # fmt: skip
    return results
