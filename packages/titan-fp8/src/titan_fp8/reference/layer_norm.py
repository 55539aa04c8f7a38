"""LayerNorm and GELU with the cast that follows them, in plain torch.

Computed in float32 and rounded *once* to ``x``'s dtype, then cast, as in `titan_fp8.reference.fused`. Gain and shift have one
row, or one for each of as many equal groups of rows: the samples of a batch, in models that modulate their norms.
"""

import torch
from torch import Tensor

from titan_fp8.reference.cast import Dual, cast_block_dual


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
