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

Limits: the ring needs every rank at every step. Keys travel to ranks that have no tile for them, too.

Source: Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889).
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.backends.backend import Backend, Grads, Saved
from titan_cp.planning.costs import accumulator_dtype
from titan_cp.planning.plan import AttentionPlan

_KV_TAG, _GRAD_TAG = 0, 1
"""Keys and their gradients are in flight between the same two ranks at once; gloo tells them apart by tag."""


class RingSetup(NamedTuple):
    """What one call of the ring needs besides tensors."""

    plan: AttentionPlan
    group: dist.ProcessGroup | None
    """The ring's group; None for one rank."""
    backend: Backend
    scale: float


def ring_apply(q: Tensor, k: Tensor, v: Tensor, setup: RingSetup) -> Tensor:
    """Attention of this rank's queries ``[B, Hq, T, D]`` with all keys; arguments have been checked."""
    return _Ring.apply(q, k, v, setup)  # pyright: ignore[reportReturnType] - torch types apply as returning Any


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, setup: RingSetup) -> Tensor:
        out, lse = _ring_forward(q, k, v, setup)
        ctx.setup = setup
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved = Saved(grad_outputs[0].contiguous(), *ctx.saved_tensors)
        return (*_ring_backward(saved, ctx.setup), None)


def _ring_forward(q: Tensor, k: Tensor, v: Tensor, setup: RingSetup) -> tuple[Tensor, Tensor]:
    plan, group, backend, scale = setup
    out, lse = new_accumulators(q)
    kv = torch.stack([k, v])
    spare = torch.empty_like(kv) if plan.hops else kv
    for step in range(plan.hops + 1):
        transfer = _send_on(kv, spare, group, 1, _KV_TAG) if step < plan.hops else []
        holder = (plan.ring_rank - step) % plan.ring_degree
        backend.forward(q, kv[0], kv[1], plan.tiles(holder), scale, out, lse)
        _wait(transfer)
        kv, spare = spare, kv
    return out.to(q.dtype), lse


def _ring_backward(saved: Saved, setup: RingSetup) -> tuple[Tensor, Tensor, Tensor]:
    plan, group, backend, scale = setup
    wide = accumulator_dtype(saved.q.dtype)
    grad_q = torch.zeros(saved.q.shape, dtype=wide, device=saved.q.device)
    kv = torch.stack([saved.k, saved.v])
    spare = torch.empty_like(kv) if plan.hops else kv
    # The gradient of the block at hand: ours is added to what the ranks before us have sent.
    arriving: Tensor | None = None
    grad_transfer: list[dist.Work] = []
    grad_kv = torch.empty(0)
    for step in range(plan.hops + 1):
        transfer = _send_on(kv, spare, group, 1, _KV_TAG) if step < plan.hops else []
        holder = (plan.ring_rank - step) % plan.ring_degree
        block_grad = torch.zeros(kv.shape, dtype=wide, device=kv.device)
        block = saved._replace(k=kv[0], v=kv[1])
        backend.backward(block, plan.tiles(holder), scale, Grads(grad_q, block_grad[0], block_grad[1]))
        # Also ends the sending of the previous block's gradient, whose buffer is free from here on.
        _wait(grad_transfer)
        grad_kv = block_grad if arriving is None else block_grad.add_(arriving)
        if plan.hops:
            # The last one goes home, however far that is; after a full round home is the next rank.
            distance = 1 if step < plan.hops else -plan.hops
            arriving = torch.empty_like(grad_kv)
            grad_transfer = _send_on(grad_kv, arriving, group, distance, _GRAD_TAG)
        _wait(transfer)
        kv, spare = spare, kv
    _wait(grad_transfer)
    home = grad_kv if arriving is None else arriving
    return grad_q.to(saved.q.dtype), home[0].to(saved.k.dtype), home[1].to(saved.v.dtype)


def new_accumulators(q: Tensor) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of attention to no keys yet: zeros and -inf."""
    wide = accumulator_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    return out, torch.full(q.shape[:-1], float("-inf"), dtype=wide, device=q.device)


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


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
