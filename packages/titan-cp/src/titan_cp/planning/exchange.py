"""Which rows of keys travel from which rank to which, when only those that a query sees are sent.

Problem: the ring carries every key to every rank. With packed documents, or a window, most queries see few of them.

Idea: a query sees one run of positions of its document. The runs of a rank's queries, joined where they touch and cut by
what the other ranks hold, are exactly the rows that must travel; they go straight there. All rows that a rank receives would
be one large buffer, so they come in rounds, by the distance between the ranks: no rank receives more than it holds itself
in a round, unless a single sender has more. Every rank derives the same rounds from the same numbers.

Cost: array operations, on the pieces that documents split over several ranks are cut into.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_cp.planning.ranges import Ranges, RangeTable, piece_arrays, range_arrays

_AT_ONCE = 1 << 19
"""Overlaps that are looked at together: bounds the memory."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank sends and receives at the same time."""

    sends: tuple[tuple[int, Ranges], ...]
    """Ring rank, and the local rows that go there."""
    receives: tuple[tuple[int, Ranges], ...]
    """Ring rank, and where the rows that come from there lie among ``tokens``."""
    tokens: Ranges
    """All received tokens, ascending."""


def rows_needed(
    ranges: Sequence[Ranges], cu_seqlens: Sequence[int], *, causal: bool, window: int | None
) -> NDArray[np.int64]:
    """How many rows of rank ``j``'s keys rank ``i``'s queries see, ``[i, j]``; a rank's own rows are not counted."""
    size = len(ranges)
    spans = _spans_seen(ranges, cu_seqlens, causal=causal, window=window)
    needed = np.zeros(size * size)
    for reader, holder, start, stop in _overlaps(spans, _spans_held(ranges)):
        needed += np.bincount(reader * size + holder, stop - start, size * size)
    table = needed.astype(np.int64).reshape(size, size)
    np.fill_diagonal(table, 0)
    return table


def plan_rounds(
    ranges: Sequence[Ranges],
    needed: NDArray[np.int64],
    rank: int,
    cu_seqlens: Sequence[int],
    *,
    causal: bool,
    window: int | None,
) -> tuple[Round, ...]:
    """The rounds of ``rank``; as many as every other rank has."""
    size = len(ranges)
    spans = _spans_seen(ranges, cu_seqlens, causal=causal, window=window)
    held = _spans_held(ranges)
    own = spans.rank == rank
    receives = _sorted_overlaps(_Spans(*(column[own] for column in spans)), held)
    mine = held.rank == rank
    sends = _sorted_overlaps(_Spans(*(column[~own] for column in spans)), _Spans(*(c[mine] for c in held)))
    to, source = (sends[0] - rank) % size, (rank - receives[1]) % size  # as distances
    rows = _local_rows(ranges[rank], sends[2])
    leaving = RangeTable.of(to, rows, rows + sends[3] - sends[2], size)
    rounds: list[Round] = []
    for distances in _rounds_of_distances(needed, sum(b - a for a, b in ranges[rank])):
        this = np.isin(source, distances)
        start, stop = receives[2][this], receives[3][this]
        ends = np.cumsum(stop - start)
        arriving = RangeTable.of(source[this], ends - (stop - start), ends, size)
        rounds.append(
            Round(
                tuple(((rank + d) % size, leaving[d]) for d in distances if needed[(rank + d) % size, rank]),
                tuple(((rank - d) % size, arriving[d]) for d in distances if needed[rank, (rank - d) % size]),
                RangeTable.of(np.zeros_like(start), start, stop, 1)[0],
            )
        )
    return tuple(rounds)


class _Spans(NamedTuple):
    """Runs of tokens, each with a rank."""

    rank: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


def _spans_held(ranges: Sequence[Ranges]) -> _Spans:
    """What the ranks hold, ascending: every token once."""
    start, stop, rank = range_arrays(ranges)
    order = np.argsort(start)
    return _Spans(rank[order], start[order], stop[order])


def _spans_seen(ranges: Sequence[Ranges], cu_seqlens: Sequence[int], *, causal: bool, window: int | None) -> _Spans:
    """What the queries of each rank see, by rank and ascending, joined where it touches."""
    rank, document, start, stop, length = piece_arrays(ranges, cu_seqlens)
    begin = np.asarray(cu_seqlens, dtype=np.int64)[document]
    low = begin if window is None else begin + np.maximum(start - window + 1, 0)
    if causal:
        high = begin + stop
    else:
        high = begin + (length if window is None else np.minimum(stop + window - 1, length))
    # both ascend within a rank, so that a span ends where the next piece's begins beyond it
    apart = np.ones(len(low) + 1, dtype=bool)
    apart[1:-1] = (low[1:] > high[:-1]) | (rank[1:] != rank[:-1])
    return _Spans(rank[apart[:-1]], low[apart[:-1]], high[apart[1:]])


def _overlaps(spans: _Spans, held: _Spans) -> Iterator[tuple[NDArray[np.int64], ...]]:
    """Rank of the span, rank of the holder, first token and last + 1 of every overlap; ``held`` ascends."""
    first = np.searchsorted(held.stop, spans.start, side="right")
    counts = np.maximum(np.searchsorted(held.start, spans.stop, side="left") - first, 0)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    for part in np.split(np.arange(len(counts)), np.searchsorted(ends, np.arange(_AT_ONCE, total, _AT_ONCE))):
        span = np.repeat(part, counts[part])
        before = np.cumsum(counts[part]) - counts[part]
        at = np.arange(len(span)) + np.repeat(first[part] - before, counts[part])
        start, stop = np.maximum(spans.start[span], held.start[at]), np.minimum(spans.stop[span], held.stop[at])
        yield spans.rank[span], held.rank[at], start, stop


def _sorted_overlaps(spans: _Spans, held: _Spans) -> tuple[NDArray[np.int64], ...]:
    """`_overlaps` of different ranks, all together, by their first token."""
    columns = [np.concatenate(column) for column in zip(*_overlaps(spans, held), strict=True)]
    others = np.flatnonzero(columns[0] != columns[1])
    order = others[np.argsort(columns[2][others], kind="stable")]
    return tuple(column[order] for column in columns)


def _rounds_of_distances(needed: NDArray[np.int64], room: int) -> list[list[int]]:
    """Distances grouped, nearest first, so that no rank receives more than ``room`` rows in a round."""
    size = len(needed)
    ranks = np.arange(size)
    rounds: list[list[int]] = []
    filled = np.zeros(size, dtype=np.int64)
    for distance in range(1, size):
        rows = needed[ranks, (ranks - distance) % size]
        if not rows.any():
            continue
        if not rounds or (filled + rows).max() > room:
            rounds.append([])
            filled = np.zeros(size, dtype=np.int64)
        rounds[-1].append(distance)
        filled = filled + rows
    return rounds


def _local_rows(held: Ranges, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The local rows of ``tokens``, all of which ``held`` holds."""
    start, stop = np.asarray(held, dtype=np.int64).T
    piece = np.searchsorted(start, tokens, side="right") - 1
    return tokens - start[piece] + (np.cumsum(stop - start) - (stop - start))[piece]
