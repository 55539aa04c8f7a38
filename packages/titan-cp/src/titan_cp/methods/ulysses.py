"""Ulysses attention: trade the sequence for heads, attend locally, trade back.

Problem: attention needs all tokens of a head; it does not need all heads.

Idea: one all-to-all turns "all heads, ``S/u`` tokens" into "``Hq/u`` heads, all tokens" for queries, keys and values
together; any local attention function runs; one more all-to-all brings the output back. KV heads fewer than ranks (or
not a multiple) are repeated to the least common multiple; their gradients are summed in float32. Where ranks do not divide
the query heads, heads of zeros are added (`titan_cp.planning.costs.share_heads`) and dropped again behind the attention.

Cost: (Hq + Hk') (S/u) (D + E) b (u-1)/u bytes each way (E channels of a value); see `titan_cp.planning.costs`.

Limits: heads of zeros are sent and computed like others. Nothing overlaps: the all-to-all must end before attention begins.

Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.differentiable import differentiable_once
from titan_cp.planning.costs import accumulator_dtype
from titan_cp.planning.plan import AttentionPlan
from titan_cp.planning.tokens import TokenOrder


def sequence_for_heads(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, H, T, D]`` each to ``[B, H/u, u·T, D]``, tokens ascending; differentiable."""
    if group is None:
        return q, k, v
    return _Scatter.apply(q, k, v, plan, group)  # pyright: ignore[reportReturnType] - torch types apply as Any


def heads_for_sequence(out: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None) -> Tensor:
    """``[B, Hq/u, u·T, D]`` back to ``[B, Hq, T, D]``; differentiable."""
    if group is None:
        return out
    return _Collect.apply(out, plan, group)  # pyright: ignore[reportReturnType] - torch types apply as Any


def heads_of_rank(sinks: Tensor | None, plan: AttentionPlan) -> Tensor | None:
    """Of a value per query head, those of the heads that this rank attends with; differentiable."""
    if sinks is None:
        return None
    shares = plan.head_shares
    every = _add_heads(sinks[None], plan.num_kv_heads, shares.groups, shares.group_heads)[0]
    return every.chunk(plan.ulysses_degree)[plan.rank % plan.ulysses_degree]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.group = plan, group
        shares = plan.head_shares
        k, v = (_add_heads(t, plan.num_kv_heads, shares.groups, 1) for t in (k, v))
        k, v = (t.repeat_interleave(shares.repeats, dim=1) for t in (k, v)) if shares.repeats > 1 else (k, v)
        return _to_sequence((_add_heads(q, plan.num_kv_heads, shares.groups, shares.group_heads), k, v), plan, group)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        plan: AttentionPlan = ctx.plan
        q, k, v = _to_heads(grad_outputs, plan, ctx.group)
        return _drop_heads(q, plan), _sum_repeats(k, plan), _sum_repeats(v, plan), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, plan: AttentionPlan, group: dist.ProcessGroup) -> Tensor:
        ctx.plan, ctx.group = plan, group
        return _drop_heads(_to_heads((out,), plan, group)[0], plan)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        plan: AttentionPlan = ctx.plan
        grad = _add_heads(grad_outputs[0], plan.num_kv_heads, plan.head_shares.groups, plan.head_shares.group_heads)
        return _to_sequence((grad,), plan, ctx.group)[0], None, None


def _to_sequence(tensors: tuple[Tensor, ...], plan: AttentionPlan, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """``[B, H, T, D]`` each to ``[B, H/u, u·T, D]``, tokens ascending, in one all-to-all; each may have its own D."""
    by_rank = [t.unflatten(1, (group.size(), -1)).transpose(0, 1) for t in tensors]
    order = _token_order(plan, tensors[0].device)
    index = None if order is None else order.places
    # [u, B, h, T, D]: the first dim is now the token's rank.
    joined = (t.permute(1, 2, 0, 3, 4).flatten(2, 3) for t in _exchange(by_rank, group))
    return tuple(t if index is None else t.index_select(2, index) for t in joined)


def _to_heads(tensors: tuple[Tensor, ...], plan: AttentionPlan, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The inverse of `_to_sequence`."""
    order = _token_order(plan, tensors[0].device)
    if order is not None:
        tensors = tuple(t.index_select(2, order.tokens) for t in tensors)
    by_rank = [t.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4) for t in tensors]
    # [u, B, h, T, D]: the first dim is now the head's rank.
    return tuple(t.transpose(0, 1).flatten(1, 2) for t in _exchange(by_rank, group))


def _exchange(by_rank: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """All-to-all over the first dim of several tensors in one message."""
    sizes = [t[0].numel() for t in by_rank]
    sent = by_rank[0].new_empty((group.size(), sum(sizes)))
    for into, t in zip(sent.split(sizes, dim=1), by_rank, strict=True):
        into.unflatten(1, t.shape[1:]).copy_(t)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return [part.unflatten(1, t.shape[1:]) for part, t in zip(received.split(sizes, dim=1), by_rank, strict=True)]


def _add_heads(x: Tensor, groups: int, to_groups: int, to_heads: int) -> Tensor:
    """Heads of zeros in dim 1: to ``to_heads`` in each of the ``groups``, and ``to_groups`` of them."""
    heads = x.shape[1] // groups
    if (groups, heads) == (to_groups, to_heads):
        return x
    added = x.new_zeros((x.shape[0], to_groups, to_heads, *x.shape[2:]))
    added[:, :groups, :heads] = x.unflatten(1, (groups, heads))
    return added.flatten(1, 2)


def _drop_heads(x: Tensor, plan: AttentionPlan) -> Tensor:
    """The inverse of `_add_heads`, for query heads."""
    if x.shape[1] == plan.num_heads:
        return x
    grouped = x.unflatten(1, (plan.head_shares.groups, -1))
    return grouped[:, : plan.num_kv_heads, : plan.num_heads // plan.num_kv_heads].flatten(1, 2)


def _sum_repeats(grad: Tensor, plan: AttentionPlan) -> Tensor:
    if grad.shape[1] == plan.num_kv_heads:
        return grad
    wide = grad.to(accumulator_dtype(grad.dtype))
    return wide.unflatten(1, (plan.head_shares.groups, -1)).sum(2)[:, : plan.num_kv_heads].to(grad.dtype)


def _token_order(plan: AttentionPlan, device: torch.device) -> TokenOrder | None:
    """The Ulysses ranks' tokens laid end to end; None if they ascend already."""
    return None if plan.ring_degree > 1 or plan.layout == "contiguous" else plan.shard_order(device)
