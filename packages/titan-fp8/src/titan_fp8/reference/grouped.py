"""Grouped casts and products (mixture of experts) in plain torch.

Rows of ``x[M, K]`` are sorted by expert; ``offs[E]`` (int32, on the device) holds each group's end. Two facts shape the
interface:

- Forward and input gradient contract K, which all groups share: rows need no alignment, and ``q[M, Kp]`` has none.
- The weight gradient contracts the tokens of one group. Scale blocks of 128 tokens must not straddle two groups, so in
  ``qt[Kp, Mp]`` each group starts at a multiple of 128 and is filled up with zeros. ``Mp = round_up(M + 127·E, 128)``
  bounds the padded size without reading ``offs`` on the host; ``offs_padded`` says where each group ends there.

Rows at or beyond ``offs[-1]`` belong to no group: they are zero in every product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_fp8.reference.cast import cast_block, cast_mx, cast_row, cast_tensor
from titan_fp8.reference.matmul import dequantize, no_autocast
from titan_fp8.reference.results import pad_matrix, padded_tokens
from titan_fp8.reference.scale import encode_decode_scales, finite_amax, round_to_float8

GroupedCast = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def padded_offsets(offs: Tensor) -> Tensor:
    """Where each group ends once every group is padded to a multiple of 128, int32."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return (-(-sizes // 128) * 128).cumsum(0).to(torch.int32)


def cast_grouped(x: Tensor, offs: Tensor, dtype: torch.dtype, pow2: bool, scaling: str) -> GroupedCast:
    """Cast ``x`` for all three grouped products.

    Args:
        x: ``[M, K]``, rows sorted by group.
        offs: End of each group, int32 ``[E]``.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2: Power-of-two scales (MX has no other).
        scaling: ``tensor``, ``row``, ``block1x128`` or ``mx32``.

    Returns:
        ``(q[M, Kp], scale, qt[Kp, Mp], scale_t, offs_padded[E])``. ``scale`` is shaped as the plain cast's with M rows.
        ``scale_t`` is ``[Kp, Mp/128]`` with strides ``(1, Kp)`` for all but MX (one scale per column of a group, or one
        in all, is repeated), so that one product serves them; MX: e8m0 ``[Kp, Mp/32]``.
    """
    num_rows, num_groups = x.shape[0], offs.shape[0]
    offs_padded = padded_offsets(offs)
    rows = torch.arange(num_rows, device=x.device)
    group = torch.searchsorted(offs, rows, right=True)
    in_group = group < num_groups
    starts = F.pad(offs, (1, 0))[:-1]
    starts_padded = F.pad(offs_padded, (1, 0))[:-1]
    group = group.clamp(max=num_groups - 1)
    tokens = padded_tokens(num_rows, num_groups)
    # Rows of no group go to one extra row, cut off again: no data-dependent shape, no synchronisation.
    target = torch.where(in_group, rows - starts[group] + starts_padded[group], tokens)
    grouped = x.new_zeros(tokens + 1, x.shape[1]).index_copy(0, target, x)[:tokens]

    if scaling == "mx32":
        q, scale = cast_mx(x, dtype)
        qt, scale_t = cast_mx(grouped.t(), dtype)
        return q[:num_rows].clone(), scale[:num_rows].clone(), qt, scale_t, offs_padded
    if scaling == "block1x128":
        q, scale = cast_block(x, dtype, pow2)
        scale = scale[:num_rows].t().contiguous().t()
        qt, scale_t = cast_block(grouped.t(), dtype, pow2)
        return q[:num_rows].clone(), scale, qt, scale_t, offs_padded

    columns = pad_matrix(grouped, 128).t().float()  # [Kp, Mp]
    blocks = columns.reshape(columns.shape[0], tokens // 128, 128)
    block_amax = finite_amax(blocks, (2,))
    if scaling == "row":
        q, scale = cast_row(pad_matrix(x, 128), dtype, pow2)
        scale = scale[:num_rows].clone()
        block_group = torch.searchsorted(offs_padded, torch.arange(0, tokens, 128, device=x.device), right=True)
        index = block_group.expand_as(block_amax)
        per_group = block_amax.new_zeros(columns.shape[0], num_groups + 1).scatter_reduce(1, index, block_amax, "amax")
        block_amax = per_group.gather(1, index)
    else:
        known = block_amax.max() if block_amax.numel() else block_amax.sum()  # rows of no group may hold anything
        q, scale = cast_tensor(pad_matrix(x, 128), dtype, pow2, known)
        block_amax = known.expand_as(block_amax)
    encode, decode = encode_decode_scales(block_amax.contiguous(), dtype, pow2)
    qt = round_to_float8(blocks * encode.unsqueeze(-1), dtype).view(columns.shape)
    return q[:num_rows].clone(), scale, qt, decode.t().contiguous().t(), offs_padded


def grouped_scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    scaling_a: str,
    scaling_b: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Forward and input gradient: rows of group ``e`` of ``a[M, K]`` times ``b[e]ᵀ``, ``b[E, N, K]`` → ``[M, N]``."""
    left, right = dequantize(a, scale_a, scaling_a), dequantize(b, scale_b, scaling_b)
    if a.device.type == "cuda":
        inside = torch.arange(a.shape[0], device=a.device) < offs[-1]
        product = F.grouped_mm(left.bfloat16(), right.bfloat16().mT, offs=offs)
        return torch.where(inside[:, None], product, torch.zeros_like(product)).to(out_dtype)
    out = left.new_zeros(a.shape[0], b.shape[1])
    start = 0
    with no_autocast(a.device):
        for expert, end in enumerate(offs.tolist()):
            out[start:end] = left[start:end] @ right[expert].t()
            start = end
    return out.to(out_dtype)


def grouped_scaled_mm_wgrad(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, scaling: str, out_dtype: torch.dtype
) -> Tensor:
    """Weight gradient: columns of group ``e`` of ``a[N, Mp]`` times those of ``b[K, Mp]`` → ``[E, N, K]``."""
    left, right = dequantize(a, scale_a, scaling), dequantize(b, scale_b, scaling)
    if a.device.type == "cuda":
        return F.grouped_mm(left.bfloat16(), right.bfloat16().t(), offs=offs).to(out_dtype)
    out = left.new_zeros(offs.shape[0], a.shape[0], b.shape[0])
    start = 0
    with no_autocast(a.device):
        for expert, end in enumerate(offs.tolist()):
            out[expert] = left[:, start:end] @ right[:, start:end].t()
            start = end
    return out.to(out_dtype)
