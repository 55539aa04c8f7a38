"""Row scaling in one layout: a program keeps its row in registers between the maximum and the cast, one read.

3.03 bytes per element. Rows too long for the registers (over 16384) are read twice, the second time from the cache.
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
from titan_fp8.reference import round_up

_LONGEST_ROW = 16384


@triton.jit
def cast_row_kernel(
    x, q, scale, M, K, stride_x, stride_q, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One row per program, in ``BLOCKS`` blocks."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    length = tl.where(row < M, K, 0)  # rows of padding read nothing
    if BLOCKS == 1:
        values = load_finite(x + row * stride_x + lanes, lanes < length, MASKED, HARDWARE)
        encode, decode = scales_of(tl.max(tl.abs(values), axis=0), E4M3, POW2)
        codes = to_float8(values * encode, E4M3, HARDWARE)
        if MASKED:
            tl.store(q + row * stride_q + lanes, codes, mask=lanes < stride_q)
        else:
            tl.store(q + row * stride_q + lanes, codes)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for block in range(BLOCKS):
            columns = block * BLOCK + lanes
            values = tl.abs(load_finite(x + row * stride_x + columns, columns < length, True, HARDWARE))
            largest = tl.where(values > largest, values, largest)
        encode, decode = scales_of(tl.max(largest, axis=0), E4M3, POW2)
        for block in range(BLOCKS):
            columns = block * BLOCK + lanes
            values = load_finite(x + row * stride_x + columns, columns < length, True, HARDWARE)
            codes = to_float8(values * encode, E4M3, HARDWARE)
            tl.store(q + row * stride_q + columns, codes, mask=columns < stride_q)
    tl.store(scale + row, decode)


def cast_row(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """See `titan_fp8.reference.cast_row`."""
    x = row_major(x)
    rows, columns = round_up(x.shape[0], 16), round_up(x.shape[1], 16)
    q = x.new_empty(rows, columns, dtype=dtype)
    scale = x.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        block = min(triton.next_power_of_2(max(columns, 16)), _LONGEST_ROW)
        launch(
            cast_row_kernel, (rows,),
            x, q.view(torch.uint8), scale, *x.shape, x.stride(0), columns,
            BLOCK=block, BLOCKS=triton.cdiv(columns, block), MASKED=x.shape[0] != rows or x.shape[1] != block,
            E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=x.is_cuda,
            num_warps=4 if block <= 4096 else 8 if block <= 8192 else 16,
        )  # fmt: skip
    return q, scale
