"""RMSNorm and SwiGLU with the cast that follows them, in plain torch.

Computed in float32 and rounded *once* to ``x``'s dtype, then cast: the cast sees exactly what a layer in that dtype
would have written to memory, without the write and the read.
"""

import torch
from torch import Tensor

from titan_fp8.reference.cast import Dual, cast_block_dual

DualPair = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def rms_rstd(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x²) + eps)`` of each row, float32 ``[M]``."""
    return torch.rsqrt(x.float().square().mean(-1) + eps)


def rmsnorm_cast_block(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``rmsnorm(x) * weight``, and ``rstd[M]`` for the backward pass."""
    rstd = rms_rstd(x, eps)
    y = (x.float() * rstd[:, None] * weight.float()).to(x.dtype)
    return *cast_block_dual(y, dtype, pow2), rstd


def rmsnorm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``y = x · rstd · weight``: ``dx`` (``x.dtype``) and ``dweight[K]`` (float32).

    With ``n = x · rstd`` and ``h = grad · weight``: ``dx = rstd · (h − n · mean(h · n))``, ``dweight = Σ grad · n``.
    """
    normed = x.float() * rstd[:, None]
    scaled = grad.float() * weight.float()
    dx = rstd[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad.float() * normed).sum(0)


def swiglu_cast_block(gate: Tensor, up: Tensor, dtype: torch.dtype, pow2: bool) -> Dual:
    """`cast_block_dual` of ``silu(gate) * up``."""
    return cast_block_dual(swiglu(gate, up), dtype, pow2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once to ``gate.dtype``."""
    g = gate.float()
    return (g * torch.sigmoid(g) * up.float()).to(gate.dtype)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu` with respect to ``gate`` and ``up``, each in its dtype."""
    h, g, u = grad.float(), gate.float(), up.float()
    sigmoid = torch.sigmoid(g)
    dgate = h * u * (sigmoid * (1 + g * (1 - sigmoid)))
    return dgate.to(gate.dtype), (h * (g * sigmoid)).to(up.dtype)


def swiglu_backward_cast_block(grad: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype, pow2: bool) -> DualPair:
    """`cast_block_dual` of the gradient of ``gate``, then of ``up``."""
    dgate, dup = swiglu_backward(grad, gate, up)
    return *cast_block_dual(dgate, dtype, pow2), *cast_block_dual(dup, dtype, pow2)
