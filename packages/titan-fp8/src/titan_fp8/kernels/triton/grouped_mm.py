"""Grouped float8 products: tensor-core operands by TMA, 128-deep partial sums promoted to float32.

Hopper's float8 tensor cores add with about 14 bits, so a long contraction loses precision. Every 128 terms the partial
sum is scaled by both blocks' scales (which a 1×128 or 128×128 recipe needs anyway) and added to a float32 accumulator.

- `grouped_scaled_mm`: a program owns 128 rows of one group and 128 outputs. Row tiles are counted group by group
  (`group_tiles`); the static grid has room for one partial tile per group, and programs beyond the last tile leave. The
  last tile of a group reads into the next one and does not store those rows.
- `grouped_scaled_mm_wgrad`: a program owns a 128×128 tile of one expert's gradient and walks over that group's padded
  tokens, 128 at a time: the padding is zeros, so there is nothing to mask.

On Hopper `grouped_mm_hopper` has the same values faster.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import functools
import importlib
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_fp8.kernels.triton.group_tiles import group_tiles
from titan_fp8.kernels.triton.launch import on_device_of
from titan_fp8.kernels.triton.round import round_like

_TILE = 128
_GLUON = ("3.6.", "3.9.")  # Gluon's names move between releases; these compile the kernels, and a GPU has run the first
_BANDS = 8  # row tiles that share columns of b while those are in the cache


@triton.jit
def grouped_mm_kernel(
    a, scale_a, b, scale_b, tiles, out, M, N, E, tiles_n, stride_scale_b, experts_scale_b,
    K_BLOCKS: tl.constexpr, SCALING: tl.constexpr, BANDS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of ``out[M, N]``.

    Args:
        a: TMA descriptor of ``[M, K]``, blocks of 128×128.
        scale_a: ``SCALING`` "block": ``[M, K/128]`` by columns; "row": ``[M]``; "tensor": one.
        b: TMA descriptor of ``[E·N, K]``, blocks of 128×128.
        scale_b: "block": ``[E, N/128, L4]``; "row": ``[E, N]``; "tensor": one, or one per expert.
        tiles: From `group_tiles`.
        out: ``[M, N]``.
        M: Rows.
        N: Output columns.
        E: Experts.
        tiles_n: ``ceil(N / 128)``.
        stride_scale_b: L4.
        experts_scale_b: Distance between experts' scales.
        K_BLOCKS: ``K / 128``.
        SCALING: See ``scale_a``.
        BANDS: Row tiles per band.
        HARDWARE: Not interpreted.
    """
    program = tl.program_id(0)
    tiles_m = tl.num_programs(0) // tiles_n
    band = program // (BANDS * tiles_n)
    band_rows = tl.minimum(tiles_m - band * BANDS, BANDS)
    tile_m = band * BANDS + (program % (BANDS * tiles_n)) % band_rows
    tile_n = (program % (BANDS * tiles_n)) // band_rows

    own = tiles + tile_m * 4
    group, row_start, row_end = tl.load(own), tl.load(own + 1), tl.load(own + 2)

    if row_start < row_end:
        lanes = tl.arange(0, 128)
        rows = row_start + lanes
        columns = tile_n * 128 + lanes
        accumulator = tl.zeros((128, 128), dtype=tl.float32)
        if group < E:
            readable = tl.minimum(rows, M - 1)
            expert = group.to(tl.int64)
            row_scales = scale_a + readable
            tile_scale = scale_b + expert * experts_scale_b + tile_n * stride_scale_b
            for block in range(K_BLOCKS):
                left = a.load([row_start, block * 128])
                right = b.load([group * N + tile_n * 128, block * 128])
                if SCALING == "block":
                    factor = tl.load(row_scales) * tl.load(tile_scale + block)
                    accumulator += tl.dot(left, tl.trans(right)) * factor[:, None]
                    row_scales += M
                else:
                    accumulator = tl.dot(left, tl.trans(right), accumulator, max_num_imprecise_acc=128)
            if SCALING == "row":
                row_scale = tl.load(row_scales)
                column_scale = tl.load(scale_b + expert * experts_scale_b + columns, mask=columns < N, other=0.0)
                accumulator *= row_scale[:, None] * column_scale[None, :]
            elif SCALING == "tensor":
                accumulator *= tl.load(scale_a) * tl.load(scale_b + expert * experts_scale_b)
        result = round_like(accumulator, out.dtype.element_ty, HARDWARE).to(out.dtype.element_ty)
        pointers = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(pointers, result, mask=(rows < row_end)[:, None] & (columns < N)[None, :])


@triton.jit
def grouped_wgrad_kernel(a, scale_a, b, scale_b, offs_padded, out, N, K, tiles_n, tiles_k, HARDWARE: tl.constexpr):
    """One 128×128 tile of one expert's ``out[N, K]``: ``a[N, Mp]`` times ``b[K, Mp]`` over the group's tokens.

    Args:
        a: TMA descriptor of ``[N, Mp]``, blocks of 128×128.
        scale_a: ``[N, Mp/128]`` stored by columns.
        b: TMA descriptor of ``[K, Mp]``, blocks of 128×128.
        scale_b: ``[K, Mp/128]`` stored by columns.
        offs_padded: Group ends, multiples of 128.
        out: ``[E, N, K]``.
        N: Rows of a gradient.
        K: Columns of a gradient.
        tiles_n: ``ceil(N / 128)``.
        tiles_k: ``ceil(K / 128)``.
        HARDWARE: Not interpreted.
    """
    expert = tl.program_id(0) // (tiles_n * tiles_k)
    tile = tl.program_id(0) % (tiles_n * tiles_k)
    tile_n, tile_k = tile // tiles_k, tile % tiles_k
    end = tl.load(offs_padded + expert) // 128
    start = tl.load(offs_padded + expert - 1, mask=expert > 0, other=0) // 128
    lanes = tl.arange(0, 128)
    rows, columns = tile_n * 128 + lanes, tile_k * 128 + lanes
    accumulator = tl.zeros((128, 128), dtype=tl.float32)
    row_scales = scale_a + start.to(tl.int64) * N + rows
    column_scales = scale_b + start.to(tl.int64) * K + columns
    for block in range(start, end):
        left = a.load([tile_n * 128, block * 128])
        right = b.load([tile_k * 128, block * 128])
        row_scale = tl.load(row_scales, mask=rows < N, other=0.0)
        column_scale = tl.load(column_scales, mask=columns < K, other=0.0)
        accumulator += tl.dot(left, tl.trans(right)) * row_scale[:, None] * column_scale[None, :]
        row_scales += N
        column_scales += K
    result = round_like(accumulator, out.dtype.element_ty, HARDWARE).to(out.dtype.element_ty)
    pointers = out + (expert.to(tl.int64) * N + rows)[:, None] * K + columns[None, :]
    tl.store(pointers, result, mask=(rows < N)[:, None] & (columns < K)[None, :])


def grouped_scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    scaling_a: str,
    scaling_b: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `titan_fp8.reference.grouped_scaled_mm`. The contracted size must be a multiple of 128, as casts pad it."""
    num_rows, contracted = a.shape
    num_experts, num_columns, _ = b.shape
    out = a.new_empty(num_rows, num_columns, dtype=out_dtype)
    if out.numel() == 0 or contracted == 0:
        return out.zero_()
    scaling = "block" if scaling_b == "block128" else scaling_b
    fits = num_rows * (contracted // _TILE) < 2**31  # it finds a row's scales by 32 bits
    if fits and (hopper := for_hopper(a)) is not None:
        hopper.grouped_scaled_mm(a, scale_a, b, scale_b, offs, scaling, out)
        return out
    tiles, tiles_n = group_tiles(offs, num_rows), triton.cdiv(num_columns, _TILE)
    with on_device_of(a):
        grouped_mm_kernel[((tiles.shape[0] - 1) * tiles_n,)](
            TensorDescriptor.from_tensor(a, [_TILE, _TILE]), scale_a,
            TensorDescriptor.from_tensor(b.view(-1, contracted), [_TILE, _TILE]), scale_b.contiguous(),
            tiles, out, num_rows, num_columns, num_experts, tiles_n,
            scale_b.shape[-1] if scaling == "block" else 0, scale_b[0].numel() if scale_b.dim() else 0,
            K_BLOCKS=triton.cdiv(contracted, _TILE), SCALING=scaling, BANDS=_BANDS, HARDWARE=a.is_cuda,
            num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


def grouped_scaled_mm_wgrad(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, scaling: str, out_dtype: torch.dtype
) -> Tensor:
    """See `titan_fp8.reference.grouped_scaled_mm_wgrad`; ``scaling`` is ``block1x128``."""
    num_rows, num_columns, num_experts = a.shape[0], b.shape[0], offs.shape[0]
    out = a.new_empty(num_experts, num_rows, num_columns, dtype=out_dtype)
    if out.numel() == 0 or a.shape[1] == 0:
        return out.zero_()
    if num_columns % 4 == 0 and (hopper := for_hopper(a)) is not None:
        hopper.grouped_scaled_mm_wgrad(a, scale_a, b, scale_b, offs, out)
        return out
    tiles_n, tiles_k = triton.cdiv(num_rows, _TILE), triton.cdiv(num_columns, _TILE)
    with on_device_of(a):
        grouped_wgrad_kernel[(num_experts * tiles_n * tiles_k,)](
            TensorDescriptor.from_tensor(a, [_TILE, _TILE]), scale_a,
            TensorDescriptor.from_tensor(b, [_TILE, _TILE]), scale_b,
            offs.contiguous(), out, num_rows, num_columns, tiles_n, tiles_k, HARDWARE=a.is_cuda,
            num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


def for_hopper(a: Tensor) -> ModuleType | None:
    """`grouped_mm_hopper` where it runs: on a Hopper GPU, with a Triton whose Gluon compiles it."""
    return _hopper(a.device.index) if a.is_cuda else None


@functools.cache
def _hopper(device: int) -> ModuleType | None:
    if (
        torch.version.hip
        or torch.cuda.get_device_capability(device)[0] != 9
        or not triton.__version__.startswith(_GLUON)
    ):
        return None
    return importlib.import_module("titan_fp8.kernels.triton.grouped_mm_hopper")
