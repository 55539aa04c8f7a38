"""Scales: how far a block of values is stretched before it is rounded to float8.

A float8 number has a short range, so a block (a tensor, a row, 128 values, …) is multiplied by an *encode* scale that
brings its largest magnitude, ``amax``, just under the format's maximum; the *decode* scale, its inverse, is stored:
``x ≈ q * decode``.

Two rules:

- Power of two (the default): the largest power of two with ``amax * encode <= max``. Both maxima are 1.75 times a power
  of two (448 = 1.75·2^8, 57344 = 1.75·2^15), so with ``amax = m·2^e``, ``1 <= m < 2``, the exponent is
  ``k = emax − e − [m > 1.75]``: a few integer operations on amax's bits, exact on every device, and multiplying by it
  never rounds.
- Exact: ``encode = max / amax`` and ``decode = 1 / encode``, each an IEEE division. (``448.0 / amax`` with a Python
  scalar is a reciprocal and a product in eager PyTorch, and differs from the division for a quarter of all values.)

``encode`` is at most 2^126, so that ``decode`` is a normal number. An all-zero block has scale 1. NaN and infinities
take no part in ``amax``: they become NaN themselves and leave their neighbours alone.
"""

import torch
from torch import Tensor

FLOAT8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FLOAT8_EMAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}

MAX_ENCODE_EXPONENT = 126
"""2^-126, the inverse of the largest encode scale, is the smallest normal float32."""


def finite_amax(x: Tensor, dim: tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """The largest finite magnitude of ``x`` over ``dim`` (all by default), float32; 0 where there is none."""
    magnitude = x.float().abs()
    magnitude = torch.where(magnitude.isfinite(), magnitude, torch.zeros_like(magnitude))
    if magnitude.numel() == 0:
        return magnitude.sum(dim=dim, keepdim=keepdim)  # zeros of the reduced shape; amax rejects empty dimensions
    return magnitude.amax(dim=() if dim is None else dim, keepdim=keepdim)


def encode_exponent(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The exponent ``k`` of the power-of-two encode scale, int32: the largest with ``amax * 2**k <= max``, up to 126."""
    bits = amax.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    k = FLOAT8_EMAX[dtype] + 127 - exponent - (mantissa > 0x600000).int()
    k = k.clamp(max=MAX_ENCODE_EXPONENT)
    return torch.where((bits > 0) & (bits < 0x7F800000), k, torch.zeros_like(k))


def encode_decode_scales(amax: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """The encode scale (multiply, then round) and the decode scale (stored) of blocks with these amaxes.

    Args:
        amax: Largest magnitudes, float32, any shape. Zero, NaN and infinity give scale 1.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2: Power-of-two scales; otherwise ``max / amax``.

    Returns:
        ``(encode, decode)``, float32, shaped as ``amax``.
    """
    if pow2:
        k = encode_exponent(amax, dtype)
        return ((k + 127) << 23).view(torch.float32), ((127 - k) << 23).view(torch.float32)
    one = torch.ones_like(amax)
    usable = (amax > 0) & amax.isfinite()
    encode = torch.full_like(amax, FLOAT8_MAX[dtype]) / torch.where(usable, amax, one)
    encode = encode.clamp(max=2.0**MAX_ENCODE_EXPONENT)
    encode = torch.where(usable, encode, one)
    return encode, one / encode
