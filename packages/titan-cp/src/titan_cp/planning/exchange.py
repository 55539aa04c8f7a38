"""Which rows of keys travel from which rank to which, when only those that a query sees are sent.

Problem: the ring carries every key to every rank. With packed documents, or a window, most queries see few of them.

Idea: a query sees one run of positions of its document. The runs of a rank's queries, cut by what another rank holds,
are exactly the rows that must travel between the two; they go straight there. All rows that a rank receives would be
one large buffer, so they come in rounds, by the distance between the ranks: no rank receives more than it holds itself
in a round, unless a single sender has more. Every rank derives the same rounds from the same numbers.

Cost: O(pieces of split documents) numpy for the table, O(own pieces · partners) Python for one rank's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan_cp.planning.ranges import Ranges, document_pieces, join_ranges, piece_arrays

_AT_ONCE = 1 << 19
"""Pairs of a piece and a holder that are looked at together: bounds the memory."""


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
    rank, document, start, stop, length = piece_arrays(ranges, cu_seqlens)
    # what each holder of a document sees of it, from the first row to the last
    keys, holder = np.unique(document * size + rank, return_inverse=True)
    low = np.full(len(keys), np.iinfo(np.int64).max)
    high = np.zeros(len(keys), dtype=np.int64)
    np.minimum.at(low, holder, _first_seen(start, window))
    np.maximum.at(high, holder, _last_seen(stop, length, causal, window))
    # each piece meets every holder of its document
    first = np.searchsorted(keys, document * size)
    counts = np.searchsorted(keys, document * size + size) - first
    needed = np.zeros(size * size)
    split = np.flatnonzero(counts > 1)  # one rank holds all of the others
    ends = np.cumsum(counts[split])
    for part in np.split(
        split, np.searchsorted(ends, np.arange(_AT_ONCE, int(ends[-1]) if len(ends) else 0, _AT_ONCE))
    ):
        meets = np.repeat(part, counts[part])
        at = np.arange(len(meets)) - np.repeat(np.cumsum(counts[part]) - counts[part], counts[part]) + first[meets]
        rows = np.minimum(high[at], stop[meets]) - np.maximum(low[at], start[meets])
        needed += np.bincount(keys[at] % size * size + rank[meets], np.maximum(rows, 0), size * size)
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
    seen = {i: _seen(ranges[i], cu_seqlens, causal=causal, window=window) for i in _partners(needed, rank)}
    size = len(ranges)
    rounds: list[Round] = []
    for distances in _rounds_of_distances(needed, sum(b - a for a, b in ranges[rank])):
        sends = [
            (to, _local_rows(ranges[rank], intersect(seen[to], ranges[rank])))
            for to in ((rank + d) % size for d in distances)
            if needed[to, rank]
        ]
        receives = [
            (source, intersect(seen[rank], ranges[source]))
            for source in ((rank - d) % size for d in distances)
            if needed[rank, source]
        ]
        rounds.append(_round(sends, receives))
    return tuple(rounds)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """What both sorted range lists hold."""
    both: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            both.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(both)


def _round(sends: list[tuple[int, Ranges]], receives: list[tuple[int, Ranges]]) -> Round:
    placed: dict[int, list[tuple[int, int]]] = {source: [] for source, _ in receives}
    row = 0
    ascending = sorted((start, stop, source) for source, tokens in receives for start, stop in tokens)
    for start, stop, source in ascending:
        placed[source].append((row, row + stop - start))
        row += stop - start
    rows = tuple((source, join_ranges(held)) for source, held in placed.items())
    return Round(tuple(sends), rows, join_ranges([(start, stop) for start, stop, _ in ascending]))


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


def _partners(needed: NDArray[np.int64], rank: int) -> list[int]:
    return [rank, *(int(i) for i in np.flatnonzero(needed[:, rank]))]


def _seen(held: Ranges, cu_seqlens: Sequence[int], *, causal: bool, window: int | None) -> Ranges:
    """The tokens that the queries of ``held`` see: for each document, from the first seen to the last."""
    spans: dict[int, tuple[int, int]] = {}
    for document, start, stop, length in document_pieces(held, cu_seqlens):
        low = 0 if window is None else max(0, start - window + 1)
        high = stop if causal else length if window is None else min(length, stop + window - 1)
        before = spans.get(document, (low, high))
        spans[document] = (min(low, before[0]), max(high, before[1]))
    return join_ranges([(cu_seqlens[d] + low, cu_seqlens[d] + high) for d, (low, high) in spans.items()])


def _first_seen(start: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    return np.zeros_like(start) if window is None else np.maximum(start - window + 1, 0)


def _last_seen(
    stop: NDArray[np.int64], length: NDArray[np.int64], causal: bool, window: int | None
) -> NDArray[np.int64]:
    if causal:
        return stop
    return length if window is None else np.minimum(stop + window - 1, length)


def _local_rows(held: Ranges, tokens: Ranges) -> Ranges:
    """The local rows of ``tokens``, all of which ``held`` holds."""
    rows: list[tuple[int, int]] = []
    row = i = 0
    for start, stop in held:
        while i < len(tokens) and tokens[i][0] < stop:
            rows.append((row + tokens[i][0] - start, row + tokens[i][1] - start))
            i += 1
        row += stop - start
    return join_ranges(rows)
