"""Ring attention: keys travel round the ranks while each rank attends with its own queries.

Problem: a rank holds ``S/N`` tokens, but its queries need the keys of all earlier ones.

Idea: in step ``s`` rank ``r`` holds the keys and values of rank ``r - s``. It sends them on to ``r + 1``, receives
those of ``r - s - 1``, and meanwhile attends to the ones it has; partial results merge exactly through their
log-sum-exp. The backward goes round again: with the final output and log-sum-exp each block's gradients are exact and
independent, so dQ accumulates at home and dK, dV travel behind their keys, each rank adding its part, and at the end
go home.

    step s, forward      post  KV → r+1, KV ← r-1     attend to block r-s     wait
    step s, backward     post  KV → r+1, KV ← r-1     gradients of block r-s
                         wait for dKV(r-s) ← r-1, add, post dKV → r+1         wait for KV

So in the backward, too, both transfers run behind the next block's compute. Out, lse, dQ, dK and dV are float32
(float64 for float64 tensors) until the one rounding at the end: bfloat16 sums would drift with the number of hops.

Cost: see `titan_cp.planning.costs`. Where a sliding window reaches fewer ranks, the keys stop there and dK, dV go straight
home.

Limits: the ring needs every rank at every step. Keys travel to ranks that have no tile for them, too; where that is
most of them, `titan_cp.methods.direct` sends only the rest.

Source: Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from titan_cp.backends.backend import Backend, Grads, Saved
from titan_cp.backends.merge import add_sinks, sink_gradients
from titan_cp.differentiable import differentiable_once
from titan_cp.methods.rows import KeyValues, empty_rows, pack_rows, widen, zero_rows
from titan_cp.planning.costs import accumulator_dtype
from titan_cp.planning.plan import AttentionPlan
from titan_cp.planning.tiles import Tile

_KV_TAG, _GRAD_TAG = 0, 1
"""Keys and their gradients are in flight between the same two ranks at once; gloo tells them apart by tag."""


class RingSetup(NamedTuple):
    """What one call of the ring needs besides tensors."""

    plan: AttentionPlan
    group: dist.ProcessGroup | None
    """The ring's group; None for one rank."""
    backend: Backend
    scale: float


def ring_apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setup: RingSetup) -> Tensor:
    """Attention of this rank's queries ``[B, Hq, T, D]`` with all keys; arguments have been checked."""
    return _Ring.apply(q, k, v, sinks, setup)  # pyright: ignore[reportReturnType] - torch types apply as returning Any


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setup: RingSetup) -> Tensor:
        out, lse = _ring_forward(q, k, v, sinks, setup)
        ctx.setup = setup
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        *kept, sinks = ctx.saved_tensors
        saved = Saved(grad_outputs[0].contiguous(), *kept)
        return (*_ring_backward(saved, ctx.setup), sink_gradients_of(saved, sinks), None)


def _ring_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setup: RingSetup) -> tuple[Tensor, Tensor]:
    plan, group, backend, scale = setup
    out, lse = new_accumulators(q, v, backend)
    kv = pack_rows(k, v)
    spare = empty_rows(k, v, k.shape[2]) if plan.hops else kv
    for step in range(plan.hops + 1):
        with _span(f"cp ring hop {step}"):
            transfer = _send_on(kv.buffer, spare.buffer, group, 1, _KV_TAG) if step < plan.hops else []
            holder = (plan.ring_rank - step) % plan.ring_degree
            backend.forward(q, kv.k, widen(kv.v, backend, q.shape[-1]), plan.tiles(holder), scale, out, lse)
            wait_all(transfer)
        kv, spare = spare, kv
    if sinks is not None:
        add_sinks(out, lse, sinks)
    return finished(out, q, v), lse


def _ring_backward(saved: Saved, setup: RingSetup) -> tuple[Tensor, Tensor, Tensor]:
    plan, group, backend, scale = setup
    wide = accumulator_dtype(saved.q.dtype)
    grad_q = torch.zeros(saved.q.shape, dtype=wide, device=saved.q.device)
    rows = saved.k.shape[2]
    kv = pack_rows(saved.k, saved.v)
    spare = empty_rows(saved.k, saved.v, rows) if plan.hops else kv
    widened = widen_saved(saved, backend)
    # The gradient of the block at hand: ours is added to what the ranks before us have sent.
    arriving: KeyValues | None = None
    grad_transfer: list[dist.Work] = []
    grad_kv = kv
    for step in range(plan.hops + 1):
        with _span(f"cp ring hop {step} backward"):
            transfer = _send_on(kv.buffer, spare.buffer, group, 1, _KV_TAG) if step < plan.hops else []
            holder = (plan.ring_rank - step) % plan.ring_degree
            block_grad = block_gradients(widened, kv, backend, plan.tiles(holder), scale, grad_q)
            # Also ends the sending of the previous block's gradient, whose buffer is free from here on.
            wait_all(grad_transfer)
            if arriving is not None:
                block_grad.buffer.add_(arriving.buffer)
            grad_kv = block_grad
            if plan.hops:
                # The last one goes home, however far that is; after a full round home is the next rank.
                distance = 1 if step < plan.hops else -plan.hops
                arriving = empty_rows(saved.k, saved.v, rows, wide)
                grad_transfer = _send_on(grad_kv.buffer, arriving.buffer, group, distance, _GRAD_TAG)
            wait_all(transfer)
            kv, spare = spare, kv
    wait_all(grad_transfer)
    home = grad_kv if arriving is None else arriving
    return grad_q.to(saved.q.dtype), home.k.to(saved.k.dtype), home.v.to(saved.v.dtype)


def widen_saved(saved: Saved, backend: Backend) -> Saved:
    """What the backward of every block shares, as wide as the backend's kernels need it."""
    width = saved.q.shape[-1]
    return saved._replace(grad_out=widen(saved.grad_out, backend, width), out=widen(saved.out, backend, width))


def sink_gradients_of(saved: Saved, sinks: Tensor | None) -> Tensor | None:
    """`sink_gradients` of this rank's rows; None where there are no sinks."""
    return None if sinks is None else sink_gradients(saved.grad_out, saved.out, saved.lse, sinks)


def block_gradients(
    saved: Saved,
    kv: KeyValues,
    backend: Backend,
    tiles: Sequence[Tile],
    scale: float,
    grad_q: Tensor,
    grads: KeyValues | None = None,
) -> KeyValues:
    """The gradients of the keys and values of one block; those of the queries are added to ``grad_q``.

    With ``grads``, of the shape of ``kv`` and zero, they are written there.
    """
    grads = zero_rows(kv.k, kv.v, kv.k.shape[2], grad_q.dtype) if grads is None else grads
    v = widen(kv.v, backend, saved.q.shape[-1])
    grad_v = grads.v if v.shape == kv.v.shape else torch.zeros(v.shape, dtype=grad_q.dtype, device=v.device)
    backend.backward(saved._replace(k=kv.k, v=v), tiles, scale, Grads(grad_q, grads.k, grad_v))
    if grad_v is not grads.v:
        grads.v.copy_(grad_v[..., : kv.v.shape[-1]])
    return grads


def new_accumulators(q: Tensor, v: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of attention to no keys yet: zeros and -inf; ``out`` as wide as the backend's kernels make it."""
    wide = accumulator_dtype(q.dtype)
    channels = v.shape[-1] if backend.narrow_values else q.shape[-1]
    out = torch.zeros((*q.shape[:-1], channels), dtype=wide, device=q.device)
    return out, torch.full(q.shape[:-1], float("-inf"), dtype=wide, device=q.device)


def finished(out: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """The result that was accumulated in ``out``, in ``q``'s dtype and in the order of its memory.

    Tokens before heads, as projections give queries: the next layer then reads the tensor that attention keeps, not a copy.
    """
    out = out[..., : v.shape[-1]]
    if q.stride(1) >= q.stride(2):
        return out.to(q.dtype)
    batch, heads, tokens, channels = out.shape
    return q.new_empty(batch, tokens, heads, channels).transpose(1, 2).copy_(out)


def _send_on(
    send: Tensor, receive: Tensor, group: dist.ProcessGroup | None, distance: int, tag: int
) -> list[dist.Work]:
    """Post sending to the rank ``distance`` on and receiving from the one ``distance`` back, in the ring's numbers."""
    assert group is not None, "a ring of several ranks has a group"
    rank, size = group.rank(), group.size()
    # group_peer, not peer: a global rank would be another process wherever the group is part of the world.
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, group=group, tag=tag, group_peer=(rank + distance) % size),
            dist.P2POp(dist.irecv, receive, group=group, tag=tag, group_peer=(rank - distance) % size),
        ]
    )


def _span(name: str) -> AbstractContextManager[object]:
    """A block with a name in a trace; without a profiler, nothing."""
    return record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


def wait_all(works: list[dist.Work]) -> None:
    """Wait for every transfer."""
    for work in works:
        work.wait()
