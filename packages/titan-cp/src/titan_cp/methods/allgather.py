"""All-gather attention: each rank gathers the keys of all, a few heads at a time.

Problem: a kernel with a mask of its own (FlexAttention), or one call over long keys, wants the whole sequence's keys at
once; gathering all heads costs O(S) memory.

Idea: heads are independent, so gather one KV head (or a few) while attending with the one before. The peak is O(S) for
those heads only. The backward gathers again, and reduce-scatters dK, dV in float32, again one group behind the compute.

Cost: (N-1) hops' worth of keys, as the ring, in one collective a head group; see `titan_cp.planning.costs`.

Source: the head-pipelined all-gather of Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.backends.backend import Backend, Saved
from titan_cp.backends.merge import add_sinks
from titan_cp.methods.ring import block_gradients, new_accumulators, sink_gradients_of, widen_saved
from titan_cp.methods.rows import KeyValues, pack_rows, widen
from titan_cp.planning.costs import accumulator_dtype
from titan_cp.planning.plan import AttentionPlan


class GatherSetup(NamedTuple):
    """What one call needs besides tensors."""

    plan: AttentionPlan
    group: dist.ProcessGroup | None
    """The context-parallel group; None for one rank."""
    backend: Backend
    scale: float
    heads_per_step: int
    """KV heads gathered at a time."""


def allgather_apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setup: GatherSetup) -> Tensor:
    """Attention of this rank's queries ``[B, Hq, T, D]`` with all keys; arguments have been checked."""
    return _AllGather.apply(q, k, v, sinks, setup)  # pyright: ignore[reportReturnType] - torch types apply as returning Any


def gather_sequence(
    k: Tensor, v: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The keys and values of the whole sequence, in its own order; differentiable (float32 reduce-scatter)."""
    return _GatherSequence.apply(k, v, plan, group)  # pyright: ignore[reportReturnType]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setup: GatherSetup) -> Tensor:
        plan, backend, scale = setup.plan, setup.backend, setup.scale
        out, lse = new_accumulators(q, v, backend)
        tiles = plan.sequence_tiles()
        for q_heads, _, kv in _gathered_heads(q, k, v, setup):
            wide_v = widen(kv.v, backend, q.shape[-1])
            backend.forward(q[:, q_heads], kv.k, wide_v, tiles, scale, out[:, q_heads], lse[:, q_heads])
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = out[..., : v.shape[-1]].to(q.dtype)
        ctx.setup = setup
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        setup: GatherSetup = ctx.setup
        *kept, sinks = ctx.saved_tensors
        saved = Saved(grad_outputs[0], *kept)
        q, k, v = saved.q, saved.k, saved.v
        grad_q = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)
        grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
        widened = widen_saved(saved, setup.backend)
        tiles = setup.plan.sequence_tiles()
        pending: Callable[[], None] | None = None
        for q_heads, kv_heads, kv in _gathered_heads(q, k, v, setup):
            block = Saved(
                widened.grad_out[:, q_heads], q[:, q_heads], k, v, widened.out[:, q_heads], widened.lse[:, q_heads]
            )
            full = block_gradients(block, kv, setup.backend, tiles, setup.scale, grad_q[:, q_heads])
            if pending is not None:
                pending()
            pending = _scatter(full, (grad_k[:, kv_heads], grad_v[:, kv_heads]), setup.plan, setup.group)
        assert pending is not None, "there is at least one KV head"
        pending()
        return grad_q.to(q.dtype), grad_k, grad_v, sink_gradients_of(saved, sinks), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.group = plan, group
        kv = _start_gather(pack_rows(k, v), plan, group)()
        return kv.k, kv.v

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grads = [grad.to(accumulator_dtype(grad.dtype)) for grad in grad_outputs]
        local = tuple(
            grad.new_empty((*grad.shape[:2], grad.shape[2] // ctx.plan.size, grad.shape[3])) for grad in grad_outputs
        )
        _scatter(KeyValues(grads[0], grads[0], grads[1]), (local[0], local[1]), ctx.plan, ctx.group)()
        return local[0], local[1], None, None


def _gathered_heads(q: Tensor, k: Tensor, v: Tensor, setup: GatherSetup) -> Iterator[tuple[slice, slice, KeyValues]]:
    """Yield ``(query heads, KV heads, gathered KV)`` a group of heads at a time, the next group already in flight."""
    groups = q.shape[1] // k.shape[1]

    def start(first: int) -> Callable[[], KeyValues]:
        heads = slice(first, first + setup.heads_per_step)
        return _start_gather(pack_rows(k[:, heads], v[:, heads]), setup.plan, setup.group)

    ready = start(0)
    for first in range(0, k.shape[1], setup.heads_per_step):
        gathered = ready()
        following = first + setup.heads_per_step
        if following < k.shape[1]:
            ready = start(following)
        last = min(following, k.shape[1])
        yield slice(first * groups, last * groups), slice(first, last), gathered


def _start_gather(kv: KeyValues, plan: AttentionPlan, group: dist.ProcessGroup | None) -> Callable[[], KeyValues]:
    """Begin gathering ``[B, H, T, D]``; the returned function waits and gives ``[B, H, S, D]`` in order."""
    if group is None:
        return lambda: kv
    parts = kv.buffer.new_empty(group.size() * kv.buffer.numel())
    work = dist.all_gather_into_tensor(parts, kv.buffer, group=group, async_op=True)

    def finish() -> KeyValues:
        assert work is not None, "an asynchronous collective returns its work"
        work.wait()
        index = plan.ring_order(kv.buffer.device).places
        by_rank = parts.view(group.size(), -1).split([kv.k.numel(), kv.v.numel()], dim=1)
        k, v = (
            part.unflatten(1, x.shape).permute(1, 2, 0, 3, 4).flatten(2, 3).index_select(2, index)
            for part, x in zip(by_rank, (kv.k, kv.v), strict=True)
        )
        return KeyValues(k, k, v)

    return finish


def _scatter(
    full: KeyValues, into: tuple[Tensor, Tensor], plan: AttentionPlan, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Begin summing ``[B, H, S, D]`` over ranks; the returned function waits and writes this rank's tokens."""
    if group is None:
        for target, grad in zip(into, (full.k, full.v), strict=True):
            target.copy_(grad)
        return lambda: None
    index = plan.ring_order(full.k.device).tokens
    by_rank = [
        grad.index_select(2, index).unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4).flatten(1)
        for grad in (full.k, full.v)
    ]
    parts = torch.cat(by_rank, dim=1)
    mine = parts.new_empty(parts.shape[1])
    work = dist.reduce_scatter_tensor(mine, parts.flatten(), group=group, async_op=True)

    def finish() -> None:
        assert work is not None, "an asynchronous collective returns its work"
        work.wait()
        for target, part in zip(into, mine.split([target.numel() for target in into]), strict=True):
            target.copy_(part.view(target.shape))

    return finish
