"""How documents are cut over ranks, seen by a layer that carries a state from token to token.

Problem: a state layer reads a document from its first token to its last. A rank holds pieces of documents, in the order of
its layout; a piece that does not begin its document needs the state at the end of the piece before it, on another rank.

Idea: a rank's tokens are *runs*. Within a run documents follow each other whole, so only its first piece can be *continued*
(its document began elsewhere) and only its last can be *open* (its document goes on elsewhere). Each open run has a slot
in what ranks exchange forward, each continued run has one in what they exchange backward. A `Fold` walks the slots of a
document in order: forward for the states that this rank begins with, backward for the gradients of those it ends with.

Cost: array operations on the pieces; a rank's fold has as many steps as its documents have pieces before it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_cp.planning.ranges import Ranges, piece_arrays


class Run(NamedTuple):
    """Local rows ``[start, stop)`` within which documents follow each other whole."""

    start: int
    stop: int
    continued: int | None
    """Slot of its first piece, if that does not begin its document."""
    open: int | None
    """Slot of its last piece, if that does not end its document."""


class FoldStep(NamedTuple):
    """One step along all chains that are not done: the first ``len(slots)`` of them."""

    slots: tuple[int, ...]
    """Of each chain, the slot (``rank · slots a rank + slot``) to go through."""
    ready: tuple[int, ...]
    """Chains whose state is asked for after this step."""
    into: tuple[int, ...]
    """The local slots that those states are for."""


class DocumentPieces(NamedTuple):
    """One rank's runs, and what it exchanges with the others."""

    runs: tuple[Run, ...]
    documents: tuple[int, ...]
    """Of each piece in turn, its length: where a state is reset."""
    open_slots: int
    """Open runs of the rank that has most; 0 if no document is cut."""
    continued_slots: int
    """Continued runs of the rank that has most."""
    forward: tuple[FoldStep, ...]
    backward: tuple[FoldStep, ...]

    def own_slots(self, name: str) -> int:
        """How many of its slots this rank uses; ``name`` is ``open`` or ``continued``."""
        return sum(getattr(run, name) is not None for run in self.runs)


def plan_pieces(ranges: Sequence[Ranges], cu_seqlens: Sequence[int], rank: int) -> DocumentPieces:
    """The pieces of ``rank``, where rank ``r`` holds ``ranges[r]``."""
    owner, document, start, stop, length = piece_arrays(ranges, cu_seqlens)
    size = len(ranges)
    continued, ends_open = start > 0, stop < length
    in_slot, in_slots = _slots(owner, continued, size)
    out_slot, out_slots = _slots(owner, ends_open, size)
    order = np.lexsort((start, document))
    # pieces of a document in order: all but the last are open, all but the first continued
    opens, follows = order[ends_open[order]], order[continued[order]]
    forward = _fold(document, owner * out_slots + out_slot, opens, follows, owner, in_slot, rank)
    backward = _fold(document, owner * in_slots + in_slot, follows[::-1], opens[::-1], owner, out_slot, rank)
    own = np.flatnonzero(owner == rank)
    return DocumentPieces(
        runs=_runs(stop[own] - start[own], continued[own], ends_open[own], in_slot[own], out_slot[own]),
        documents=tuple((stop[own] - start[own]).tolist()),
        open_slots=out_slots,
        continued_slots=in_slots,
        forward=forward,
        backward=backward,
    )


def _slots(owner: NDArray[np.int64], chosen: NDArray[np.bool_], size: int) -> tuple[NDArray[np.int64], int]:
    """The number of each chosen piece among those of its rank, and the most that a rank has."""
    number = np.cumsum(chosen)
    first = np.searchsorted(owner, np.arange(size + 1))
    before = np.concatenate([[0], number])[first]
    return number - 1 - before[owner], int(np.diff(before).max())


def _runs(
    rows: NDArray[np.int64],
    continued: NDArray[np.bool_],
    ends_open: NDArray[np.bool_],
    in_slot: NDArray[np.int64],
    out_slot: NDArray[np.int64],
) -> tuple[Run, ...]:
    begins = continued | np.concatenate([[True], ends_open[:-1]])
    first = np.flatnonzero(begins)
    last = np.concatenate([first[1:], [len(rows)]]) - 1
    ends = np.cumsum(rows)
    return tuple(
        Run(
            int(ends[a] - rows[a]),
            int(ends[b]),
            int(in_slot[a]) if continued[a] else None,
            int(out_slot[b]) if ends_open[b] else None,
        )
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    )


def _fold(
    document: NDArray[np.int64],
    slot: NDArray[np.int64],
    path: NDArray[np.int64],
    askers: NDArray[np.int64],
    owner: NDArray[np.int64],
    own_slot: NDArray[np.int64],
    rank: int,
) -> tuple[FoldStep, ...]:
    """Steps along ``path``; the piece ``askers[n]`` asks for the state after ``path[n]``. Both go document by document."""
    if not len(path):
        return ()
    starts = np.flatnonzero(np.diff(document[path], prepend=-1))
    chain = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(path)))
    depth = np.arange(len(path)) - starts[chain]
    mine = owner[askers] == rank
    # only as far as this rank asks, the longest chain first, so that those not done are always the first ones
    wanted = np.zeros(len(starts), dtype=np.int64)
    np.maximum.at(wanted, chain[mine], depth[mine] + 1)
    place = np.empty(len(starts), dtype=np.int64)
    place[np.argsort(-wanted, kind="stable")] = np.arange(len(starts))
    steps: list[FoldStep] = []
    for step in range(int(wanted.max())):
        at = np.flatnonzero((depth == step) & (wanted[chain] > step))
        at = at[np.argsort(place[chain[at]])]
        asked = at[mine[at]]
        steps.append(
            FoldStep(
                tuple(slot[path[at]].tolist()),
                tuple(place[chain[asked]].tolist()),
                tuple(own_slot[askers[asked]].tolist()),
            )
        )
    return tuple(steps)
