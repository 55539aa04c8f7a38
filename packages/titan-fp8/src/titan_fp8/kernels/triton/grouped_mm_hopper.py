"""Grouped float8 products for Hopper (H100, H200), in Gluon: one warp loads, two warpgroups multiply.

The values of `grouped_mm`, bit for bit: partial sums of 128 terms by the tensor cores, scaled and added in float32. There all
warps of a program wait for each other after every partial sum, so that the tensor cores rest while it is added. Here each
half of a tile has a warpgroup of its own: one adds while the other multiplies, and a warp that only issues copies (TMA) runs
ahead of both, into the next tile too. Programs are persistent, one on each multiprocessor. The design is that of CUTLASS's
cooperative kernels and of DeepGEMM (DeepSeek-AI, 2025); Gluon is the level of Triton that says which warp does what.

A tile of 256 columns reads three quarters of what one of 128 does from the L2 cache. The weight gradient has a scale for each
column too, every 128 tokens; they come by TMA as well, as loads into registers would be waited for.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titan_fp8.kernels.triton.group_tiles import group_tiles
from titan_fp8.kernels.triton.launch import launch

_BANDS = 8  # row tiles that share columns of b while those are in the cache
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # Triton 3.6
_CODES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SUM = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
"""How a warpgroup holds ``[64, 128]`` of a product."""
_SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def place(program, tiles_m, tiles_n, BANDS: gl.constexpr):
    """Row and column of a tile: ``BANDS`` row tiles, column by column, then the next band."""
    band = program // (BANDS * tiles_n)
    band_rows = gl.minimum(tiles_m - band * BANDS, BANDS)
    within = program % (BANDS * tiles_n)
    return band * BANDS + within % band_rows, within // band_rows


@gluon.jit
def start_barriers(STAGES: gl.constexpr):
    """Of each stage whether it is full, which one copy says, and whether it is empty, which both warpgroups say."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    return full, empty


@gluon.jit
def partial_sum(left, right):
    """``left · rightᵀ`` of ``[64, 128]`` and ``[128, 128]`` codes in shared memory, in float32."""
    zero = gl.zeros((64, 128), gl.float32, _SUM)
    return warpgroup_mma(left, right.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def store_half(out, values, first_row, row_end, first_column, num_columns):
    """``values [64, 128]`` to rows below ``row_end`` and columns below ``num_columns`` of ``out``."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rounded = gl.convert_layout(values.to(out.dtype.element_ty), LAYOUT)
    rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    columns = first_column + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    pointers = out + rows.to(gl.int64)[:, None] * num_columns + columns[None, :]
    gl.store(pointers, rounded, mask=(rows < row_end)[:, None] & (columns < num_columns)[None, :])


@gluon.jit
def load_rows(
    a, b, a_stages, b_stages, full, empty, tiles, N, E, most_tiles, tiles_n, k_blocks,
    COLUMNS: gl.constexpr, BANDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp of `grouped_mm_kernel`."""
    count = 0
    tiles_m = gl.load(tiles + most_tiles * 4)
    for program in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(program, tiles_m, tiles_n, BANDS)
        group, row_start = gl.load(tiles + tile_m * 4), gl.load(tiles + tile_m * 4 + 1)
        first = gl.minimum(group, E - 1) * N + tile_n * COLUMNS
        for block in range(k_blocks):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (128 + COLUMNS) * 128)
            copy_tile(a, [row_start, block * 128], ready, a_stages.index(stage))
            copy_tile(b, [first, block * 128], ready, b_stages.index(stage))
            count += 1


@gluon.jit
def multiply_rows(
    a_stages, b_stages, full, empty, scale_a, scale_b, tiles, out, M, N, E, most_tiles, tiles_n, k_blocks, stride_scale_b,
    experts_scale_b, HALF: gl.constexpr, SCALING: gl.constexpr, COLUMNS: gl.constexpr, BANDS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup of `grouped_mm_kernel`: 64 rows of each tile, its columns 128 at a time."""
    count = 0
    tiles_m = gl.load(tiles + most_tiles * 4)
    for program in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(program, tiles_m, tiles_n, BANDS)
        group, row_end = gl.load(tiles + tile_m * 4), gl.load(tiles + tile_m * 4 + 2)
        row_start = gl.load(tiles + tile_m * 4 + 1) + HALF * 64
        expert = gl.minimum(group, E - 1).to(gl.int64)
        rows = gl.minimum(row_start + gl.arange(0, 64, layout=gl.SliceLayout(1, _SUM)), M - 1)
        scales = scale_b + expert * experts_scale_b
        left_sum = gl.zeros((64, 128), gl.float32, _SUM)
        right_sum = gl.zeros((64, 128), gl.float32, _SUM)
        if SCALING == "block":
            # Loaded one block ahead: from the L2 cache a load takes longer than a partial sum.
            row_scales = scale_a + rows
            left_scales = scales + tile_n * (COLUMNS // 128) * stride_scale_b
            right_scales = left_scales + gl.where(tile_n * COLUMNS + 128 < N, stride_scale_b, 0)
            next_row, next_left, next_right = gl.load(row_scales), gl.load(left_scales), gl.load(right_scales)
        for block in range(k_blocks):
            stage = count % STAGES
            if SCALING == "block":
                left_factor, right_factor = next_row * next_left, next_row * next_right
                following = gl.minimum(block + 1, k_blocks - 1)
                next_row = gl.load(row_scales + following * M)
                next_left = gl.load(left_scales + following)
                if COLUMNS == 256:
                    next_right = gl.load(right_scales + following)
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            a, b = a_stages.index(stage).slice(HALF * 64, 64), b_stages.index(stage)
            partial = warpgroup_mma_wait(0, deps=[partial_sum(a, b.slice(0, 128))])
            if COLUMNS == 128:
                mbarrier.arrive(empty.index(stage))
            left_sum += partial * left_factor[:, None] if SCALING == "block" else partial
            if COLUMNS == 256:
                partial = warpgroup_mma_wait(0, deps=[partial_sum(a, b.slice(128, 128))])
                mbarrier.arrive(empty.index(stage))
                right_sum += partial * right_factor[:, None] if SCALING == "block" else partial
            count += 1
        first_column = tile_n * COLUMNS
        if SCALING == "row":
            columns = first_column + gl.arange(0, 128, layout=gl.SliceLayout(0, _SUM))
            row_scale = gl.load(scale_a + rows)
            left_sum *= row_scale[:, None] * gl.load(scales + columns, mask=columns < N, other=0.0)[None, :]
            if COLUMNS == 256:
                columns += 128
                right_sum *= row_scale[:, None] * gl.load(scales + columns, mask=columns < N, other=0.0)[None, :]
        elif SCALING == "tensor":
            factor = gl.load(scale_a) * gl.load(scales)
            left_sum *= factor
            right_sum *= factor
        store_half(out, gl.where(group < E, left_sum, 0.0), row_start, row_end, first_column, N)
        if COLUMNS == 256:
            store_half(out, gl.where(group < E, right_sum, 0.0), row_start, row_end, first_column + 128, N)


@gluon.jit(do_not_specialize=["M", "E", "most_tiles", "tiles_n", "k_blocks", "stride_scale_b", "experts_scale_b"])
def grouped_mm_kernel(
    a, scale_a, b, scale_b, tiles, out, M, N, E, most_tiles, tiles_n, k_blocks, stride_scale_b, experts_scale_b,
    SCALING: gl.constexpr, COLUMNS: gl.constexpr, BANDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 rows and ``COLUMNS`` (128 or 256) columns of ``out[M, N]``.

    Arguments as of `grouped_mm.grouped_mm_kernel`, but that ``b`` has blocks of ``COLUMNS``×128, and those it has not:

    Args:
        most_tiles: Rows of ``tiles`` but its last.
        k_blocks: ``ceil(K / 128)``.
        STAGES: Blocks of a tile in shared memory.
    """
    a_stages = gl.allocate_shared_memory(a.dtype, [STAGES, 128, 128], a.layout)
    b_stages = gl.allocate_shared_memory(b.dtype, [STAGES, COLUMNS, 128], b.layout)
    full, empty = start_barriers(STAGES)
    LEFT: gl.constexpr = 0
    RIGHT: gl.constexpr = 1
    # last: warps of the second and the third function and registers of a thread there; the first has four warps, and the rest
    gl.warp_specialize([
        (multiply_rows, (
            a_stages, b_stages, full, empty, scale_a, scale_b, tiles, out, M, N, E, most_tiles, tiles_n, k_blocks,
            stride_scale_b, experts_scale_b, LEFT, SCALING, COLUMNS, BANDS, STAGES,
        )),
        (multiply_rows, (
            a_stages, b_stages, full, empty, scale_a, scale_b, tiles, out, M, N, E, most_tiles, tiles_n, k_blocks,
            stride_scale_b, experts_scale_b, RIGHT, SCALING, COLUMNS, BANDS, STAGES,
        )),
        (load_rows, (
            a, b, a_stages, b_stages, full, empty, tiles, N, E, most_tiles, tiles_n, k_blocks, COLUMNS, BANDS, STAGES,
        )),
    ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit
def tokens_of(offs_padded, expert):
    """An expert's first block of 128 tokens and the end of its blocks."""
    start = gl.load(offs_padded + gl.maximum(expert - 1, 0)) // 128
    return gl.where(expert > 0, start, 0), gl.load(offs_padded + expert) // 128


@gluon.jit
def load_tokens(
    a, b, scale_b, a_stages, b_stages, scale_stages, full, empty, offs_padded, E, tiles_n, tiles_k,
    BANDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp of `grouped_wgrad_kernel`."""
    count = 0
    for program in range(gl.program_id(0), E * tiles_n * tiles_k, gl.num_programs(0)):
        expert = program // (tiles_n * tiles_k)
        tile_n, tile_k = place(program % (tiles_n * tiles_k), tiles_n, tiles_k, BANDS)
        start, end = tokens_of(offs_padded, expert)
        for block in range(start, end):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, 2 * 128 * 128 + 128 * 4)
            copy_tile(a, [tile_n * 128, block * 128], ready, a_stages.index(stage))
            copy_tile(b, [tile_k * 128, block * 128], ready, b_stages.index(stage))
            copy_tile(scale_b, [block, tile_k * 128], ready, scale_stages.index(stage))
            count += 1


@gluon.jit
def multiply_tokens(
    a_stages, b_stages, scale_stages, full, empty, scale_a, offs_padded, out, N, K, E, tiles_n, tiles_k,
    HALF: gl.constexpr, BANDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup of `grouped_wgrad_kernel`: 64 rows of each tile."""
    count = 0
    for program in range(gl.program_id(0), E * tiles_n * tiles_k, gl.num_programs(0)):
        expert = program // (tiles_n * tiles_k)
        tile_n, tile_k = place(program % (tiles_n * tiles_k), tiles_n, tiles_k, BANDS)
        start, end = tokens_of(offs_padded, expert)
        first_row = tile_n * 128 + HALF * 64
        row_scales = scale_a + gl.minimum(first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, _SUM)), N - 1)
        total = gl.zeros((64, 128), gl.float32, _SUM)
        last = gl.maximum(end - 1, 0)
        next_row = gl.load(row_scales + gl.minimum(start, last).to(gl.int64) * N)
        for block in range(start, end):
            stage = count % STAGES
            row_scale = next_row
            next_row = gl.load(row_scales + gl.minimum(block + 1, last).to(gl.int64) * N)
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            running = partial_sum(a_stages.index(stage).slice(HALF * 64, 64), b_stages.index(stage))
            column_scale = scale_stages.index(stage).load(_SUM)
            partial = warpgroup_mma_wait(0, deps=[running])
            mbarrier.arrive(empty.index(stage))
            total += partial * row_scale[:, None] * column_scale
            count += 1
        store_half(out + expert.to(gl.int64) * N * K, total, first_row, N, tile_k * 128, K)


@gluon.jit(do_not_specialize=["E", "tiles_n", "tiles_k"])
def grouped_wgrad_kernel(
    a, scale_a, b, scale_b, offs_padded, out, N, K, E, tiles_n, tiles_k, BANDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """128×128 tiles of every expert's ``out[N, K]``: ``a[N, Mp]`` times ``b[K, Mp]`` over its tokens.

    Arguments as of `grouped_mm.grouped_wgrad_kernel`, but that ``scale_b`` is a TMA descriptor of ``[Mp/128, K]``, blocks of
    1×128, and those it has not:

    Args:
        E: Experts.
        BANDS: Row tiles per band.
        STAGES: Blocks of a tile in shared memory.
    """
    a_stages = gl.allocate_shared_memory(a.dtype, [STAGES, 128, 128], a.layout)
    b_stages = gl.allocate_shared_memory(b.dtype, [STAGES, 128, 128], b.layout)
    scale_stages = gl.allocate_shared_memory(scale_b.dtype, [STAGES, 1, 128], scale_b.layout)
    full, empty = start_barriers(STAGES)
    LEFT: gl.constexpr = 0
    RIGHT: gl.constexpr = 1
    # last: warps of the second and the third function and registers of a thread there; the first has four warps, and the rest
    gl.warp_specialize([
        (multiply_tokens, (
            a_stages, b_stages, scale_stages, full, empty, scale_a, offs_padded, out, N, K, E, tiles_n, tiles_k,
            LEFT, BANDS, STAGES,
        )),
        (multiply_tokens, (
            a_stages, b_stages, scale_stages, full, empty, scale_a, offs_padded, out, N, K, E, tiles_n, tiles_k,
            RIGHT, BANDS, STAGES,
        )),
        (load_tokens, (
            a, b, scale_b, a_stages, b_stages, scale_stages, full, empty, offs_padded, E, tiles_n, tiles_k, BANDS, STAGES,
        )),
    ], [4, 1], [232, 40])  # fmt: skip


def grouped_scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, scaling: str, out: Tensor
) -> None:
    """``out[M, N]`` of `grouped_mm.grouped_scaled_mm`; ``scaling`` is ``block``, ``row`` or ``tensor``."""
    (num_rows, contracted), (num_experts, num_columns, _) = a.shape, b.shape
    columns = 256 if num_columns > 128 else 128
    tiles = group_tiles(offs, num_rows)
    launch(
        grouped_mm_kernel, _programs(a),
        TensorDescriptor.from_tensor(a, [128, 128], _CODES), scale_a,
        TensorDescriptor.from_tensor(b.view(-1, contracted), [columns, 128], _CODES), scale_b.contiguous(),
        tiles, out, num_rows, num_columns, num_experts, tiles.shape[0] - 1, -(-num_columns // columns), -(-contracted // 128),
        scale_b.shape[-1] if scaling == "block" else 0, scale_b[0].numel() if scale_b.dim() else 0,
        SCALING=scaling, COLUMNS=columns, BANDS=_BANDS, STAGES=4 if out.element_size() == 2 else 3, num_warps=4,
    )  # fmt: skip


def grouped_scaled_mm_wgrad(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, out: Tensor) -> None:
    """``out[E, N, K]`` of `grouped_mm.grouped_scaled_mm_wgrad`. K must be a multiple of 4."""
    num_experts, num_rows, num_columns = out.shape
    launch(
        grouped_wgrad_kernel, _programs(a),
        TensorDescriptor.from_tensor(a, [128, 128], _CODES), scale_a,
        TensorDescriptor.from_tensor(b, [128, 128], _CODES), TensorDescriptor.from_tensor(scale_b.t(), [1, 128], _SCALES),
        offs.contiguous(), out, num_rows, num_columns, num_experts, -(-num_rows // 128), -(-num_columns // 128),
        BANDS=_BANDS, STAGES=6 if out.element_size() == 2 else 4, num_warps=4,
    )  # fmt: skip


def _programs(a: Tensor) -> tuple[int]:
    return (torch.cuda.get_device_properties(a.device).multi_processor_count,)
