"""Scales, and rounding to float8: how far a block of values is stretched, and which code each value becomes.

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

Rounding is done bit by bit. ``tensor.to(torch.float8_e4m3fn)`` is right inside the format's range, but what it does beyond it
depends on the torch version: 1000.0 becomes NaN in 2.11 and 448 in 2.15, infinity becomes NaN or 448. `round_to_float8` is the
package's own rule on every version and device, and what the kernels are compared with:

- finite values round to nearest, ties to even, subnormals too; beyond the maximum they saturate to it;
- NaN and both infinities become the one NaN with bits 0x7F, so that a diverged run is never hidden by a 448;
- the sign of zero is kept.
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


_NAN_CODE = 0x7F


def round_to_float8(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 ``y`` to ``dtype`` (e4m3 or e5m2), any shape; see the module for NaN, infinity and overflow."""
    # (mantissa bits kept, exponent bias, code of the largest finite value)
    mantissa, bias, max_code = (3, 7, 0x7E) if dtype == torch.float8_e4m3fn else (2, 15, 0x7B)
    bits = y.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80

    # Normal range: add half of the last kept place (less one bit if it is even: ties to even), cut, re-bias.
    drop = 23 - mantissa
    half = (1 << (drop - 1)) - 1 + ((magnitude >> drop) & 1)
    normal = ((magnitude + half) >> drop) - ((127 - bias) << mantissa)

    # Below 2^(1-bias) the step is constant, 2^(1-bias-mantissa): adding the float whose last place is that step makes
    # the float32 adder do the rounding, and the step count is left in the low bits.
    magic = torch.tensor(2.0 ** (1 - bias - mantissa + 23), dtype=torch.float32, device=y.device)
    subnormal = (magnitude.view(torch.float32) + magic).view(torch.int32) - magic.view(torch.int32)

    smallest_normal = (128 - bias) << 23
    code = torch.where(magnitude < smallest_normal, subnormal, normal).clamp(max=max_code) | sign
    code = torch.where(magnitude < 0x7F800000, code, torch.full_like(code, _NAN_CODE))
    return code.to(torch.uint8).view(dtype)
