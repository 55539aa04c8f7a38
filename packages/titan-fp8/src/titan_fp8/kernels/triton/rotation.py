"""Rotary positions as one Triton kernel: forward and backward each read ``x`` once and write it once.

A program takes one token and some of its heads. Both layouts of channel pairs: halves (channel ``i`` with ``i + D / 2``) and
neighbours (``2 i`` with ``2 i + 1``). Backward turns by the opposite angle. Computed in float32 and rounded once.

Shapes: B batch, S sequence, H heads, D head width, even.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.differentiable import differentiable_once
from titan_fp8.kernels.triton.launch import launch

_PAIRS = 1024  # of a program: 8 values a thread of 4 warps in each half


@triton.jit
def rotate_kernel(
    x,
    cos,
    sin,
    out,
    num_heads,
    half,
    table_rows,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    INVERSE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Turn ``HEADS`` heads of one token; ``WIDTH`` is ``half`` padded to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pairs = tl.arange(0, WIDTH)[None, :]
    angle = (token % table_rows) * half + pairs
    source = x + token * stride_token + heads.to(tl.int64) * stride_head
    target = out + (token * num_heads + heads) * 2 * half
    if MASKED:
        c = tl.load(cos + angle, mask=pairs < half, other=0.0)
        s = tl.load(sin + angle, mask=pairs < half, other=0.0)
    else:
        c, s = tl.load(cos + angle), tl.load(sin + angle)
    if INVERSE:
        s = -s
    if NEIGHBOURS:
        channels = tl.arange(0, 2 * WIDTH)[None, :]
        inside = (heads < num_heads) & (channels < 2 * half)
        values = tl.load(source + channels, mask=inside, other=0.0) if MASKED else tl.load(source + channels)
        a, b = tl.split(tl.reshape(values.to(tl.float32), [HEADS, WIDTH, 2]))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [HEADS, 2 * WIDTH]).to(out.dtype.element_ty)
        if MASKED:
            tl.store(target + channels, turned, mask=inside)
        else:
            tl.store(target + channels, turned)
    else:
        inside = (heads < num_heads) & (pairs < half)
        if MASKED:
            a = tl.load(source + pairs, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(source + half + pairs, mask=inside, other=0.0).to(tl.float32)
        else:
            a, b = tl.load(source + pairs).to(tl.float32), tl.load(source + half + pairs).to(tl.float32)
        first, second = (a * c - b * s).to(out.dtype.element_ty), (b * c + a * s).to(out.dtype.element_ty)
        if MASKED:
            tl.store(target + pairs, first, mask=inside)
            tl.store(target + half + pairs, second, mask=inside)
        else:
            tl.store(target + pairs, first)
            tl.store(target + half + pairs, second)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, neighbours: bool = False) -> Tensor:
    """Rotary positions (arXiv:2104.09864): turn every channel pair of ``x`` by its angle, in float32, rounded once.

    For CUDA tensors; it needs Triton.

    Args:
        x: ``[B, S, H, D]``, float32, bfloat16 or float16.
        cos: ``[B or 1, S, 1, D / 2]`` float32.
        sin: Same.
        neighbours: Channels ``2 i`` and ``2 i + 1`` are a pair, not ``i`` and ``i + D / 2``.

    Returns:
        Same shape and dtype as ``x``; differentiable in ``x``, once.
    """
    return cast(Tensor, _Rotation.apply(x, cos, sin, neighbours))


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return _launch(x, cos, sin, neighbours, inverse=False)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        return _launch(grads[0], *ctx.saved_tensors, ctx.neighbours, inverse=True), None, None, None


def _launch(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool, *, inverse: bool) -> Tensor:
    batch, seq_len, num_heads, width = x.shape
    rows_follow = batch == 1 or seq_len == 1 or x.stride(0) == seq_len * x.stride(1)
    if x.stride(3) != 1 or not rows_follow:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    half = width // 2
    stride_token = x.stride(0) if seq_len == 1 else x.stride(1)
    padded = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_heads), max(1, _PAIRS // padded))
    launch(
        rotate_kernel, (batch * seq_len, triton.cdiv(num_heads, heads)),
        x, cos, sin, out, num_heads, half, cos.numel() // half, stride_token, x.stride(2),
        HEADS=heads, WIDTH=padded, MASKED=padded != half or num_heads % heads != 0, INVERSE=inverse, NEIGHBOURS=neighbours,
        num_warps=4,
    )  # fmt: skip
    return out
