"""The scan over ranks: from the map of each cut run to the state that each continued run begins with.

Problem: a document cut over ranks is one chain of states, ``h' = M h + S`` for each piece. Passing states from rank to rank
would make the ranks compute in turn.

Idea: each rank computes ``M`` and ``S`` of its open runs at once, without knowing ``h``; one all-gather of these, and each
rank walks the chains as far as its own pieces. The gradients are a scan of the same kind from the end of the document:
``dh = Mᵀ dh' + D``, with ``D`` what a piece's own outputs ask of its first state; then ``dS = dh'`` and ``dM = dh' hᵀ``.

Cost: each way ``(ranks - 1) · slots · H (m + K V)`` accumulators a rank and batch row, independent of length; ``m`` is
``K²`` with the delta rule, ``K`` with a decay per channel, 1 with one per head. Slots are the cut runs of the rank that
has most: 1 for ``contiguous``, 2 for ``zigzag``, none where no document is cut.

Limits: a layout that cuts every document (``per_document``, ``block``) has as many slots as documents.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.differentiable import differentiable_once
from titan_cp.planning.plan import AttentionPlan
from titan_cp.planning.tokens import to_device
from titan_cp.state.pieces import DocumentPieces, FoldStep


class ScanSetup(NamedTuple):
    """What one scan needs besides tensors."""

    plan: AttentionPlan
    pieces: DocumentPieces
    group: dist.ProcessGroup | None


def scan_states(keep: Tensor, state: Tensor, setup: ScanSetup, anchors: Sequence[Tensor]) -> Tensor:
    """The first states of this rank's continued runs.

    Args:
        keep: ``M`` of the open runs, ``[slots, B, H, K, K]``, or ``[slots, B, H, K or 1, 1]`` for a decay.
        state: ``S`` of the open runs, ``[slots, B, H, K, V]``.
        setup: The plan, its pieces and the group.
        anchors: The layer's inputs. A rank without an open run has no other tensor with a gradient, but must take part in
            the backward.

    Returns:
        ``[slots, B, H, K, V]``, differentiable once.
    """
    return _Scan.apply(keep, state, setup, *anchors)  # pyright: ignore[reportReturnType] - torch types apply as Any


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keep: Tensor, state: Tensor, setup: ScanSetup, *anchors: Tensor) -> Tensor:
        pieces = setup.pieces
        gathered = _gather(keep, state, pieces.open_slots, setup)
        first = _walk(*gathered, pieces.forward, pieces.own_slots("continued"), setup, "forward")
        ctx.setup, ctx.anchors = setup, len(anchors)
        ctx.save_for_backward(keep, first)
        return first

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        setup: ScanSetup = ctx.setup
        pieces = setup.pieces
        keep, first = ctx.saved_tensors
        asked = grad_outputs[0]
        both = [(run.continued, run.open) for run in pieces.runs if run.continued is not None and run.open is not None]
        through = keep.new_zeros((first.shape[0], *keep.shape[1:]))
        for continued, opened in both:
            through[continued] = keep[opened]
        maps, asks = _gather(
            through.transpose(-1, -2) if _is_matrix(keep) else through, asked, pieces.continued_slots, setup
        )
        grad_state = _walk(maps, asks, pieces.backward, pieces.own_slots("open"), setup, "backward")
        grad_keep = torch.zeros_like(keep)
        for continued, opened in both:
            grad, h = grad_state[opened], first[continued]
            grad_keep[opened] = (
                grad @ h.transpose(-1, -2) if _is_matrix(keep) else (grad * h).sum_to_size(keep.shape[1:])
            )
        return (grad_keep, grad_state, None, *[None] * ctx.anchors)


def _is_matrix(keep: Tensor) -> bool:
    """Whether the map is a matrix; a decay has a last dim of 1 (with one channel both are the same)."""
    return keep.shape[-1] > 1


def _gather(keep: Tensor, state: Tensor, slots: int, setup: ScanSetup) -> tuple[Tensor, Tensor]:
    """Of all ranks, slot by slot: ``[ranks · slots, …]`` each."""
    if setup.group is None:
        return keep, state
    own = torch.cat([keep.flatten(1), state.flatten(1)], dim=1)
    if len(own) < slots:
        own = torch.nn.functional.pad(own, (0, 0, 0, slots - len(own)))
    every = own.new_empty((setup.group.size() * slots, own.shape[1]))
    dist.all_gather_into_tensor(every, own.contiguous(), group=setup.group)
    sizes = [keep.shape[1:].numel(), state.shape[1:].numel()]
    maps, states = every.split(sizes, dim=1)
    return maps.unflatten(1, keep.shape[1:]), states.unflatten(1, state.shape[1:])


def _walk(maps: Tensor, states: Tensor, steps: Sequence[FoldStep], slots: int, setup: ScanSetup, way: str) -> Tensor:
    """Fold the chains; the states asked for on the way."""
    out = states.new_zeros((slots, *states.shape[1:]))
    value = states.new_zeros((0, *states.shape[1:]))
    for number, step in enumerate(steps):
        at, ready, into = setup.plan.index_once(
            ("state scan", way, number, states.device),
            lambda step=step: tuple(to_device(torch.tensor(x, dtype=torch.int64), states.device) for x in step),
        )
        here = states[at]
        if number:
            before, keep = value[: len(at)], maps[at]
            here = here + (keep @ before if _is_matrix(maps) else keep * before)
        value = here
        if len(ready):
            out[into] = value[ready]
    return out
