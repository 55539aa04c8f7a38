"""Tiles: one step's mask, as a few rectangles and staircases.

Problem: in ring attention rank ``i`` meets the keys of rank ``j``. Which of its tokens see which keys depends on the
layout, the documents, the causal mask and the window; a dense mask of that would cost O(S²/N²) memory and no kernel
skips its empty parts.

Idea: within a document, both ranks hold their tokens in ascending position. A query at position ``t`` therefore sees
one *contiguous* run of the local keys, ``[lo(t), hi(t))``, and as ``t`` grows each bound stands still or moves on by
one. Rows over which both bounds keep their behaviour form one tile, of four kinds:

    hi stands, lo stands  full rectangle
    hi moves,  lo stands  causal staircase, aligned to the bottom right corner (as in FlashAttention)
    hi moves,  lo moves   band of constant width (sliding window)
    hi stands, lo moves   the window's trailing edge

Every query row lies in at most one tile, and no tile has an empty row, so no kernel is ever asked about a row without
keys (CPU flash answers log-sum-exp 0 there, where -inf is right).

How: with ``K(x)`` the number of local keys below token ``x``, ``hi(t) = K(t + ahead)`` and ``lo(t) = K(t - behind)``, both
kept inside the document. ``K`` bends only where a key piece begins or ends, so the query pieces are cut there, and from one
row to the next both bounds do the same until the next cut. Runs of equal steps become tiles.

Cost: array operations on the pieces of both ranks, and one Python object per tile.
"""

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from titan_cp.planning.ranges import Ranges, piece_arrays

_FAKE = "in the newest fake mode"


class Tile(NamedTuple):
    """One kernel call: local query rows ``[q_start, q_stop)`` against local key rows ``[k_start, k_stop)``."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False
    """The upper bound moves: row ``r`` sees columns below ``k_len - q_len + 1 + r`` (bottom-right aligned)."""
    sliding: bool = False
    """The lower bound moves: row ``r`` sees columns from ``r`` on."""

    @property
    def q_len(self) -> int:
        """Query rows."""
        return self.q_stop - self.q_start

    @property
    def k_len(self) -> int:
        """Key rows."""
        return self.k_stop - self.k_start

    @property
    def pairs(self) -> int:
        """Unmasked query-key pairs."""
        triangle = self.q_len * (self.q_len - 1) // 2
        return self.q_len * self.k_len - triangle * (self.causal + self.sliding)

    def mask(self, device: torch.device | str = "cpu", rows: tuple[int, int] | None = None) -> Tensor:
        """The boolean mask, True where a query sees a key, shape ``[q_len, k_len]`` (or only ``rows`` of it)."""
        first, last = rows or (0, self.q_len)
        row = torch.arange(first, last, device=device)[:, None]
        column = torch.arange(self.k_len, device=device)[None, :]
        high = self.k_len - self.q_len + 1 + row if self.causal else torch.full_like(row, self.k_len)
        low = row if self.sliding else torch.zeros_like(row)
        return (column >= low) & (column < high)


class Tiles(tuple[Tile, ...]):
    """The tiles of one block of keys, as `plan_tiles` makes them. They last as long as their plan."""

    def once(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """What ``build`` makes of these tiles, built at the first call with ``key``: the same in every layer."""
        return build_once(cast(dict[Hashable, Any], self.__dict__), key, build)


def plan_tiles(
    q_ranges: Ranges, k_ranges: Ranges, cu_seqlens: Sequence[int], *, causal: bool, window: int | None
) -> Tiles:
    """The tiles of one rank's queries against one rank's keys, in local row numbers, ordered by query row.

    Args:
        q_ranges: Tokens of the rank that holds the queries.
        k_ranges: Tokens of the rank that holds the keys.
        cu_seqlens: Document boundaries, in tokens.
        causal: Whether a token attends only to itself and earlier tokens.
        window: A token attends to tokens less than ``window`` away; None for no limit.

    Returns:
        Tiles that cover each attended pair exactly once, and no other pair.
    """
    runs = _visible_runs(q_ranges, k_ranges, cu_seqlens, causal, window)
    if not len(runs.row):
        return Tiles()
    first, count = _longest_alike(runs)
    row, lo, hi = _rows_at(runs, first)
    _, last_lo, last_hi = _rows_at(runs, first + count - 1)
    columns = (row, row + count, lo, last_hi, last_hi > hi, last_lo > lo)
    return Tiles(map(Tile._make, zip(*(column.tolist() for column in columns), strict=True)))


class _Runs(NamedTuple):
    """Runs of query rows that see keys, ascending; within a run both bounds move by the same step."""

    row: NDArray[np.int64]
    """First local row."""
    rows: NDArray[np.int64]
    lo: NDArray[np.int64]
    """Of the first row."""
    hi: NDArray[np.int64]
    lo_step: NDArray[np.int64]
    hi_step: NDArray[np.int64]


def _visible_runs(
    q_ranges: Ranges, k_ranges: Ranges, cu_seqlens: Sequence[int], causal: bool, window: int | None
) -> _Runs:
    q_start, q_stop, begin, end = _tokens(q_ranges, cu_seqlens)
    k_start, k_stop, _, _ = _tokens(k_ranges, cu_seqlens)
    # hi(t) = K(t + ahead), lo(t) = K(t - behind); None where that bound does not depend on t
    ahead = 1 if causal else window
    behind = None if window is None else window - 1
    shifts = [s for s in (ahead, None if behind is None else -behind) if s is not None]
    edges = [edge - s for s in shifts for edge in (k_start, k_stop, begin, end)]
    cuts = np.sort(np.concatenate([q_start, q_stop, *edges, *(edge + 1 for edge in edges)]))
    piece = np.searchsorted(q_start, cuts[:-1], side="right") - 1
    held = (piece >= 0) & (cuts[:-1] < q_stop[piece]) & (cuts[:-1] < cuts[1:])
    start, stop, piece = cuts[:-1][held], cuts[1:][held], piece[held]

    def bounds(t: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        low, high = begin[piece], end[piece]
        lo = low if behind is None else np.maximum(t - behind, low)
        hi = high if ahead is None else np.minimum(t + ahead, high)
        return _keys_below(lo, k_start, k_stop), _keys_below(hi, k_start, k_stop)

    lo, hi = bounds(start)
    next_lo, next_hi = bounds(np.minimum(start + 1, stop - 1))
    row = start - q_start[piece] + (np.cumsum(q_stop - q_start) - (q_stop - q_start))[piece]
    columns = (row, stop - start, lo, hi, next_lo - lo, next_hi - hi)
    return _Runs(*(column[hi > lo] for column in columns))


def _tokens(ranges: Ranges, cu_seqlens: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
    """DocumentPieces of documents, as tokens of the sequence: first, last + 1, and those of the whole document."""
    _, document, start, stop, length = piece_arrays((ranges,), cu_seqlens)
    begin = np.asarray(cu_seqlens, dtype=np.int64)[document]
    return begin + start, begin + stop, begin, begin + length


def _keys_below(token: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the held keys lie below each token."""
    rows = np.concatenate([[0], np.cumsum(stop - start)])
    piece = np.searchsorted(start, token, side="right")
    return rows[piece] - np.maximum(np.concatenate([[0], stop])[piece] - token, 0)


def _rows_at(runs: _Runs, number: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Local row, ``lo`` and ``hi`` of visible rows, given their numbers among the visible ones."""
    begins = np.cumsum(runs.rows) - runs.rows
    at = np.searchsorted(begins, number, side="right") - 1
    inside = number - begins[at]
    return runs.row[at] + inside, runs.lo[at] + runs.lo_step[at] * inside, runs.hi[at] + runs.hi_step[at] * inside


def _longest_alike(runs: _Runs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each tile's first row, as a number among the visible ones, and its count: always as many rows as go on alike.

    A step leads from a visible row to the next. A tile takes all steps of one kind that follow each other; the step after
    them leads out of it, to the next tile's first row.
    """
    kind, count = _steps(runs)
    number = np.arange(len(kind))
    starts = np.cumsum(count) - count
    # The way out uses up a step of the next group. A group of one is then gone, and the next tile has all of the group
    # behind it: of several groups of one in a row, every second is used.
    fresh = np.concatenate([[True], kind[:-1] < 0])  # behind a break no step was used
    follows = np.concatenate([[False], count[:-1] == 1]) & ~fresh
    since = np.maximum.accumulate(np.where(follows, 0, number))
    used = ~fresh[since] ^ ((number - since) % 2 == 1)
    made = count > used
    return (starts + used)[made], np.where(kind < 0, 1, count - used + 1)[made]


def _steps(runs: _Runs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Kinds and lengths of the groups of equal steps; a break, over which no tile reaches, is a group of its own below 0."""
    last = runs.rows - 1
    lo = np.diff(runs.lo, append=0) - runs.lo_step * last
    hi = np.diff(runs.hi, append=0) - runs.hi_step * last
    goes_on = (np.diff(runs.row, append=-1) == runs.rows) & ((lo | hi) & ~1 == 0)
    within = 2 * runs.hi_step + runs.lo_step
    between = np.where(goes_on, 2 * hi + lo, -1 - np.arange(len(lo)))
    kind = np.stack([within, between], axis=1).reshape(-1)
    count = np.stack([last, np.ones_like(last)], axis=1).reshape(-1)
    kind, count = kind[count > 0], count[count > 0]
    groups = np.flatnonzero(np.diff(kind, prepend=kind[0] - 1))
    return kind[groups], np.add.reduceat(count, groups)


def build_once(kept: MutableMapping[Hashable, Any], key: Hashable, build: Callable[[], Any]) -> Any:
    """What ``build`` makes: ``kept[key]``, built where it is missing.

    A plan serves inference and training alike, and rehearsals with fake tensors (``FakeTensorMode``). A tensor made in inference
    mode may not be saved for a backward, so nothing is built in that mode; a fake one has no values, so it serves the mode that
    it was made in alone.
    """
    if torch.compiler.is_compiling():  # a part of the graph, which makes real tensors
        if key not in kept:
            kept[key] = build()
        return kept[key]
    if is_in_torch_dispatch_mode() and (mode := detect_fake_mode()) is not None:
        kept = _kept_in(mode, kept)
    if key not in kept:
        with torch.inference_mode(False):
            kept[key] = build()
    return kept[key]


def _kept_in(mode: object, kept: MutableMapping[Hashable, Any]) -> MutableMapping[Hashable, Any]:
    """The part of ``kept`` that was built in a fake mode; only that of the newest one lasts."""
    newest, found = kept.get(_FAKE, (None, {}))
    if newest is not mode:
        found = {}
        kept[_FAKE] = mode, found
    return found
