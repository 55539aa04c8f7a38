"""The transpose of float8 codes: a permutation of bytes, 1 byte read and 1 written per element.

FSDP2 gathers a weight's codes by rows; the input gradient contracts over rows, and Hopper's float8 tensor cores read the
contracted dimension contiguously. A program moves a 128×128 tile through shared memory, so that both sides are read and
written 16 bytes at a time, where a strided copy would move single bytes. Padding is written in the same pass.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.round import row_major
from titan_fp8.reference import round_up


@triton.jit
def transpose_kernel(codes, out, N, K, stride, stride_out, K_OUT, tiles_k, MASKED: tl.constexpr):
    """One 128×128 tile per program; ``out`` is ``[K_OUT, stride_out]``."""
    tile_n, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    lanes = tl.arange(0, 128)
    rows, columns = tile_n * 128 + lanes, tile_k * 128 + lanes
    pointers = codes + rows[:, None] * stride + columns[None, :]
    out_pointers = out + columns[:, None] * stride_out + rows[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=(rows < N)[:, None] & (columns < K)[None, :], other=0)
        tl.store(out_pointers, tl.trans(tile), mask=(columns < K_OUT)[:, None] & (rows < stride_out)[None, :])
    else:
        tl.store(out_pointers, tl.trans(tl.load(pointers)))


def transpose_codes(codes: Tensor, multiple: int) -> Tensor:
    """See `titan_fp8.reference.transpose_codes`."""
    rows, columns = codes.shape
    out = codes.new_empty(round_up(columns, multiple), round_up(rows, multiple))
    if out.numel():
        codes = row_major(codes)
        tiles_k = triton.cdiv(out.shape[0], 128)
        launch(
            transpose_kernel, (triton.cdiv(out.shape[1], 128) * tiles_k,),
            codes, out, rows, columns, codes.stride(0), out.shape[1], out.shape[0], tiles_k,
            MASKED=bool(rows % 128 or columns % 128), num_warps=4,
        )  # fmt: skip
    return out
