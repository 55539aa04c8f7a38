"""RMSNorm in one pass where torch takes it apart.

On a GPU torch has one kernel for it, and a compiler makes one. On the CPU it is six operators, each a pass over the
activations, and autograd keeps two of their results. Here, in float32, forward is torch's own arithmetic, bit for bit, and
backward the closed form of `titan_fp8.reference.rmsnorm_backward`: it keeps the input and a number per row.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from titan_fp8 import reference
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension, with a weight."""

    kernel: Callable[[Tensor, Tensor, float], Tensor] | None = None
    """What computes it instead, given input, weight and epsilon."""

    @property
    def gain(self) -> Tensor:
        """What the normalized input is multiplied by, ``[K]``."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` to the same shape and dtype."""
        gain = self.gain
        if self.kernel is not None and self.eps is not None:
            return self.kernel(x, gain, self.eps)
        if not torch.is_grad_enabled():  # nothing to keep, and the same bits
            return F.rms_norm(x, self.normalized_shape, gain, self.eps)
        plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype == gain.dtype == torch.float32
        if not plain or self.eps is None or torch.compiler.is_compiling():
            return F.rms_norm(x, self.normalized_shape, gain, self.eps)
        return cast(Tensor, _RMSNorm.apply(x, gain, self.eps))


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm whose gain is one more than its weight, so that weight decay pulls the gain to one."""

    def reset_parameters(self) -> None:
        """Start at a gain of one."""
        nn.init.zeros_(self.weight)

    @property
    def gain(self) -> Tensor:
        """``1 + weight``, in float32 at least: half precision would lose a small weight beside the one."""
        return 1.0 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` to the same shape and dtype."""
        if self.kernel is None and x.dtype.itemsize < 4:
            return super().forward(x.float()).to(x.dtype)
        return super().forward(x).to(x.dtype)


def _normalized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and the reciprocal of each row's root mean square."""
    rstd = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * rstd).mul_(weight), rstd


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, rstd = _normalized(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        rows = (-1, x.shape[-1])
        dx, dweight = reference.rmsnorm_backward(grads[0].reshape(rows), x.reshape(rows), weight, rstd.flatten())
        return dx.view(x.shape), dweight, None
