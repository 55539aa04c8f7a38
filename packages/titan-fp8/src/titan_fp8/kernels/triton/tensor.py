"""Casts whose scale is known before the tile is read: tensor scaling, and row scaling in both layouts.

Two launches. The first reads ``x`` and leaves amaxes in memory: one for the tensor, or one per row and per column,
combined by atomic maxima on the bits (positive floats order like integers, so the result does not depend on the order).
The second reads ``x`` again and writes both layouts. 2 + 2 + 1 + 1 bytes per element; 4 when the amax is given.
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
from titan_fp8.reference import encode_decode_scales, round_up

_FLAT_BLOCK, _FLAT_BLOCKS = 8192, 4


@triton.jit
def amax_kernel(
    x, amax_bits, numel, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, HARDWARE: tl.constexpr
):
    """The largest finite magnitude of a flat tensor, ``BLOCKS`` blocks per program."""
    largest = tl.zeros((BLOCK,), tl.float32)
    start = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS) + tl.arange(0, BLOCK)
    for block in tl.static_range(BLOCKS):
        index = start + block * BLOCK
        value = tl.abs(load_finite(x + index, index < numel, MASKED, HARDWARE))
        largest = tl.where(value > largest, value, largest)
    tl.atomic_max(amax_bits, tl.max(largest, axis=0).to(tl.int32, bitcast=True))


@triton.jit
def row_column_amax_kernel(
    x, row_amax_bits, column_amax_bits, M, K, stride_x, tiles_k, MASKED: tl.constexpr, HARDWARE: tl.constexpr
):
    """The largest finite magnitude of each row and each column."""
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    lanes = tl.arange(0, 128)
    rows, columns = tile_m * 128 + lanes, tile_k * 128 + lanes
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    value = tl.abs(load_finite(x + rows[:, None] * stride_x + columns[None, :], mask, MASKED, HARDWARE))
    # A maximum of nothing but NaN is NaN; compare with zero so that the bits stay those of a number.
    by_row, by_column = tl.max(value, axis=1), tl.max(value, axis=0)
    by_row, by_column = tl.where(by_row > 0.0, by_row, 0.0), tl.where(by_column > 0.0, by_column, 0.0)
    tl.atomic_max(row_amax_bits + rows, by_row.to(tl.int32, bitcast=True), mask=rows < M)
    tl.atomic_max(column_amax_bits + columns, by_column.to(tl.int32, bitcast=True), mask=columns < K)


@triton.jit
def cast_with_amax_kernel(
    x, amax, amax_t, q, scale, qt, scale_t, M, K, stride_x, stride_q, stride_qt, tiles_k,
    VECTOR: tl.constexpr, DUAL: tl.constexpr, MASKED: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile: with ``VECTOR`` an amax per row and column, else one in all. Infinity saturates a given amax."""
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    lanes = tl.arange(0, 128)
    rows, columns = tile_m * 128 + lanes, tile_k * 128 + lanes
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    tile = load_finite(x + rows[:, None] * stride_x + columns[None, :], mask, MASKED, HARDWARE)
    inside = (rows < stride_qt)[:, None] & (columns < stride_q)[None, :]
    if VECTOR:
        encode, decode = scales_of(tl.load(amax + rows, mask=rows < stride_qt, other=0.0), E4M3, POW2)
        codes = to_float8(tile * encode[:, None], E4M3, HARDWARE)
        if tile_k == 0:
            tl.store(scale + rows, decode, mask=rows < stride_qt)
        encode_t, decode_t = scales_of(tl.load(amax_t + columns, mask=columns < stride_q, other=0.0), E4M3, POW2)
        codes_t = to_float8(tile * encode_t[None, :], E4M3, HARDWARE)
        if tile_m == 0:
            tl.store(scale_t + columns, decode_t, mask=columns < stride_q)
    else:
        encode, decode = scales_of(tl.load(amax), E4M3, POW2)
        codes = to_float8(tile * encode, E4M3, HARDWARE)
        codes_t = codes
        if tl.program_id(0) == 0:
            tl.store(scale, decode)
    q_pointers = q + rows[:, None] * stride_q + columns[None, :]
    if MASKED:
        tl.store(q_pointers, codes, mask=inside)
    else:
        tl.store(q_pointers, codes)
    if DUAL:
        qt_pointers = qt + columns[:, None] * stride_qt + rows[None, :]
        if MASKED:
            tl.store(qt_pointers, tl.trans(codes_t), mask=tl.trans(inside))
        else:
            tl.store(qt_pointers, tl.trans(codes_t))


def amax(x: Tensor) -> Tensor:
    """See `titan_fp8.reference.amax`."""
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel():
        flat = x.contiguous()
        chunk = _FLAT_BLOCK * _FLAT_BLOCKS
        launch(
            amax_kernel, (triton.cdiv(flat.numel(), chunk),),
            flat, bits, flat.numel(), BLOCK=_FLAT_BLOCK, BLOCKS=_FLAT_BLOCKS, MASKED=flat.numel() % chunk != 0,
            HARDWARE=x.is_cuda, num_warps=8,
        )  # fmt: skip
    return bits.view(torch.float32)


def cast_tensor(x: Tensor, dtype: torch.dtype, pow2: bool, known_amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `titan_fp8.reference.cast_tensor`."""
    q, scale, _, _ = _cast_tensor(x, dtype, pow2, known_amax, dual=False)
    return q, scale


def cast_tensor_dual(
    x: Tensor, dtype: torch.dtype, pow2: bool, known_amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.cast_tensor_dual`."""
    q, scale, qt, _ = _cast_tensor(x, dtype, pow2, known_amax, dual=True)
    return q, qt, scale


def cast_row_dual(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.cast_row_dual`."""
    x = row_major(x)
    rows, columns = round_up(x.shape[0], 16), round_up(x.shape[1], 16)
    bits = torch.zeros(rows + columns, dtype=torch.int32, device=x.device)  # one fill for both vectors
    row_bits, column_bits = bits[:rows], bits[rows:]
    if x.numel():
        launch(
            row_column_amax_kernel, (triton.cdiv(x.shape[0], 128) * triton.cdiv(x.shape[1], 128),),
            x, row_bits, column_bits, *x.shape, x.stride(0), triton.cdiv(x.shape[1], 128),
            MASKED=bool(x.shape[0] % 128 or x.shape[1] % 128), HARDWARE=x.is_cuda, num_warps=4,
        )  # fmt: skip
    return _cast(x, row_bits.view(torch.float32), column_bits.view(torch.float32), dtype, pow2, vector=True, dual=True)


def _cast_tensor(
    x: Tensor, dtype: torch.dtype, pow2: bool, known_amax: Tensor | None, dual: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    largest = amax(x) if known_amax is None else known_amax.float()
    return _cast(row_major(x), largest, largest, dtype, pow2, vector=False, dual=dual)


def _cast(
    x: Tensor, largest: Tensor, largest_t: Tensor, dtype: torch.dtype, pow2: bool, *, vector: bool, dual: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = round_up(x.shape[0], 16), round_up(x.shape[1], 16)
    q = x.new_empty(rows, columns, dtype=dtype)
    qt = x.new_empty((columns, rows) if dual else (0, 0), dtype=dtype)
    scale = x.new_empty((rows, 1) if vector else (), dtype=torch.float32)
    scale_t = x.new_empty((columns, 1) if vector else (), dtype=torch.float32)
    if q.numel() == 0:  # nothing to launch on, but scales there are
        scale = encode_decode_scales(largest, dtype, pow2)[1].view_as(scale)
        return q, scale, qt, encode_decode_scales(largest_t, dtype, pow2)[1].view_as(scale_t)
    tiles_k = triton.cdiv(columns, 128)
    launch(
        cast_with_amax_kernel, (triton.cdiv(rows, 128) * tiles_k,),
        x, largest, largest_t, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t,
        *x.shape, x.stride(0), columns, rows, tiles_k,
        VECTOR=vector, DUAL=dual, MASKED=bool(x.shape[0] % 128 or x.shape[1] % 128),
        E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=x.is_cuda, num_warps=4,
    )  # fmt: skip
    return q, scale, qt, scale_t
