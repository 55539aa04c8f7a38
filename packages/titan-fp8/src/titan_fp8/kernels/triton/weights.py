"""128×128 casts of weights: one weight with its experts, or many weights in one launch after the optimizer step.

For many, a table on the device holds each matrix's addresses and sizes and its first tile's number; a program finds its matrix by
counting the first tiles at or below its own. The scale is shared by both layouts, so the transpose is a permutation of
bytes: 2 + 1 + 1 bytes per element. Experts of one ``[E, N, K]`` parameter are E matrices.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.round import load_tile, scales_of, to_float8
from titan_fp8.reference.results import empty_weight_block

_FIELDS = 9  # first tile, then: w, q, scale, qt, scale_t addresses, N, K, row stride of w


@triton.jit
def cast_weight_tile(
    w, q, scale, qt, scale_t, N, K, stride_w, tile_n, tile_k,
    DUAL: tl.constexpr, MASKED: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of one matrix, its scale, and with ``DUAL`` both of the transpose; tile numbers are int64."""
    tiles_n, tiles_k = (N + 127) // 128, (K + 127) // 128
    lanes = tl.arange(0, 128)
    tile = load_tile(w, N, K, stride_w, tile_n, tile_k, MASKED, HARDWARE)
    by_column = tl.max(tl.abs(tile), axis=0)
    largest = tl.max(
        tl.where(by_column > 0.0, by_column, 0.0), axis=0
    )  # NaN, of a column of nothing finite, is dropped
    encode, decode = scales_of(largest, E4M3, POW2)
    codes = to_float8(tile * encode, E4M3, HARDWARE)
    stride_q, stride_qt = tl.multiple_of(tiles_k * 128, 128), tl.multiple_of(tiles_n * 128, 128)
    q += tile_n * 128 * stride_q + tile_k * 128
    tl.store(q + (lanes[:, None] * stride_q + lanes[None, :]), codes)
    if DUAL:
        qt += tile_k * 128 * stride_qt + tile_n * 128
        tl.store(qt + (lanes[:, None] * stride_qt + lanes[None, :]), tl.trans(codes))

    # Scales, each row padded with ones to a multiple of 4: the last tile of a row writes the padding too.
    wide_k, wide_n = (tiles_k + 3) // 4 * 4, (tiles_n + 3) // 4 * 4
    count_k = tl.where(tile_k == tiles_k - 1, wide_k - tile_k, 1)
    count_n = tl.where(tile_n == tiles_n - 1, wide_n - tile_n, 1)
    four = tl.arange(0, 4)
    own = tl.where(four == 0, decode, 1.0)
    tl.store(scale + tile_n * wide_k + tile_k + four, own, mask=four < count_k)
    if DUAL:
        tl.store(scale_t + tile_k * wide_n + tile_n + four, own, mask=four < count_n)


@triton.jit
def cast_weight_kernel(
    w, q, scale, qt, scale_t, N, K, stride_w, experts_w, experts_q, experts_scale, experts_scale_t,
    DUAL: tl.constexpr, MASKED: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One tile per program of one weight, whose experts, ``experts_*`` elements apart, are the grid's second axis."""
    tiles_k = (K + 127) // 128
    tile_n, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    expert = tl.program_id(1).to(tl.int64)
    cast_weight_tile(
        w + expert * experts_w, q + expert * experts_q, scale + expert * experts_scale,
        qt + expert * experts_q, scale_t + expert * experts_scale_t,
        N, K, stride_w, tile_n, tile_k, DUAL, MASKED, E4M3, POW2, HARDWARE,
    )  # fmt: skip


@triton.jit
def cast_weights_kernel(
    table, NUM_MATRICES: tl.constexpr, PADDED_MATRICES: tl.constexpr, FIELDS: tl.constexpr, INPUT: tl.constexpr,
    MASKED: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One tile per program of one of many matrices. Without ``MASKED``, all sizes are multiples of 128."""
    tile = tl.program_id(0).to(tl.int64)
    matrices = tl.arange(0, PADDED_MATRICES)
    first_tiles = tl.load(table + matrices * FIELDS, mask=matrices < NUM_MATRICES, other=9223372036854775807)
    row_of_table = table + (tl.sum((first_tiles <= tile).to(tl.int32), axis=0) - 1) * FIELDS
    # Torch's allocations start at multiples of 16 bytes, and so do views of whole experts; the launcher checks.
    w = tl.multiple_of(tl.load(row_of_table + 1).to(tl.pointer_type(INPUT)), 16)
    q = tl.multiple_of(tl.load(row_of_table + 2).to(tl.pointer_type(tl.uint8)), 16)
    scale = tl.load(row_of_table + 3).to(tl.pointer_type(tl.float32))
    qt = tl.multiple_of(tl.load(row_of_table + 4).to(tl.pointer_type(tl.uint8)), 16)
    scale_t = tl.load(row_of_table + 5).to(tl.pointer_type(tl.float32))
    N, K = tl.load(row_of_table + 6).to(tl.int32), tl.load(row_of_table + 7).to(tl.int32)
    stride_w = tl.load(row_of_table + 8)
    if not MASKED:
        stride_w = tl.multiple_of(stride_w, 16)
    tile_in_matrix = (tile - tl.load(row_of_table)).to(tl.int32)
    tiles_k = (K + 127) // 128
    tile_n, tile_k = (tile_in_matrix // tiles_k).to(tl.int64), (tile_in_matrix % tiles_k).to(tl.int64)
    cast_weight_tile(w, q, scale, qt, scale_t, N, K, stride_w, tile_n, tile_k, True, MASKED, E4M3, POW2, HARDWARE)


def cast_weight_block(w: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.cast_weight_block`. Needs no table, so that it can be captured in a CUDA graph."""
    results = empty_weight_block(w, dtype)
    _launch_one(w, *results, pow2=pow2, dual=True)
    return results


def cast_weight_rows(w: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """See `titan_fp8.reference.cast_weight_rows`."""
    q, scale, *_ = empty_weight_block(w, dtype, dual=False)
    _launch_one(w, q, scale, q, scale, pow2=pow2, dual=False)
    return q, scale


def _launch_one(w: Tensor, q: Tensor, scale: Tensor, qt: Tensor, scale_t: Tensor, *, pow2: bool, dual: bool) -> None:
    if w.numel() == 0:
        return
    w = w.contiguous()
    experts, (rows, columns) = w.numel() // (w.shape[-2] * w.shape[-1]), w.shape[-2:]
    launch(
        cast_weight_kernel, (triton.cdiv(rows, 128) * triton.cdiv(columns, 128), experts),
        w, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t, rows, columns, columns,
        *(tensor.numel() // experts for tensor in (w, q, scale, scale_t)),
        DUAL=dual, MASKED=bool(rows % 128 or columns % 128), E4M3=q.dtype == torch.float8_e4m3fn, POW2=pow2,
        HARDWARE=w.is_cuda, num_warps=4,
    )  # fmt: skip


def cast_weights_block(weights: list[Tensor], dtype: torch.dtype, pow2: bool) -> list[Tensor]:
    """See `titan_fp8.reference.cast_weights_block`. Weights of several dtypes take one launch each."""
    results: list[list[Tensor]] = [list(empty_weight_block(w, dtype)) for w in weights]
    for input_dtype in dict.fromkeys(w.dtype for w in weights):
        chosen = [index for index, w in enumerate(weights) if w.dtype == input_dtype and w.numel()]
        if chosen:
            _launch([weights[i] for i in chosen], [results[i] for i in chosen], dtype, pow2)
    return [tensor for four in results for tensor in four]


def _launch(weights: list[Tensor], results: list[list[Tensor]], dtype: torch.dtype, pow2: bool) -> None:
    # Kept alive until the launch is queued. An odd view of a larger buffer is copied to an aligned one.
    weights = [w.contiguous() for w in weights]
    weights = [w if w.data_ptr() % 16 == 0 else w.clone() for w in weights]
    table: list[list[int]] = []
    num_tiles = 0
    for w, outputs in zip(weights, results, strict=True):
        matrices = [(w, *outputs)] if w.dim() == 2 else list(zip(w, *outputs, strict=True))
        for matrix, q, scale, qt, scale_t in matrices:
            rows, columns = matrix.shape
            addresses = [tensor.data_ptr() for tensor in (matrix, q, scale, qt, scale_t)]
            table.append([num_tiles, *addresses, rows, columns, matrix.stride(0)])
            num_tiles += triton.cdiv(rows, 128) * triton.cdiv(columns, 128)
    device = weights[0].device
    on_host = torch.tensor(table, dtype=torch.int64, pin_memory=device.type == "cuda")
    launch(
        cast_weights_kernel, (num_tiles,),
        on_host.to(device, non_blocking=True), NUM_MATRICES=len(table),
        PADDED_MATRICES=triton.next_power_of_2(len(table)), FIELDS=_FIELDS, INPUT=_TRITON_DTYPE[weights[0].dtype],
        MASKED=any(size % 128 for w in weights for size in w.shape[-2:]),
        E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=device.type == "cuda", num_warps=4,
    )  # fmt: skip


_TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
