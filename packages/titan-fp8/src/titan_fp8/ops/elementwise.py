"""Custom ops: RMSNorm and SwiGLU without a cast, for layers that stay in high precision."""

import torch
from torch import Tensor

from titan_fp8.dispatch import implementation
from titan_fp8.ops.checks import check_input, check_same_shape, check_vector
from titan_fp8.ops.direct import custom_op


@custom_op("titan_fp8::rmsnorm")
def rmsnorm(x: Tensor, weight: Tensor, eps: float, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """``x[M, K] · rstd · weight[K]`` in float32, rounded once to ``x``'s dtype, and ``rstd[M]`` (float32)."""
    _check_norm(x, weight)
    return implementation("rmsnorm", x.device, backend)(x, weight, eps)


@rmsnorm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, backend: str = "auto") -> tuple[Tensor, Tensor]:
    _check_norm(x, weight)
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


@custom_op("titan_fp8::swiglu")
def swiglu(gate: Tensor, up: Tensor, backend: str = "auto") -> Tensor:
    """``silu(gate) * up``, both ``[M, F]``, in float32, rounded once."""
    _check_swiglu(gate, up)
    return implementation("swiglu", gate.device, backend)(gate, up)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor, backend: str = "auto") -> Tensor:
    _check_swiglu(gate, up)
    return gate.new_empty(gate.shape)


@custom_op("titan_fp8::swiglu_backward")
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu` with respect to ``gate`` and ``up``."""
    check_same_shape(grad, gate, ("grad", "gate"))
    _check_swiglu(gate, up)
    return implementation("swiglu_backward", gate.device, backend)(grad, gate, up)


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    check_same_shape(grad, gate, ("grad", "gate"))
    _check_swiglu(gate, up)
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _check_norm(x: Tensor, weight: Tensor) -> None:
    check_input(x, "x")
    check_vector(weight, x.shape[1], "weight")


def _check_swiglu(gate: Tensor, up: Tensor) -> None:
    check_input(gate, "gate")
    check_same_shape(gate, up, ("gate", "up"))
