"""RMSNorm, LayerNorm, SwiGLU and GELU: with the cast that follows them, and without, for layers in high precision."""

import torch
from torch import Tensor

from titan_fp8.ops.checks import (
    check_cast,
    check_float8,
    check_input,
    check_layer_norm,
    check_same_shape,
    check_vector,
)
from titan_fp8.ops.declare import float8_op
from titan_fp8.reference.results import empty_block_dual

E4M3 = torch.float8_e4m3fn


def _check_norm(x: Tensor, weight: Tensor) -> None:
    check_input(x, "x")
    check_vector(weight, x.shape[1], "weight")


def _check_norm_cast(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    _check_norm(x, weight)
    check_float8(dtype)


def _check_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> None:
    check_input(x, "x")
    check_same_shape(grad, x, ("grad", "x"))
    check_vector(weight, x.shape[1], "weight")
    check_vector(rstd, x.shape[0], "rstd")


def _check_swiglu(gate: Tensor, up: Tensor) -> None:
    check_input(gate, "gate")
    check_same_shape(gate, up, ("gate", "up"))


def _check_swiglu_cast(gate: Tensor, up: Tensor, dtype: torch.dtype) -> None:
    _check_swiglu(gate, up)
    check_float8(dtype)


def _check_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    check_same_shape(grad, gate, ("grad", "gate"))
    _check_swiglu(gate, up)


def _check_swiglu_backward_cast(grad: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype) -> None:
    _check_swiglu_backward(grad, gate, up)
    check_float8(dtype)


@float8_op(_check_norm)
def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x[M, K] · rstd · weight[K]`` in float32, rounded once to ``x``'s dtype, and ``rstd[M]`` (float32)."""
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


@float8_op(_check_norm_cast)
def rmsnorm_cast_block(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = E4M3, pow2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``rmsnorm(x[M, K]) * weight[K]``, and ``rstd[M]`` (float32): ``q, scale, qt, scale_t, rstd``."""
    return *empty_block_dual(x, dtype), x.new_empty(x.shape[0], dtype=torch.float32)


@float8_op(_check_norm_backward)
def rmsnorm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``rmsnorm(x) * weight``: ``dx[M, K]`` in ``x``'s dtype, ``dweight[K]`` float32."""
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)


@float8_op(check_layer_norm)
def layernorm_cast_block(
    x: Tensor, gain: Tensor, shift: Tensor, eps: float, dtype: torch.dtype = E4M3, pow2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``layernorm(x[M, K]) · gain[G, K] + shift[G, K]``, then ``mean[M]`` and ``rstd[M]`` (float32).

    Each of the G rows of gain and shift belongs to M / G rows of ``x``.
    """
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return *empty_block_dual(x, dtype), mean, rstd


@float8_op(_check_swiglu)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, both ``[M, F]``, in float32, rounded once."""
    return gate.new_empty(gate.shape)


@float8_op(_check_swiglu_cast)
def swiglu_cast_block(
    gate: Tensor, up: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``silu(gate) * up``, both ``[M, F]``: ``q, scale, qt, scale_t``."""
    return empty_block_dual(gate, dtype)


@float8_op(_check_swiglu_backward)
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu` with respect to ``gate`` and ``up``."""
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@float8_op(_check_swiglu_backward_cast)
def swiglu_backward_cast_block(
    grad: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of the gradient of ``gate``, then of ``up``: twice ``q, scale, qt, scale_t``."""
    return *empty_block_dual(gate, dtype), *empty_block_dual(up, dtype)


@float8_op(check_cast)
def gelu_cast_block(x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``gelu(x[M, F])`` in its tanh form: ``q, scale, qt, scale_t``."""
    return empty_block_dual(x, dtype)
