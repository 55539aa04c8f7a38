"""Rounding float32 to float8, bit by bit.

``tensor.to(torch.float8_e4m3fn)`` is right inside the format's range, but what it does beyond it depends on the torch
version: 1000.0 becomes NaN in 2.11 and 448 in 2.15, infinity becomes NaN or 448. This function is the package's own
rule on every version and device, and what the kernels are compared with:

- finite values round to nearest, ties to even, subnormals too; beyond the maximum they saturate to it;
- NaN and both infinities become the one NaN with bits 0x7F, so that a diverged run is never hidden by a 448;
- the sign of zero is kept.
"""

import torch
from torch import Tensor

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
