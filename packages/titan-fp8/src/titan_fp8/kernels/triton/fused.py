"""RMSNorm and SwiGLU fused with the block cast: the bfloat16 result is never written to memory.

The prologue computes a 128×128 tile in float32, rounds it once to the input's dtype (what an unfused layer would have
stored), and hands it to the same tile cast as `cast_block_dual`. RMSNorm needs each row's norm first, one more read of
``x``: 6.06 bytes per element against 8.06 for norm and cast; SwiGLU: 6.06 against 8.06 (forward) and 10.1 against 14.1
(backward).
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.round import load_tile, round_like, row_major, store_block_tile, widen
from titan_fp8.reference.results import empty_block_dual

_LONGEST_ROW = 16384
_BACKWARD_PROGRAMS = 264  # two for each of Hopper's 132 multiprocessors; also the rows of partial sums


@triton.jit
def rms_rstd_kernel(x, rstd, K, stride_x, eps, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HARDWARE: tl.constexpr):
    """``1 / sqrt(mean(x²) + eps)`` of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        values = widen(tl.load(x + row * stride_x + columns, mask=columns < K, other=0.0), HARDWARE)
        total += values * values
    tl.store(rstd + row, 1.0 / tl.sqrt_rn(tl.sum(total, axis=0) / K + eps))


@triton.jit
def rmsnorm_cast_kernel(
    x, weight, rstd, q, scale, qt, scale_t, M, K, stride_x, stride_q, stride_qt,
    MASKED: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """``cast_block_dual(x · rstd · weight)``, one tile per program."""
    tiles_k = stride_q // 128
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    lanes = tl.arange(0, 128)
    rows, columns = tile_m * 128 + lanes, tile_k * 128 + lanes
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    tile = load_tile(x, M, K, stride_x, tile_m, tile_k, MASKED, HARDWARE)
    factor = tl.load(rstd + rows, mask=rows < M, other=0.0)
    gain = widen(tl.load(weight + columns, mask=columns < K, other=0.0), HARDWARE)
    tile = round_like(tile * factor[:, None] * gain[None, :], x.dtype.element_ty, HARDWARE)
    if MASKED:
        tile = tl.where(mask, tile, 0.0)  # zero times a negative gain is minus zero
    tile = tl.fma(tile, 0.0, tile)  # the product may have overflowed
    store_block_tile(tile, q, scale, qt, scale_t, tile_m, tile_k, stride_q, stride_qt, True, E4M3, POW2, HARDWARE)


@triton.jit
def rmsnorm_backward_kernel(
    grad, x, weight, rstd, dx, partial_dweight, M, K, stride_grad, stride_x, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows per program, one at a time in registers; their sum of ``grad · x · rstd`` to ``partial_dweight``."""
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    gain = widen(tl.load(weight + columns, mask=inside, other=0.0), HARDWARE)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + index
        length = tl.where(row < M, K, 0)
        values = widen(tl.load(x + row * stride_x + columns, mask=columns < length, other=0.0), HARDWARE)
        gradient = widen(tl.load(grad + row * stride_grad + columns, mask=columns < length, other=0.0), HARDWARE)
        factor = tl.load(rstd + tl.minimum(row, M - 1))
        normed = values * factor
        total += gradient * normed
        scaled = gradient * gain
        result = factor * (scaled - normed * (tl.sum(scaled * normed, axis=0) / K))
        result = round_like(result, dx.dtype.element_ty, HARDWARE).to(dx.dtype.element_ty)
        tl.store(dx + row * K + columns, result, mask=columns < length)
    tl.store(partial_dweight + tl.program_id(0).to(tl.int64) * K + columns, total, mask=inside)


@triton.jit
def swiglu_cast_kernel(
    gate, up, q, scale, qt, scale_t, M, K, stride_gate, stride_up, stride_q, stride_qt,
    MASKED: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """``cast_block_dual(silu(gate) · up)``, one tile per program."""
    tiles_k = stride_q // 128
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    g = load_tile(gate, M, K, stride_gate, tile_m, tile_k, MASKED, HARDWARE)
    u = load_tile(up, M, K, stride_up, tile_m, tile_k, MASKED, HARDWARE)
    tile = round_like(g * tl.sigmoid(g) * u, gate.dtype.element_ty, HARDWARE)
    tile = tl.fma(tile, 0.0, tile)  # the product may have overflowed
    store_block_tile(tile, q, scale, qt, scale_t, tile_m, tile_k, stride_q, stride_qt, True, E4M3, POW2, HARDWARE)


@triton.jit
def swiglu_backward_cast_kernel(
    grad, gate, up, q, scale, qt, scale_t, q_up, scale_up, qt_up, scale_t_up, M, K,
    stride_grad, stride_gate, stride_up, stride_q, stride_qt,
    MASKED: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """``cast_block_dual`` of both gradients of SwiGLU, one tile of each per program."""
    tiles_k = stride_q // 128
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    h = load_tile(grad, M, K, stride_grad, tile_m, tile_k, MASKED, HARDWARE)
    g = load_tile(gate, M, K, stride_gate, tile_m, tile_k, MASKED, HARDWARE)
    dup = round_like(h * (g * tl.sigmoid(g)), up.dtype.element_ty, HARDWARE)
    dup = tl.fma(dup, 0.0, dup)  # the product may have overflowed
    store_block_tile(
        dup, q_up, scale_up, qt_up, scale_t_up, tile_m, tile_k, stride_q, stride_qt, True, E4M3, POW2, HARDWARE
    )
    # Read again, from the cache: three tiles held through the first cast would spill.
    h = load_tile(grad, M, K, stride_grad, tile_m, tile_k, MASKED, HARDWARE)
    g = load_tile(gate, M, K, stride_gate, tile_m, tile_k, MASKED, HARDWARE)
    u = load_tile(up, M, K, stride_up, tile_m, tile_k, MASKED, HARDWARE)
    sigmoid = tl.sigmoid(g)
    dgate = round_like(h * u * (sigmoid * (1.0 + g * (1.0 - sigmoid))), gate.dtype.element_ty, HARDWARE)
    dgate = tl.fma(dgate, 0.0, dgate)
    store_block_tile(dgate, q, scale, qt, scale_t, tile_m, tile_k, stride_q, stride_qt, True, E4M3, POW2, HARDWARE)


def rmsnorm_cast_block(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.rmsnorm_cast_block`."""
    q, scale, qt, scale_t = results = empty_block_dual(x, dtype)
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    if q.numel() == 0:
        return *results, rstd
    x, weight = row_major(x), weight.contiguous()
    block = min(triton.next_power_of_2(x.shape[1]), 4096)
    launch(
        rms_rstd_kernel, (x.shape[0],),
        x, rstd, x.shape[1], x.stride(0), eps, BLOCK=block, BLOCKS=triton.cdiv(x.shape[1], block),
        HARDWARE=x.is_cuda, num_warps=4,
    )  # fmt: skip
    launch(
        rmsnorm_cast_kernel, (q.numel() // 128**2,),
        x, weight, rstd, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t,
        *x.shape, x.stride(0), q.shape[1], q.shape[0],
        MASKED=x.shape != q.shape, E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=x.is_cuda,
        num_warps=4,
    )  # fmt: skip
    return *results, rstd


def rmsnorm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """See `titan_fp8.reference.rmsnorm_backward`; rows over 16384 take that path."""
    num_rows, num_columns = x.shape
    if x.numel() == 0 or num_columns > _LONGEST_ROW:
        return reference.rmsnorm_backward(grad, x, weight, rstd)
    grad, x, weight, rstd = row_major(grad), row_major(x), weight.contiguous(), rstd.contiguous()
    rows_each = triton.cdiv(num_rows, _BACKWARD_PROGRAMS)
    programs = triton.cdiv(num_rows, rows_each)
    dx = x.new_empty(x.shape)
    partial = x.new_empty(programs, num_columns, dtype=torch.float32)
    block = triton.next_power_of_2(num_columns)
    launch(
        rmsnorm_backward_kernel, (programs,),
        grad, x, weight, rstd, dx, partial, num_rows, num_columns, grad.stride(0), x.stride(0),
        ROWS=rows_each, BLOCK=block, HARDWARE=x.is_cuda, num_warps=8 if block <= 4096 else 16,
    )  # fmt: skip
    return dx, partial.sum(0)


def swiglu_cast_block(
    gate: Tensor, up: Tensor, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.swiglu_cast_block`."""
    q, scale, qt, scale_t = results = empty_block_dual(gate, dtype)
    if q.numel() == 0:
        return results
    gate, up = row_major(gate), row_major(up)
    launch(
        swiglu_cast_kernel, (q.numel() // 128**2,),
        gate, up, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t,
        *gate.shape, gate.stride(0), up.stride(0), q.shape[1], q.shape[0],
        MASKED=gate.shape != q.shape, E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=gate.is_cuda,
        num_warps=8 if pow2 else 4,
    )  # fmt: skip
    return results


def swiglu_backward_cast_block(
    grad: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.swiglu_backward_cast_block`."""
    q, scale, qt, scale_t = of_gate = empty_block_dual(gate, dtype)
    q_up, scale_up, qt_up, scale_t_up = of_up = empty_block_dual(up, dtype)
    if q.numel() == 0:
        return *of_gate, *of_up
    grad, gate, up = row_major(grad), row_major(gate), row_major(up)
    launch(
        swiglu_backward_cast_kernel, (q.numel() // 128**2,),
        grad, gate, up, q.view(torch.uint8), scale, qt.view(torch.uint8), scale_t,
        q_up.view(torch.uint8), scale_up, qt_up.view(torch.uint8), scale_t_up,
        *gate.shape, grad.stride(0), gate.stride(0), up.stride(0), q.shape[1], q.shape[0],
        MASKED=gate.shape != q.shape, E4M3=dtype == torch.float8_e4m3fn, POW2=pow2, HARDWARE=gate.is_cuda,
        num_warps=8,
    )  # fmt: skip
    return *of_gate, *of_up
