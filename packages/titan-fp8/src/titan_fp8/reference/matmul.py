"""Products of float8 operands in plain torch: dequantise, multiply in float32, round once.

Both operands are contracted along their last dimension (``a[M, K] · b[N, K]ᵀ``), the only layout Hopper's float8 tensor
cores take. This is what the CPU runs and what a device's result is compared with; the device's own accumulation is
narrower (about 14 bits, promoted to float32 every 128 terms unless fast accumulation is asked for).
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A block without autocast; on devices that have none (meta), nothing."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def dequantize(q: Tensor, scale: Tensor, scaling: str) -> Tensor:
    """The float32 values of a float8 operand.

    Args:
        q: Float8 data ``[..., R, C]``.
        scale: Decode scales, as the cast of that ``scaling`` returns them, with ``q``'s leading dimensions.
        scaling: ``tensor``, ``row``, ``block1x128``, ``block128`` or ``mx32``.

    Returns:
        Float32, shaped as ``q``.
    """
    values, scale = q.float(), scale.float()
    if scaling == "tensor":
        return values * scale.reshape(*scale.shape, 1, 1)
    if scaling == "row":
        return values * scale
    rows, columns = q.shape[-2:]
    if scaling == "block128":
        scale = scale.repeat_interleave(128, dim=-2)[..., :rows, :]
    return values * scale.repeat_interleave(32 if scaling == "mx32" else 128, dim=-1)[..., :columns]


def scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """``a[M, K] · b[N, K]ᵀ`` (+ ``bias[N]``) in float32, rounded once to ``out_dtype``. ``fast_accum`` changes nothing."""
    del fast_accum
    with no_autocast(a.device):
        product = dequantize(a, scale_a, scaling_a) @ dequantize(b, scale_b, scaling_b).t()
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype)
