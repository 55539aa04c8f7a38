"""Ring attention without the ring: only the keys that a rank's queries see, straight from the rank that holds them.

Problem: the ring sends every key to every rank. With packed documents or a window most of them are for nothing: of
1,047 documents on 64 ranks, a rank needs about one key in a hundred.

Idea: the plan knows which rows each rank's queries see (`titan_cp.planning.exchange`). They come in rounds; while the
rows of one round travel, the rank attends to those of the round before, and first to its own. The backward fetches the
same rows again and sends their gradients back the way they came. Numerics are the ring's: float32 sums, one rounding.

    forward      post round 0     attend to own keys       wait, post round 1     attend to round 0     …
    backward     post round 0     gradients of own keys    wait, post round 1     gradients of round 0
                                                           post these gradients home                    …

Every rank has the same rounds and posts its transfers in the same order, as NCCL demands.

Cost: bytes are the bound, each row once for each rank that sees it; see `titan_cp.planning.costs`.

Limits: ranks far from each other talk directly. Where most rows are needed everywhere, the ring is kinder to a network.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.backends.backend import Saved
from titan_cp.backends.merge import add_sinks
from titan_cp.differentiable import differentiable_once
from titan_cp.methods.ring import (
    RingSetup,
    block_gradients,
    finished,
    new_accumulators,
    sink_gradients_of,
    wait_all,
    widen_saved,
)
from titan_cp.methods.rows import KeyValues, empty_rows, pack_rows, place_rows, widen
from titan_cp.planning.costs import accumulator_dtype
from titan_cp.planning.exchange import Round
from titan_cp.planning.ranges import Ranges

_KV_TAG, _GRAD_TAG = 2, 3
"""Keys and gradients may be in flight between the same two ranks at once; gloo tells them apart by tag."""


def direct_apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setup: RingSetup) -> Tensor:
    """Attention of this rank's queries ``[B, Hq, T, D]`` with the keys they see; arguments have been checked."""
    return _Direct.apply(q, k, v, sinks, setup)  # pyright: ignore[reportReturnType] - torch types apply as returning Any


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setup: RingSetup) -> Tensor:
        plan, _, backend, scale = setup
        out, lse = new_accumulators(q, v, backend)
        own = KeyValues(k, k, v)
        for index, kv in _blocks(own, setup):
            tiles = plan.tiles(plan.ring_rank) if index is None else plan.round_tiles(index)
            backend.forward(q, kv.k, widen(kv.v, backend, q.shape[-1]), tiles, scale, out, lse)
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = finished(out, q, v)
        ctx.setup = setup
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        setup: RingSetup = ctx.setup
        plan, group, backend, scale = setup
        *kept, sinks = ctx.saved_tensors
        saved = Saved(grad_outputs[0].contiguous(), *kept)
        q, k, v = saved.q, saved.k, saved.v
        grad_q = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)
        widened = widen_saved(saved, backend)
        home: KeyValues | None = None
        returning: RowTransfer | None = None
        for index, kv in _blocks(KeyValues(k, k, v), setup):
            tiles = plan.tiles(plan.ring_rank) if index is None else plan.round_tiles(index)
            grads = block_gradients(widened, kv, backend, tiles, scale, grad_q)
            if index is None:
                home = grads
                continue
            assert home is not None, "its own keys come first"
            assert group is not None, "rounds exist only between ranks"
            if returning is not None:
                returning.finish(home)
            this = plan.rounds[index]
            # What came from a rank goes back there; what went to a rank comes back from there.
            returning = RowTransfer(grads, this.receives, this.sends, group, _GRAD_TAG)
        assert home is not None, "a rank has keys of its own"
        if returning is not None:
            returning.finish(home)
        return grad_q.to(q.dtype), home.k.to(k.dtype), home.v.to(v.dtype), sink_gradients_of(saved, sinks), None


def _blocks(own: KeyValues, setup: RingSetup) -> Iterator[tuple[int | None, KeyValues]]:
    """The rank's own keys, then those of each round, which may be none; the next round is in flight meanwhile."""
    rounds, group = setup.plan.rounds, setup.group
    pending = _fetch(own, rounds[0], group) if rounds else None
    yield None, own
    for index, this in enumerate(rounds):
        assert pending is not None, "each round is posted before the one before it is computed"
        rows = sum(stop - start for start, stop in this.tokens)
        received = empty_rows(own.k, own.v, rows)
        pending.finish(received, add=False)
        pending = _fetch(own, rounds[index + 1], group) if index + 1 < len(rounds) else None
        yield index, received


def _fetch(own: KeyValues, this: Round, group: dist.ProcessGroup | None) -> "RowTransfer":
    assert group is not None, "rounds exist only between ranks"
    return RowTransfer(own, this.sends, this.receives, group, _KV_TAG)


class RowTransfer:
    """Rows on their way: posted when made, waited for and placed by `finish`."""

    def __init__(
        self,
        source: KeyValues,
        sends: tuple[tuple[int, Ranges], ...],
        receives: tuple[tuple[int, Ranges], ...],
        group: dist.ProcessGroup,
        tag: int,
    ) -> None:
        self._arriving: list[tuple[Ranges, KeyValues]] = []
        self._leaving = [(peer, pack_rows(source.k, source.v, rows)) for peer, rows in sends]
        operations = [dist.P2POp(dist.isend, kv.buffer, group=group, tag=tag, group_peer=p) for p, kv in self._leaving]
        for peer, rows in receives:
            kv = empty_rows(source.k, source.v, sum(stop - start for start, stop in rows))
            self._arriving.append((rows, kv))
            operations.append(dist.P2POp(dist.irecv, kv.buffer, group=group, tag=tag, group_peer=peer))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def finish(self, into: KeyValues, *, add: bool = True) -> None:
        """Wait, then add what arrived to its rows of ``into``, or write it there."""
        wait_all(self._works)
        for rows, kv in self._arriving:
            place_rows(kv, into.k, into.v, rows, add=add)
        self._leaving.clear()
