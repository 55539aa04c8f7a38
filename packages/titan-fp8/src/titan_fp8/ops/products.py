"""Products of float8 operands, plain and grouped."""

import torch
from torch import Tensor

from titan_fp8.ops.checks import check_offsets, check_operand, check_product, check_vector
from titan_fp8.ops.declare import float8_op

BF16 = torch.bfloat16


def _check_scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> None:
    check_operand(a, scale_a, scaling_a, "a")
    check_operand(b, scale_b, scaling_b, "b")
    check_product(a, b, scaling_a, scaling_b, out_dtype)
    if bias is not None:
        check_vector(bias, b.shape[0], "bias")
        if bias.dtype != out_dtype:
            raise ValueError(f"bias is {bias.dtype} and out_dtype {out_dtype}: they must be the same.")


@float8_op(_check_scaled_mm)
def scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    out_dtype: torch.dtype = BF16,
    fast_accum: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """``a[M, K] · b[N, K]ᵀ`` (+ ``bias[N]``) → ``[M, N]``, contracting both last dimensions.

    Args:
        a: Float8, contiguous; any M, 0 too.
        scale_a: Decode scales of ``a``, as its cast returned them.
        b: Float8, contiguous, N a multiple of 16.
        scale_b: Decode scales of ``b``.
        scaling_a: ``tensor``, ``row``, ``block1x128`` or ``mx32``.
        scaling_b: The same; with ``block1x128`` for ``a`` also ``block128``.
        out_dtype: bfloat16, float16 or float32.
        fast_accum: Allow accumulation in the tensor core's 14 bits, which ``tensor`` and ``row`` scales have; blocks and
            ``mx32`` ignore it. Never for a weight gradient: the error grows with the number of tokens.
        bias: ``[N]``, ``out_dtype``.

    Raises:
        ValueError: For operands that CUDA would reject, on every device.
    """
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _check_grouped(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    scaling_a: str,
    scaling_b: str,
    out_dtype: torch.dtype,
) -> None:
    check_offsets(offs)
    check_operand(a, scale_a, scaling_a, "a")
    check_operand(b, scale_b, scaling_b, "b", batched=True)
    check_product(a, b, scaling_a, scaling_b, out_dtype)
    if b.shape[0] != offs.shape[0]:
        raise ValueError(f"b holds {b.shape[0]} experts and offs {offs.shape[0]} groups: each group needs its expert.")


@float8_op(_check_grouped)
def grouped_scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    scaling_a: str,
    scaling_b: str,
    out_dtype: torch.dtype = BF16,
) -> Tensor:
    """Each group of rows of ``a[M, K]`` times its expert's ``b[e]ᵀ``, ``b[E, N, K]`` → ``[M, N]``.

    Forward and input gradient of experts. Rows at or beyond ``offs[-1]`` are zero. ``offs`` stays on the device.

    Args:
        a: ``q`` of `cast_grouped`.
        scale_a: Its scale.
        b: Float8 expert weights (for the input gradient their transposes ``[E, K, N]``), contraction last.
        scale_b: Their scales, with leading dimension E (or ``[]`` with ``tensor``).
        offs: Group ends, int32 ``[E]``; groups may be empty and need no alignment.
        scaling_a: ``tensor``, ``row``, ``block1x128`` or ``mx32``.
        scaling_b: The same, or ``block128`` beside ``block1x128``.
        out_dtype: bfloat16, float16 or float32.
    """
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


def _check_wgrad(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs_padded: Tensor, scaling: str, out_dtype: torch.dtype
) -> None:
    check_offsets(offs_padded)
    if scaling not in ("block1x128", "mx32"):
        raise ValueError(f"scaling={scaling!r}: grouped casts lay their transposed scales out as block1x128 or mx32.")
    check_operand(a, scale_a, scaling, "a")
    check_operand(b, scale_b, scaling, "b")
    check_product(a, b, scaling, scaling, out_dtype)


@float8_op(_check_wgrad)
def grouped_scaled_mm_wgrad(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs_padded: Tensor,
    scaling: str,
    out_dtype: torch.dtype = BF16,
) -> Tensor:
    """Each group of columns of ``a[N, Mp]`` times those of ``b[K, Mp]`` → ``[E, N, K]``: experts' weight gradients.

    Args:
        a: ``qt`` of `cast_grouped` of the output gradient.
        scale_a: Its ``scale_t``.
        b: ``qt`` of `cast_grouped` of the input, with the same offsets.
        scale_b: Its ``scale_t``.
        offs_padded: The padded group ends that both casts returned.
        scaling: ``mx32`` if both were cast so, else ``block1x128`` (for every other recipe the scales have that layout).
        out_dtype: bfloat16, float16 or float32.
    """
    return a.new_empty(offs_padded.shape[0], a.shape[0], b.shape[0], dtype=out_dtype)
