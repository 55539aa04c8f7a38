"""RMSNorm, LayerNorm, SwiGLU and GELU with the cast that follows them, in plain torch.

Computed in float32 and rounded *once* to ``x``'s dtype, then cast: the cast sees exactly what a layer in that dtype
would have written to memory, without the write and the read.

LayerNorm's gain and shift have one row, or one for each of as many equal groups of rows: the samples of a batch, in models
that modulate their norms.
"""

import torch
from torch import Tensor

from titan_fp8.reference.cast import cast_block_dual
from titan_fp8.reference.results import Dual

DualPair = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x · rstd · weight`` in float32, rounded once to ``x``'s dtype, and ``rstd[M]``."""
    wide = x.float()
    # The norm of a row in one pass; the square of it is the sum of squares.
    rstd = torch.linalg.vector_norm(wide, dim=-1).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * rstd[:, None]).mul_(weight.float()).to(x.dtype), rstd


def rmsnorm_cast_block(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``rmsnorm(x) * weight``, and ``rstd[M]`` for the backward pass."""
    y, rstd = rmsnorm(x, weight, eps)
    return *cast_block_dual(y, dtype, pow2), rstd


def rmsnorm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``y = x · rstd · weight``: ``dx`` (``x.dtype``) and ``dweight[K]`` (float32).

    With ``n = x · rstd`` and ``h = grad · weight``: ``dx = rstd · (h − n · mean(h · n))``, ``dweight = Σ grad · n``.
    """
    wide, of_y, gain = x.float(), grad.float(), weight.float()
    normed = wide * rstd[:, None]
    product = of_y * normed
    mean = torch.mv(product, gain).div_(x.shape[-1])  # of h * n, without making h first
    dx = (of_y * gain).sub_(normed.mul_(mean[:, None])).mul_(rstd[:, None])
    return dx.to(x.dtype), product.sum(0)


def swiglu_cast_block(gate: Tensor, up: Tensor, dtype: torch.dtype, pow2: bool) -> Dual:
    """`cast_block_dual` of ``silu(gate) * up``."""
    return cast_block_dual(swiglu(gate, up), dtype, pow2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once to ``gate.dtype``."""
    return torch.nn.functional.silu(gate.float()).mul_(up).to(gate.dtype)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu` with respect to ``gate`` and ``up``, each in its dtype."""
    h, g = grad.float(), gate.float()
    dup = torch.nn.functional.silu(g).mul_(h)
    dgate = h * up  # float32 times the dtype of up is float32
    torch.ops.aten.silu_backward.grad_input(dgate, g, grad_input=dgate)
    return dgate.to(gate.dtype), dup.to(up.dtype)


def swiglu_backward_cast_block(grad: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype, pow2: bool) -> DualPair:
    """`cast_block_dual` of the gradient of ``gate``, then of ``up``."""
    dgate, dup = swiglu_backward(grad, gate, up)
    return *cast_block_dual(dgate, dtype, pow2), *cast_block_dual(dup, dtype, pow2)


def layernorm(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) · rstd · gain + shift`` in float32, rounded once to ``x``'s dtype; ``mean[M]`` and ``rstd[M]``."""
    width = x.shape[-1]
    normed, mean, rstd = torch.ops.aten.native_layer_norm(x.float(), [width], None, None, eps)
    y = normed.view(gain.shape[0], -1, width) * gain.float()[:, None] + shift.float()[:, None]
    return y.view(x.shape).to(x.dtype), mean.flatten(), rstd.flatten()


def layernorm_cast_block(
    x: Tensor, gain: Tensor, shift: Tensor, eps: float, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of `layernorm`, and ``mean[M]`` and ``rstd[M]`` for the backward pass."""
    y, mean, rstd = layernorm(x, gain, shift, eps)
    return *cast_block_dual(y, dtype, pow2), mean, rstd


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form (arXiv:1606.08415), in float32, rounded once to ``x``'s dtype."""
    return torch.nn.functional.gelu(x.float(), approximate="tanh").to(x.dtype)


def gelu_cast_block(x: Tensor, dtype: torch.dtype, pow2: bool) -> Dual:
    """`cast_block_dual` of `gelu`."""
    return cast_block_dual(gelu(x), dtype, pow2)
