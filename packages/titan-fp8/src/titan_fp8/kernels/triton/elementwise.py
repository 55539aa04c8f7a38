"""RMSNorm and SwiGLU without the cast: each one pass over memory, computed in float32 and rounded once.

For layers that stay in high precision beside float8 ones. RMSNorm reads a row once into registers and writes it: 4 bytes per
bfloat16 element. SwiGLU reads two and writes one (6 bytes), backward reads three and writes two (10 bytes).
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
from titan_fp8.kernels.triton.round import round_like, row_major, widen

_LONGEST_ROW = 16384
_FLAT_BLOCK = 4096


@triton.jit
def rmsnorm_kernel(
    x, weight, y, rstd, K, stride_x, eps, BLOCK: tl.constexpr, MASKED: tl.constexpr, HARDWARE: tl.constexpr
):
    """One row per program, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if MASKED:
        values = widen(tl.load(x + row * stride_x + columns, mask=columns < K, other=0.0), HARDWARE)
        gain = widen(tl.load(weight + columns, mask=columns < K, other=0.0), HARDWARE)
    else:
        values = widen(tl.load(x + row * stride_x + columns), HARDWARE)
        gain = widen(tl.load(weight + columns), HARDWARE)
    factor = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / K + eps)
    result = round_like(values * factor * gain, y.dtype.element_ty, HARDWARE).to(y.dtype.element_ty)
    if MASKED:
        tl.store(y + row * K + columns, result, mask=columns < K)
    else:
        tl.store(y + row * K + columns, result)
    tl.store(rstd + row, factor)


@triton.jit
def swiglu_kernel(gate, up, out, numel, BLOCK: tl.constexpr, MASKED: tl.constexpr, HARDWARE: tl.constexpr):
    """``silu(gate) · up``, ``BLOCK`` values per program."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        g = widen(tl.load(gate + index, mask=index < numel, other=0.0), HARDWARE)
        u = widen(tl.load(up + index, mask=index < numel, other=0.0), HARDWARE)
    else:
        g, u = widen(tl.load(gate + index), HARDWARE), widen(tl.load(up + index), HARDWARE)
    result = round_like(g * tl.sigmoid(g) * u, out.dtype.element_ty, HARDWARE).to(out.dtype.element_ty)
    if MASKED:
        tl.store(out + index, result, mask=index < numel)
    else:
        tl.store(out + index, result)


@triton.jit
def swiglu_backward_kernel(
    grad, gate, up, dgate, dup, numel, BLOCK: tl.constexpr, MASKED: tl.constexpr, HARDWARE: tl.constexpr
):
    """Both gradients of SwiGLU, ``BLOCK`` values per program."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        h = widen(tl.load(grad + index, mask=index < numel, other=0.0), HARDWARE)
        g = widen(tl.load(gate + index, mask=index < numel, other=0.0), HARDWARE)
        u = widen(tl.load(up + index, mask=index < numel, other=0.0), HARDWARE)
    else:
        h, g = widen(tl.load(grad + index), HARDWARE), widen(tl.load(gate + index), HARDWARE)
        u = widen(tl.load(up + index), HARDWARE)
    sigmoid = tl.sigmoid(g)
    of_gate = h * u * (sigmoid * (1.0 + g * (1.0 - sigmoid)))
    of_gate = round_like(of_gate, dgate.dtype.element_ty, HARDWARE).to(dgate.dtype.element_ty)
    of_up = round_like(h * (g * sigmoid), dup.dtype.element_ty, HARDWARE).to(dup.dtype.element_ty)
    if MASKED:
        tl.store(dgate + index, of_gate, mask=index < numel)
        tl.store(dup + index, of_up, mask=index < numel)
    else:
        tl.store(dgate + index, of_gate)
        tl.store(dup + index, of_up)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `titan_fp8.reference.rmsnorm`; rows over 16384 take that path."""
    rows, columns = x.shape
    if x.numel() == 0 or columns > _LONGEST_ROW:
        return reference.rmsnorm(x, weight, eps)
    x, weight = row_major(x), weight.contiguous()
    y, rstd = x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(columns)
    launch(
        rmsnorm_kernel, (rows,), x, weight, y, rstd, columns, x.stride(0), eps, BLOCK=block, MASKED=block != columns,
        HARDWARE=x.is_cuda, num_warps=4 if block <= 4096 else 8 if block <= 8192 else 16,
    )  # fmt: skip
    return y, rstd


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `titan_fp8.reference.swiglu`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        launch(
            swiglu_kernel, (triton.cdiv(out.numel(), _FLAT_BLOCK),), gate, up, out, out.numel(), BLOCK=_FLAT_BLOCK,
            MASKED=out.numel() % _FLAT_BLOCK != 0, HARDWARE=out.is_cuda, num_warps=8,
        )  # fmt: skip
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """See `titan_fp8.reference.swiglu_backward`."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if dup.numel():
        launch(
            swiglu_backward_kernel, (triton.cdiv(dup.numel(), _FLAT_BLOCK),), grad, gate, up, dgate, dup, dup.numel(),
            BLOCK=_FLAT_BLOCK, MASKED=dup.numel() % _FLAT_BLOCK != 0, HARDWARE=dup.is_cuda, num_warps=8,
        )  # fmt: skip
    return dgate, dup
