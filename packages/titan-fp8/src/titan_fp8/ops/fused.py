"""Custom ops: RMSNorm and SwiGLU with the cast that follows."""

import torch
from torch import Tensor

from titan_fp8.dispatch import implementation
from titan_fp8.ops.casts import empty_block_dual
from titan_fp8.ops.checks import check_float8, check_input, check_same_shape, check_vector
from titan_fp8.ops.direct import custom_op

E4M3 = torch.float8_e4m3fn


@custom_op("titan_fp8::rmsnorm_cast_block")
def rmsnorm_cast_block(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``rmsnorm(x[M, K]) * weight[K]``, and ``rstd[M]`` (float32): ``q, scale, qt, scale_t, rstd``."""
    _check_norm(x, weight, dtype)
    return implementation("rmsnorm_cast_block", x.device, backend)(x, weight, eps, dtype, pow2)


@rmsnorm_cast_block.register_fake
def _(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_norm(x, weight, dtype)
    return *empty_block_dual(x, dtype), x.new_empty(x.shape[0], dtype=torch.float32)


@custom_op("titan_fp8::rmsnorm_backward")
def rmsnorm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Gradients of ``rmsnorm(x) * weight``: ``dx[M, K]`` in ``x``'s dtype, ``dweight[K]`` float32."""
    _check_norm_backward(grad, x, weight, rstd)
    return implementation("rmsnorm_backward", x.device, backend)(grad, x, weight, rstd)


@rmsnorm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    _check_norm_backward(grad, x, weight, rstd)
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)


@custom_op("titan_fp8::swiglu_cast_block")
def swiglu_cast_block(
    gate: Tensor, up: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``silu(gate) * up``, both ``[M, F]``: ``q, scale, qt, scale_t``."""
    _check_swiglu(gate, up, dtype)
    return implementation("swiglu_cast_block", gate.device, backend)(gate, up, dtype, pow2)


@swiglu_cast_block.register_fake
def _(
    gate: Tensor, up: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_swiglu(gate, up, dtype)
    return empty_block_dual(gate, dtype)


@custom_op("titan_fp8::swiglu_backward_cast_block")
def swiglu_backward_cast_block(
    grad: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of the gradient of ``gate``, then of ``up``: twice ``q, scale, qt, scale_t``."""
    check_same_shape(grad, gate, ("grad", "gate"))
    _check_swiglu(gate, up, dtype)
    return implementation("swiglu_backward_cast_block", gate.device, backend)(grad, gate, up, dtype, pow2)


@swiglu_backward_cast_block.register_fake
def _(
    grad: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_same_shape(grad, gate, ("grad", "gate"))
    _check_swiglu(gate, up, dtype)
    return *empty_block_dual(gate, dtype), *empty_block_dual(up, dtype)


def _check_norm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    check_input(x, "x")
    check_vector(weight, x.shape[1], "weight")
    check_float8(dtype)


def _check_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> None:
    check_input(x, "x")
    check_same_shape(grad, x, ("grad", "x"))
    check_vector(weight, x.shape[1], "weight")
    check_vector(rstd, x.shape[0], "rstd")


def _check_swiglu(gate: Tensor, up: Tensor, dtype: torch.dtype) -> None:
    check_input(gate, "gate")
    check_same_shape(gate, up, ("gate", "up"))
    check_float8(dtype)
