"""Rotary position embedding (arXiv:2104.09864), half-split, with the frequency scaling of Llama 3.1.

Channel ``i`` of the first half of a head and channel ``i`` of the second half form a pair; at position ``p`` the pair
is turned by the angle ``p * f_i``, with ``f_i = theta ** (-2 i / D)``. This is the layout of Hugging Face checkpoints;
Meta's own files pair neighbours instead.

Llama 3.1 stretches a model trained on ``original`` tokens to ``factor`` times as many: fast frequencies (wavelength
below ``original / high``) stay, slow ones (above ``original / low``) are divided by ``factor``, those between are
blended linearly in ``original / wavelength``.

Nothing is stored: a model computes the angles of a batch once per forward, so there is no table to lose on the way
from the meta device, to resize, or to recompile for. Angles are computed in float64, because a float32 angle near
position 131072 is only known to 0.008 rad.

Shapes: B batch, S sequence, H heads, D head width.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama-3.1 frequency scaling."""

    factor: float
    """Slow frequencies are divided by this."""
    low_freq_factor: float
    """Frequencies that turn fewer times than this over the original context are slow."""
    high_freq_factor: float
    """Frequencies that turn more often than this over the original context are kept."""
    original_seq_len: int
    """The original context, in tokens."""


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Angle per position of every channel pair.

    Args:
        head_dim: D, even.
        theta: Base of the frequencies.
        scaling: Llama-3.1 scaling, or None.
        device: Where to compute.

    Returns:
        ``[D / 2]`` float64, in radians per token.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    frequencies = theta**-exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # full turns over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rope_cos_sin(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of a batch.

    Args:
        positions: ``[B, S]`` int64.
        head_dim: D, even.
        theta: Base of the frequencies.
        scaling: Llama-3.1 scaling, or None.

    Returns:
        Two float32 tensors ``[B, S, 1, D / 2]``, ready for `apply_rope`.
    """
    angles = positions[..., None, None].double() * rope_frequencies(head_dim, theta, scaling, positions.device)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every channel pair of ``x`` by its angle.

    Args:
        x: ``[B, S, H, D]``, any float dtype.
        cos: ``[B or 1, S, 1, D / 2]`` float32.
        sin: Same.

    Returns:
        Same shape and dtype as ``x``; computed in float32 or better.
    """
    if _plainly():
        return _rotate(x, cos, sin)
    return cast(Tensor, _Rotation.apply(x, cos, sin))


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rope` of queries and of keys. Attention calls it by its attribute ``rotate``, where a kernel can take its place."""
    if _plainly():
        tables = _doubled(cos, sin)
        if q.shape[1] == 1 and q.dtype == k.dtype:  # a new token: operators cost more than copies
            turned = _turn(torch.cat((q, k), dim=2), *tables)
            return turned[:, :, : q.shape[2]], turned[:, :, q.shape[2] :]
        return _turn(q, *tables), _turn(k, *tables)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


def _plainly() -> bool:
    """Whether the formula is all that is needed: there is no backward, or the compiler makes it."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


class _Rotation(torch.autograd.Function):
    """Three passes over ``x`` where the formula takes nine; backward turns the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turn(x, *_doubled(cos, sin))


def _doubled(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.dtype == cos.dtype == sin.dtype:
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return (wide * cos).addcmul_(swapped, sin.to(wide.dtype)).to(x.dtype)
