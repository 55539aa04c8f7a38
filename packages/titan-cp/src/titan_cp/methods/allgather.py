"""All-gather attention: each rank gathers the keys of all, a few heads at a time.

Problem: a kernel with a mask of its own (FlexAttention), or one call over long keys, wants the whole sequence's keys at
once; gathering all heads costs O(S) memory.

Idea: heads are independent, so gather one KV head (or a few) while attending with the one before. The peak is O(S) for
those heads only. The backward gathers again, and reduce-scatters dK, dV in float32, again one group behind the compute.

Cost: (N-1) hops' worth of keys, as the ring, in one collective a head group; see `titan_cp.planning.costs`.

Source: the head-pipelined all-gather of Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.backends.backend import Backend, Grads, Saved
from titan_cp.methods.ring import new_accumulators
from titan_cp.planning.costs import accumulator_dtype
from titan_cp.planning.plan import AttentionPlan
from titan_cp.planning.tokens import range_index


class GatherSetup(NamedTuple):
    """What one call needs besides tensors."""

    plan: AttentionPlan
    group: dist.ProcessGroup | None
    """The context-parallel group; None for one rank."""
    backend: Backend
    scale: float
    heads_per_step: int
    """KV heads gathered at a time."""


def allgather_apply(q: Tensor, k: Tensor, v: Tensor, setup: GatherSetup) -> Tensor:
    """Attention of this rank's queries ``[B, Hq, T, D]`` with all keys; arguments have been checked."""
    return _AllGather.apply(q, k, v, setup)  # pyright: ignore[reportReturnType] - torch types apply as returning Any


def gather_sequence(
    k: Tensor, v: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The keys and values of the whole sequence, in its own order; differentiable (float32 reduce-scatter)."""
    return _GatherSequence.apply(k, v, plan, group)  # pyright: ignore[reportReturnType]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, setup: GatherSetup) -> Tensor:
        plan, backend, scale = setup.plan, setup.backend, setup.scale
        out, lse = new_accumulators(q)
        tiles = plan.sequence_tiles()
        for q_heads, _, kv in _gathered_heads(q, k, v, setup):
            backend.forward(q[:, q_heads], kv[0], kv[1], tiles, scale, out[:, q_heads], lse[:, q_heads])
        out = out.to(q.dtype)
        ctx.setup = setup
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        setup: GatherSetup = ctx.setup
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grad_outputs[0]
        wide = accumulator_dtype(q.dtype)
        grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        grad_kv = torch.empty((2, *k.shape), dtype=k.dtype, device=k.device)
        tiles = setup.plan.sequence_tiles()
        pending: Callable[[], None] | None = None
        for q_heads, kv_heads, kv in _gathered_heads(q, k, v, setup):
            full_grad = torch.zeros(kv.shape, dtype=wide, device=kv.device)
            block = Saved(grad_out[:, q_heads], q[:, q_heads], kv[0], kv[1], out[:, q_heads], lse[:, q_heads])
            grads = Grads(grad_q[:, q_heads], full_grad[0], full_grad[1])
            setup.backend.backward(block, tiles, setup.scale, grads)
            if pending is not None:
                pending()
            pending = _scatter(full_grad, grad_kv[:, :, kv_heads], setup.plan, setup.group)
        assert pending is not None, "there is at least one KV head"
        pending()
        return grad_q.to(q.dtype), grad_kv[0], grad_kv[1], None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.group = plan, group
        kv = _start_gather(torch.stack([k, v]), plan, group)()
        return kv[0], kv[1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad = torch.stack(grad_outputs)
        local = list(grad.shape)
        local[3] //= ctx.plan.size
        out = grad.new_empty(local)
        _scatter(grad.to(accumulator_dtype(grad.dtype)), out, ctx.plan, ctx.group)()
        return out[0], out[1], None, None


def _gathered_heads(q: Tensor, k: Tensor, v: Tensor, setup: GatherSetup) -> Any:
    """Yield ``(query heads, KV heads, gathered KV)`` a group of heads at a time, the next group already in flight."""
    groups = q.shape[1] // k.shape[1]
    kv = torch.stack([k, v])
    starts = range(0, k.shape[1], setup.heads_per_step)

    def start(first: int) -> Callable[[], Tensor]:
        return _start_gather(kv[:, :, first : first + setup.heads_per_step], setup.plan, setup.group)

    ready = start(0)
    for first in starts:
        gathered = ready()
        following = first + setup.heads_per_step
        if following < k.shape[1]:
            ready = start(following)
        last = min(following, k.shape[1])
        yield slice(first * groups, last * groups), slice(first, last), gathered


def _start_gather(kv: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Begin gathering ``[2, B, H, T, D]``; the returned function waits and gives ``[2, B, H, S, D]`` in order."""
    kv = kv.contiguous()
    if group is None:
        return lambda: kv
    # gloo wants the ranks along an existing first dim; splitting it off is a view.
    parts = kv.new_empty((group.size() * kv.shape[0], *kv.shape[1:]))
    work = dist.all_gather_into_tensor(parts, kv, group=group, async_op=True)

    def finish() -> Tensor:
        assert work is not None, "an asynchronous collective returns its work"
        work.wait()
        by_rank = parts.unflatten(0, (-1, 2)).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return by_rank.index_select(3, _rank_order(plan).argsort().to(kv.device))

    return finish


def _scatter(full: Tensor, into: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Begin summing ``[2, B, H, S, D]`` over ranks; the returned function waits and writes this rank's tokens."""
    if group is None:
        into.copy_(full)
        return lambda: None
    by_rank = full.index_select(3, _rank_order(plan).to(full.device))
    parts = by_rank.unflatten(3, (group.size(), -1)).permute(3, 0, 1, 2, 4, 5).contiguous()
    mine = parts.new_empty(parts.shape[1:])
    work = dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=group, async_op=True)

    def finish() -> None:
        assert work is not None, "an asynchronous collective returns its work"
        work.wait()
        into.copy_(mine)

    return finish


def _rank_order(plan: AttentionPlan) -> Tensor:
    """The token of the sequence at each place of the ranks' tokens laid end to end."""
    return torch.cat([range_index(held, "cpu") for held in plan.ring_ranges])
