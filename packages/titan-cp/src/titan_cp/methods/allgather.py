"""All-gather attention: each rank gathers the keys of all, a few heads at a time.

Problem: a kernel with a mask of its own (FlexAttention), or one call over long keys, wants the whole sequence's keys at
once; gathering all heads costs O(S) memory.

Idea: heads are independent, so gather a few KV heads while attending with those before. The peak is O(S) for those heads
only. The backward gathers again, and reduce-scatters dK, dV in float32, again one group behind the compute. A token's keys
and values lie together, so that the ranks' parts join without a copy, and one copy puts them in the sequence's order. Where a
few ranks gather all heads at once there is no attention before it to hide the transfer: a rank attends to its own keys
meanwhile, and then to the others' as they lie, rank by rank.

Cost: (N-1) hops' worth of keys, as the ring, in one collective a head group; see `titan_cp.planning.costs`, which also says
how many heads are gathered at a time.

Source: the head-pipelined all-gather of Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.backends.backend import Backend, Saved
from titan_cp.backends.merge import add_sinks
from titan_cp.differentiable import differentiable_once
from titan_cp.methods.ring import block_gradients, finished, new_accumulators, sink_gradients_of, widen_saved
from titan_cp.methods.rows import KeyValues, pack_tokens, token_rows, widen, zero_tokens
from titan_cp.planning.costs import accumulator_dtype, gathers_by_rank
from titan_cp.planning.plan import AttentionPlan
from titan_cp.planning.tiles import Tiles


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
        backend, scale = setup.backend, setup.scale
        out, lse = new_accumulators(q, v, backend)
        for q_heads, _, blocks in _gathered_heads(q, k, v, setup):
            for kv, tiles, _ in blocks:
                wide_v = widen(kv.v, backend, q.shape[-1])
                backend.forward(q[:, q_heads], kv.k, wide_v, tiles, scale, out[:, q_heads], lse[:, q_heads])
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = finished(out, q, v)
        ctx.setup = setup
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        setup: GatherSetup = ctx.setup
        *kept, sinks = ctx.saved_tensors
        saved = Saved(grad_outputs[0], *kept)
        q, k, v = saved.q, saved.k, saved.v
        grad_q = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)
        grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
        widened = widen_saved(saved, setup.backend)
        pending: Callable[[], None] | None = None
        for q_heads, kv_heads, blocks in _gathered_heads(q, k, v, setup):
            block = Saved(
                widened.grad_out[:, q_heads], q[:, q_heads], k, v, widened.out[:, q_heads], widened.lse[:, q_heads]
            )
            into = grad_k[:, kv_heads], grad_v[:, kv_heads]
            full = zero_tokens(*into, setup.plan.pad_to, grad_q.dtype)
            for kv, tiles, rows in blocks:
                part = token_rows(full.buffer[rows], kv.k, kv.v)
                block_gradients(block, kv, setup.backend, tiles, setup.scale, grad_q[:, q_heads], part)
            if pending is not None:
                pending()
            pending = _scatter(full, into, setup.plan, setup.group, by_rank=_by_rank(setup))
        assert pending is not None, "there is at least one KV head"
        pending()
        return grad_q.to(q.dtype), grad_k, grad_v, sink_gradients_of(saved, sinks), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.group = plan, group
        kv = token_rows(_in_order(_start_gather(k, v, group)(), plan), k, v)
        return kv.k.contiguous(), kv.v.contiguous()  # an attention of one's own may want to view them

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grads = [grad.to(accumulator_dtype(grad.dtype)) for grad in grad_outputs]
        local = tuple(
            grad.new_empty((*grad.shape[:2], grad.shape[2] // ctx.plan.size, grad.shape[3])) for grad in grad_outputs
        )
        _scatter(pack_tokens(grads[0], grads[1]), (local[0], local[1]), ctx.plan, ctx.group)()
        return local[0], local[1], None, None


class _Block(NamedTuple):
    """Keys and values to attend to, and which."""

    kv: KeyValues
    tiles: Tiles
    rows: slice
    """Their places among all that are gathered."""


def _by_rank(setup: GatherSetup) -> bool:
    """Whether keys are attended to rank by rank, this rank's own first, instead of in the sequence's order."""
    return setup.group is not None and gathers_by_rank(setup.plan.size, setup.plan.num_kv_heads, setup.heads_per_step)


def _gathered_heads(
    q: Tensor, k: Tensor, v: Tensor, setup: GatherSetup
) -> Iterator[tuple[slice, slice, Iterator[_Block]]]:
    """Yield ``(query heads, KV heads, blocks)`` a group of heads at a time, the next group already in flight."""
    groups, plan = q.shape[1] // k.shape[1], setup.plan

    def start(first: int) -> Callable[[], Tensor]:
        heads = slice(first, first + setup.heads_per_step)
        return _start_gather(k[:, heads], v[:, heads], setup.group)

    def in_order(parts: Tensor, heads: slice) -> Iterator[_Block]:
        kv = token_rows(_in_order(parts, plan), k[:, heads], v[:, heads])
        yield _Block(kv, plan.sequence_tiles(), slice(None))

    def rank_by_rank(arrive: Callable[[], Tensor]) -> Iterator[_Block]:
        rows = [slice(r * plan.ring_len, (r + 1) * plan.ring_len) for r in range(plan.size)]
        yield _Block(KeyValues(k, k, v), plan.tiles(plan.rank), rows[plan.rank])
        parts = arrive()
        for r in range(plan.size):
            if r != plan.rank and plan.tiles(r):
                yield _Block(token_rows(parts[rows[r]], k, v), plan.tiles(r), rows[r])

    ready = start(0)
    if _by_rank(setup):
        yield slice(None), slice(None), rank_by_rank(ready)
        return
    for first in range(0, k.shape[1], setup.heads_per_step):
        gathered = ready()
        following = first + setup.heads_per_step
        if following < k.shape[1]:
            ready = start(following)
        last = min(following, k.shape[1])
        yield slice(first * groups, last * groups), slice(first, last), in_order(gathered, slice(first, last))


def _start_gather(k: Tensor, v: Tensor, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Begin gathering ``[B, H, T, D]``; the returned function waits and gives the ranks' `token_rows` end to end."""
    own = pack_tokens(k, v).buffer
    if group is None:
        return lambda: own
    parts = own.new_empty((group.size() * own.shape[0], own.shape[1]))
    work = dist.all_gather_into_tensor(parts, own, group=group, async_op=True)

    def finish() -> Tensor:
        assert work is not None, "an asynchronous collective returns its work"
        work.wait()
        return parts

    return finish


def _in_order(parts: Tensor, plan: AttentionPlan) -> Tensor:
    """The rows of all ranks in the sequence's order."""
    if plan.size == 1 or plan.layout == "contiguous":
        return parts
    return parts.index_select(0, plan.ring_order(parts.device).places)


def _scatter(
    full: KeyValues,
    into: tuple[Tensor, Tensor],
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    *,
    by_rank: bool = False,
) -> Callable[[], None]:
    """Begin summing `token_rows` over ranks; the returned function waits and writes this rank's tokens."""
    if group is None:
        for target, grad in zip(into, (full.k, full.v), strict=True):
            target.copy_(grad)
        return lambda: None
    parts = full.buffer
    if not by_rank and plan.layout != "contiguous":
        parts = parts.index_select(0, plan.ring_order(parts.device).tokens)
    # gloo's reduce-scatter takes three times the processor time of sending each rank its rows and adding them there.
    exchanged = parts.device.type == "cpu"
    if exchanged:
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=group, async_op=True)
    else:
        received = parts.new_empty((parts.shape[0] // group.size(), parts.shape[1]))
        work = dist.reduce_scatter_tensor(received, parts, group=group, async_op=True)

    def finish() -> None:
        assert work is not None, "an asynchronous collective returns its work"
        work.wait()
        mine, *others = received.chunk(group.size() if exchanged else 1)
        for other in others:
            mine.add_(other)
        part = token_rows(mine, *into)
        for target, grad in zip(into, (part.k, part.v), strict=True):
            target.copy_(grad)

    return finish
