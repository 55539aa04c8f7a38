"""What goes into projections, as replaceable steps: one input of several, and the gated input of one.

A model calls ``self.linears(x, self.wq, self.wk, self.wv)`` instead of three linears. By itself that is the same; as
`SharedInput` has no parameters, something outside the model can replace it: tensor parallelism that gathers ``x`` once
while it multiplies, float8 that casts ``x`` once. Likewise ``self.gated(gate, up, self.w2)`` instead of
``self.w2(silu(gate) * up)`` and ``self.gelu(h, self.w2)`` instead of ``self.w2(gelu(h))``: float8 computes the activation and its
cast in one pass. `ModulatedNorm` is the norm before such linears in diffusion transformers, for the same reason.
"""

from collections.abc import Callable
from typing import cast

import titan_fp8
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SharedInput(nn.Module):
    """Apply linears to the same input."""

    def forward(self, x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
        """The output of each of ``linears`` for ``x``, in order."""
        return tuple(linear(x) for linear in linears)


class GatedInput(nn.Module):
    """Apply a linear to SwiGLU's product."""

    swiglu_kernel: Callable[[Tensor, Tensor], Tensor] | None = None
    """What computes the product instead of `swiglu`."""

    def forward(self, gate: Tensor, up: Tensor, linear: nn.Module) -> Tensor:
        """``linear(silu(gate) * up)``."""
        return cast(Tensor, linear((self.swiglu_kernel or swiglu)(gate, up)))


class GeluInput(nn.Module):
    """Apply a linear to GELU's result."""

    def forward(self, x: Tensor, linear: nn.Module) -> Tensor:
        """``linear(gelu(x))``, the tanh form."""
        return cast(Tensor, linear(F.gelu(x, approximate="tanh")))


class ModulatedNorm(nn.Module):
    """LayerNorm whose gain and shift come from each sample's condition (arXiv:2212.09748)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """``(1 + scale) · norm(x) + shift``: ``x`` is ``[B, S, d]``, the others ``[B, 1, d]``."""
        return (1 + scale) * F.layer_norm(x, (x.shape[-1],), eps=self.eps) + shift


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (arXiv:2002.05202), rounded once in half precision.

    In eager mode one pass forward and one backward by titan-fp8's kernels, which keep nothing but the operands; torch's own
    where a compiler fuses, in float64, and for tensors that are more than tensors.

    Args:
        gate: ``[..., F]``.
        up: Same shape and dtype.
    """
    wide = gate.dtype == torch.float64 or gate.dtype != up.dtype or gate.is_meta
    if wide or torch.compiler.is_compiling() or type(gate) is not Tensor or type(up) is not Tensor:
        return F.silu(gate) * up
    if gate.dtype == torch.float32 and not torch.is_grad_enabled() and not gate.is_cuda:
        return F.silu(gate).mul_(up)  # the same bits, without a node of autograd
    return titan_fp8.swiglu(gate, up)
