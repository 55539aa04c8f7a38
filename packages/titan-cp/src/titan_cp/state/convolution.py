"""The short causal convolution in front of a state layer, over ranks.

Problem: a token's convolution of width ``w`` needs the ``w - 1`` tokens before it in its document; those before a rank's
first token are on another rank, or, where pieces are shorter than ``w``, on several.

Idea: which rows travel is what a causal window of ``w`` tokens needs, so the exchange is planned as for windowed attention
(`titan_cp.planning.exchange`), and sent by the same transfers. Each tap is then one gather of rows.

Cost: at most ``(w - 1) · channels`` elements for each cut piece, independent of length; gradients return as accumulators.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.differentiable import differentiable_once
from titan_cp.methods.compiling import graph_break
from titan_cp.methods.direct import RowTransfer
from titan_cp.methods.rows import KeyValues, empty_rows, zero_rows
from titan_cp.planning.costs import accumulator_dtype
from titan_cp.planning.exchange import Round, plan_rounds, rows_needed
from titan_cp.planning.groups import check_group
from titan_cp.planning.plan import AttentionPlan
from titan_cp.planning.ranges import piece_arrays, range_arrays
from titan_cp.planning.tokens import to_device

_TAG, _GRAD_TAG = 4, 5


@graph_break
def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """A depthwise causal convolution over each document, on this rank's tokens.

    Args:
        x: This rank's tokens, shape ``[B, C, T]``.
        weight: Taps of each channel, the last one for the token itself, ``[C, w]``: ``conv.weight.squeeze(1)`` of a
            depthwise ``nn.Conv1d``.
        bias: ``[C]``; None for none.
        plan: A plan of this sequence length or packing.
        group: The whole context-parallel group, ``plan.size`` ranks in the plan's order; None for one rank.

    Returns:
        ``[B, C, T]`` in the dtype of ``x``. Zeros stand before a document's first token. Differentiable once.

    Raises:
        ValueError: If tensors or group do not fit the plan, before any communication.
    """
    if x.ndim != 3 or x.shape[2] != plan.local_len:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, but the plan wants [batch, channels, {plan.local_len}]. Shard with "
            "plan.shard, and transpose [B, T, C] to [B, C, T]."
        )
    if weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} for {x.shape[1]} channels: it must be [channels, taps]. Squeeze the "
            "middle dim of a depthwise nn.Conv1d's weight."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}, but weight has {weight.shape[0]} channels. Use [channels]."
        )
    check_group(group, plan.size, plan.rank, "group")
    width = weight.shape[1]
    halo = rank_halo(plan, width)
    rows = x.transpose(1, 2)
    zero = rows.new_zeros((x.shape[0], 1, x.shape[1]))
    parts = [rows, zero]
    if halo.cut:
        parts.append(_Halo.apply(rows, halo, group))
    extended = torch.cat(parts, dim=1)
    index = plan.index_once(("halo index", width, x.device), lambda: to_device(torch.from_numpy(halo.taps), x.device))
    out = torch.zeros_like(rows) if bias is None else bias.to(x.dtype).expand_as(rows)
    for tap in range(width):
        shifted = rows if tap == width - 1 else extended.index_select(1, index[width - 2 - tap])
        out = out + shifted * weight[:, tap]
    return out.transpose(1, 2).to(x.dtype)


class Halo(NamedTuple):
    """The rows that a rank receives in front of its pieces, and where each tap finds its row."""

    rounds: tuple[Round, ...]
    cut: bool
    """Whether any rank receives rows."""
    sent: int
    """Rows that this rank sends."""
    received: int
    taps: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    """``[w - 1, T]``: the row of the token ``1, 2, …`` before each; local rows, then a row of zeros, then received ones."""


def rank_halo(plan: AttentionPlan, width: int) -> Halo:
    """What a convolution of ``width`` taps exchanges, for the plan's rank; kept with the plan."""
    return plan.index_once(("halo", width), lambda: _plan_halo(plan, width))


def _plan_halo(plan: AttentionPlan, width: int) -> Halo:
    ranges, bounds = plan.shard_ranges, plan.cu_seqlens
    needed = rows_needed(ranges, bounds, causal=True, window=width)
    cut = bool(needed.any())
    rounds = plan_rounds(ranges, needed, plan.rank, bounds, causal=True, window=width) if cut else ()
    start, stop, _ = range_arrays((ranges[plan.rank],))
    held = np.concatenate([np.arange(a, b) for a, b in zip(start, stop, strict=True)])
    spans = [(a, b) for this in rounds for a, b in this.tokens]
    arriving = np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in spans)])
    tokens = np.concatenate([held, arriving])
    rows = np.concatenate([np.arange(len(held)), len(held) + 1 + np.arange(len(arriving))])
    order = np.argsort(tokens)
    tokens, rows = tokens[order], rows[order]
    _, _, first, last, _ = piece_arrays((ranges[plan.rank],), bounds)
    position = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
    taps = np.full((width - 1, len(held)), len(held), dtype=np.int64)
    for back in range(1, width):
        inside = position >= back
        taps[back - 1, inside] = rows[np.searchsorted(tokens, held[inside] - back)]
    return Halo(rounds, cut, int(needed[:, plan.rank].sum()), int(needed[plan.rank].sum()), taps)


class _Halo(torch.autograd.Function):
    """``[B, T, C]`` to the received rows ``[B, rows, C]``; every rank takes part in both ways, with no rows too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, halo: Halo, group: dist.ProcessGroup) -> Tensor:
        ctx.halo, ctx.group, ctx.shape, ctx.dtype = halo, group, rows.shape, rows.dtype
        own = _pair(rows)
        received: list[Tensor] = []
        for this in halo.rounds:
            into = empty_rows(own.k, own.v, sum(stop - start for start, stop in this.tokens))
            RowTransfer(own, this.sends, this.receives, group, _TAG).finish(into, add=False)
            received.append(into.k.squeeze(1))
        return torch.cat([rows[:, :0], *received], dim=1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        grad = grad_outputs[0].to(accumulator_dtype(ctx.dtype))
        like = _pair(grad)
        home = zero_rows(like.k, like.v, ctx.shape[1], grad.dtype)
        row = 0
        for this in ctx.halo.rounds:
            end = row + sum(stop - start for start, stop in this.tokens)
            RowTransfer(_pair(grad[:, row:end]), this.receives, this.sends, ctx.group, _GRAD_TAG).finish(home)
            row = end
        return home.k.squeeze(1).to(ctx.dtype), None, None


def _pair(rows: Tensor) -> KeyValues:
    """Rows as keys of one head, with values of no channels."""
    one = rows.unsqueeze(1)
    return KeyValues(one, one, one[..., :0])
