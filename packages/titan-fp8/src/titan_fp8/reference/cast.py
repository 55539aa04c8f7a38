"""Casts to float8 in plain torch: the specification of every cast kernel.

Shapes: ``x[M, K]``; ``Mp, Kp`` are M and K rounded up to a multiple of 16 (tensor and row scaling) or 128 (blocks and
MX), the sizes the matrix products need. The padding is zeros with scale 1. A *dual* cast also returns the transpose,
``qt[Kp, Mp]``, scaled along its own rows: the operand of the weight gradient, where tokens are contracted.

Scaling names, as `titan_fp8.ops` spells them: ``tensor`` one scale; ``row`` one per row; ``block1x128`` one per 128
consecutive values of a row; ``block128`` one per 128×128 tile (weights); ``mx32`` one e8m0 scale per 32 values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_fp8.reference.results import Dual, pad_matrix, round_up
from titan_fp8.reference.scale import encode_decode_scales, encode_exponent, finite_amax, round_to_float8


def amax(x: Tensor) -> Tensor:
    """The largest finite magnitude, float32, shape ``[]``."""
    return finite_amax(x)


def cast_tensor(x: Tensor, dtype: torch.dtype, pow2: bool, known_amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One scale for all: ``q[Mp, Kp]``, ``scale[]``. With ``known_amax``, values beyond it saturate."""
    encode, decode = encode_decode_scales(finite_amax(x) if known_amax is None else known_amax.float(), dtype, pow2)
    return round_to_float8(pad_matrix(x, 16).float() * encode, dtype), decode


def cast_tensor_dual(
    x: Tensor, dtype: torch.dtype, pow2: bool, known_amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One scale for all: ``q[Mp, Kp]``, ``qt[Kp, Mp]``, ``scale[]``."""
    q, decode = cast_tensor(x, dtype, pow2, known_amax)
    return q, _transposed(q), decode


def cast_row(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """One scale per row: ``q[Mp, Kp]``, ``scale[Mp, 1]``."""
    padded = pad_matrix(x, 16).float()
    encode, decode = encode_decode_scales(finite_amax(padded, (1,), keepdim=True), dtype, pow2)
    return round_to_float8(padded * encode, dtype), decode


def cast_row_dual(x: Tensor, dtype: torch.dtype, pow2: bool) -> Dual:
    """One scale per row, and per column for the transpose: ``q, scale[Mp, 1], qt[Kp, Mp], scale_t[Kp, 1]``."""
    return *cast_row(x, dtype, pow2), *cast_row(x.t(), dtype, pow2)


def cast_block(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """1×128 blocks: ``q[Mp, Kp]``, ``scale[Mp, Kp/128]`` stored column by column (strides ``(1, Mp)``)."""
    padded = pad_matrix(x, 128).float()
    rows, columns = padded.shape
    blocks = padded.view(rows, columns // 128, 128)
    encode, decode = encode_decode_scales(finite_amax(blocks, (2,)), dtype, pow2)
    q = round_to_float8(blocks * encode.unsqueeze(-1), dtype).view(rows, columns)
    return q, decode.t().contiguous().t()


def cast_block_dual(x: Tensor, dtype: torch.dtype, pow2: bool) -> Dual:
    """1×128 blocks of ``x`` and of its transpose: ``q, scale, qt[Kp, Mp], scale_t[Kp, Mp/128]`` (strides ``(1, Kp)``)."""
    return *cast_block(x, dtype, pow2), *cast_block(x.t(), dtype, pow2)


def cast_weight_block(w: Tensor, dtype: torch.dtype, pow2: bool) -> Dual:
    """128×128 tiles: ``q[Np, Kp], scale[Np/128, L4(Kp/128)], qt[Kp, Np], scale_t[Kp/128, L4(Np/128)]``.

    ``w`` may have leading dimensions (experts), and so have the results then. ``L4`` rounds up to a multiple of 4, as
    cuBLASLt reads the scales; the padding is 1. ``qt`` is the transpose of ``q``, byte for byte, and ``scale_t`` of
    ``scale``.
    """
    q, decode = _cast_tiles(w, dtype, pow2)
    return q, _pad_to_four(decode), _transposed(q), _pad_to_four(decode.mT)


def cast_weight_rows(w: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """`cast_weight_block` without the transpose: ``q[Np, Kp], scale[Np/128, L4(Kp/128)]``."""
    q, decode = _cast_tiles(w, dtype, pow2)
    return q, _pad_to_four(decode)


def transpose_codes(codes: Tensor, multiple: int) -> Tensor:
    """The transpose of bytes ``[N, K]``, contiguous, padded with zeros: ``[Kp, Np]``."""
    return _transposed(pad_matrix(codes, multiple))


def _cast_tiles(w: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    padded = pad_matrix(w, 128).float()
    *_, rows, columns = padded.shape
    tiles = padded.view(*w.shape[:-2], rows // 128, 128, columns // 128, 128)
    encode, decode = encode_decode_scales(finite_amax(tiles, (-3, -1)), dtype, pow2)
    return round_to_float8(tiles * encode[..., None, :, None], dtype).view(padded.shape), decode


def cast_weights_block(weights: list[Tensor], dtype: torch.dtype, pow2: bool) -> list[Tensor]:
    """`cast_weight_block` of each weight, the four results of each in turn."""
    return [tensor for w in weights for tensor in cast_weight_block(w, dtype, pow2)]


def cast_mx(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """1×32 blocks with e8m0 scales: ``q[Mp, Kp]``, ``scale[Mp, Kp/32]`` (row-major, not swizzled).

    The scale is the smallest power of two under which nothing overflows (OCP MX leaves the choice open).
    """
    padded = pad_matrix(x, 128).float()
    rows, columns = padded.shape
    blocks = padded.view(rows, columns // 32, 32)
    k = encode_exponent(finite_amax(blocks, (2,)), dtype)
    encode = ((k + 127) << 23).view(torch.float32)
    q = round_to_float8(blocks * encode.unsqueeze(-1), dtype).view(rows, columns)
    return q, (127 - k).to(torch.uint8).view(torch.float8_e8m0fnu)


def cast_mx_dual(x: Tensor, dtype: torch.dtype) -> Dual:
    """1×32 blocks of ``x`` and of its transpose: ``q, scale, qt[Kp, Mp], scale_t[Kp, Mp/32]``."""
    return *cast_mx(x, dtype), *cast_mx(x.t(), dtype)


def _transposed(matrix: Tensor) -> Tensor:
    """A contiguous copy of the transpose: where a size is 0, ``contiguous()`` returns a view, which an op may not return."""
    return matrix.mT.clone(memory_format=torch.contiguous_format)


def _pad_to_four(scale: Tensor) -> Tensor:
    """Scales with their last dimension padded with ones to a multiple of 4."""
    padding = round_up(scale.shape[-1], 4) - scale.shape[-1]
    return F.pad(scale, (0, padding), value=1.0).contiguous()
