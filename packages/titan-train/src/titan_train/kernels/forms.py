"""The operations in plain torch, and the other packages' versions of them with the same arguments.

Shapes: B batch, S sequence, H heads, D head width, K channels, V vocabulary.
"""

from typing import cast

import titan_fp8
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_train.models.common.loss import cross_entropy_sum
from titan_train.models.common.rope import rotate_pair
from titan_train.models.flux.rope import rotate_neighbours


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``[..., K]``: one kernel on a GPU, six on the CPU."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu_torch(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, rounded twice in half precision."""
    return F.silu(gate) * up


def rope_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate ``q`` and ``k``, ``[B, S, H, D]``, by ``cos`` and ``sin``, ``[B or 1, S, 1, D / 2]``."""
    return rotate_pair(q, k, cos, sin)


def rope_neighbours_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The same where channels ``2 i`` and ``2 i + 1`` are a pair; ``cos`` and ``sin`` are ``[B or 1, S, D / 2]``."""
    return rotate_neighbours(q, k, cos, sin)


def cross_entropy_torch(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy of ``[B, S, V]`` over valid labels ``[B, S]``, float32."""
    return cross_entropy_sum(logits, labels)


def rms_norm_titan(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """titan-fp8's: rounded once."""
    return titan_fp8.rms_norm(x, weight, eps)


def swiglu_titan(gate: Tensor, up: Tensor) -> Tensor:
    """titan-fp8's: rounded once."""
    return titan_fp8.swiglu(gate, up)


def rope_titan(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """titan-fp8's; the plain form in float64 and for subclasses of tensors."""
    if type(q) is not Tensor or type(k) is not Tensor or q.dtype == torch.float64:
        return rotate_pair(q, k, cos, sin)
    return titan_fp8.rotate(q, cos, sin), titan_fp8.rotate(k, cos, sin)


def rope_neighbours_titan(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The same where neighbours are a pair."""
    if type(q) is not Tensor or type(k) is not Tensor or q.dtype == torch.float64:
        return rotate_neighbours(q, k, cos, sin)
    return titan_fp8.rotate(q, cos, sin, neighbours=True), titan_fp8.rotate(k, cos, sin, neighbours=True)


def rms_norm_liger(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """liger-kernel's in the mode that rounds once; the incoming gradient is left as it is."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return cast(Tensor, LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False))


def swiglu_liger(gate: Tensor, up: Tensor) -> Tensor:
    """liger-kernel's. Its backward writes over ``gate`` and ``up``, so it can run once."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return cast(Tensor, LigerSiLUMulFunction.apply(gate, up))


def rope_liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """liger-kernel's, which writes over what it is given and what backward hands it: both are copied."""
    from liger_kernel.ops.rope import LigerRopeFunction

    wide = (torch.cat((table, table), -1).squeeze(-2) for table in (cos, sin))
    heads_first = (_copied(x).transpose(1, 2) for x in (q, k))
    turned = LigerRopeFunction.apply(*heads_first, *wide)
    return tuple(x.transpose(1, 2) for x in turned)  # pyright: ignore[reportReturnType]


def cross_entropy_liger(logits: Tensor, labels: Tensor) -> Tensor:
    """liger-kernel's, in float32. It asks the device for the number of labels: the host waits."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    wide = _copied(logits.flatten(0, 1).float())
    loss = LigerCrossEntropyFunction.apply(wide, labels.flatten(), None, -100, 0.0, 0.0, "sum", None, False)
    return cast(Tensor, loss[0] if isinstance(loss, tuple) else loss)


class _Copied(torch.autograd.Function):
    """A copy whose gradient is copied as well: for functions that write over both."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


def _copied(x: Tensor) -> Tensor:
    return cast(Tensor, _Copied.apply(x))
