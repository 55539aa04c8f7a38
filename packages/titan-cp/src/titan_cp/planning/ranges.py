"""Sorted token ranges, and what a piece of a document costs. The words in which layouts, tiles and exchanges are stated."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint, non-empty half-open token ranges over the packed sequence."""


def join_ranges(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Sort ranges, drop empty ones and join those that touch."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def split_ranges(ranges: Ranges, parts: int) -> tuple[Ranges, ...]:
    """Cut the token list that ``ranges`` describes into ``parts`` consecutive pieces of equal token count."""
    if parts == 1:
        return (ranges,)
    each = sum(stop - start for start, stop in ranges) // parts
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    filled = 0
    for start, stop in ranges:
        while start < stop:
            piece = filled // each
            take = min(stop - start, (piece + 1) * each - filled)
            pieces[piece].append((start, start + take))
            start += take
            filled += take
    return tuple(join_ranges(piece) for piece in pieces)


def attended_pairs(start: int, stop: int, length: int, *, causal: bool, window: int | None) -> int:
    """Query-key pairs computed for the positions ``[start, stop)`` of a document of ``length`` tokens."""
    if window is None:
        if not causal:
            return (stop - start) * length
        return (stop * (stop + 1) - start * (start + 1)) // 2
    # Position t sees min(t, w-1) tokens before it, itself, and (not causal) min(length-1-t, w-1) after it.
    before = _capped_sum(stop, window - 1) - _capped_sum(start, window - 1)
    if causal:
        return before + (stop - start)
    after = _capped_sum(length - start, window - 1) - _capped_sum(length - stop, window - 1)
    return before + after + (stop - start)


def _capped_sum(n: int, cap: int) -> int:
    """``sum(min(t, cap) for t in range(n))``."""
    low = min(n, cap)
    return low * (low - 1) // 2 + max(n - cap, 0) * cap


class RangeTable(Sequence[Ranges]):
    """The ranges of all ranks in three arrays; those of one rank are put together when they are asked for.

    Args:
        starts: Of all ranges, by rank and ascending.
        stops: Of all ranges.
        cuts: Where each rank's ranges begin in the arrays, and where the last one's end.
    """

    def __init__(self, starts: NDArray[np.int64], stops: NDArray[np.int64], cuts: Sequence[int]) -> None:
        self._starts = starts
        self._stops = stops
        self._cuts = cuts
        self._made: dict[int, Ranges] = {}

    @classmethod
    def of(
        cls, owners: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64], size: int
    ) -> "RangeTable":
        """Put ranges in order: those of an owner ascend already. Empty ones are dropped, those that touch are joined."""
        order = np.argsort(owners, kind="stable")
        order = order[stops[order] > starts[order]]
        owners, starts, stops = owners[order], starts[order], stops[order]
        apart = np.ones(len(starts) + 1, dtype=bool)
        apart[1:-1] = (starts[1:] != stops[:-1]) | (owners[1:] != owners[:-1])
        cuts = np.searchsorted(owners[apart[:-1]], np.arange(size + 1)).tolist()
        return cls(starts[apart[:-1]], stops[apart[1:]], cuts)

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def __getitem__(self, rank: Any) -> Any:
        """One rank's ranges, or those of several as a tuple."""
        if isinstance(rank, slice):
            return tuple(self[r] for r in range(*rank.indices(len(self))))
        at = rank + len(self) if rank < 0 else rank
        if not 0 <= at < len(self):
            raise IndexError(rank)
        if at not in self._made:
            a, b = self._cuts[at], self._cuts[at + 1]
            self._made[at] = tuple(zip(self._starts[a:b].tolist(), self._stops[a:b].tolist(), strict=True))
        return self._made[at]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Starts, stops and ranks of all ranges."""
        return self._starts, self._stops, np.repeat(np.arange(len(self)), np.diff(self._cuts))


def range_arrays(
    ranges: Sequence[Ranges],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Starts, stops and ranks of all ranges."""
    if isinstance(ranges, RangeTable):
        return ranges.arrays()
    numbers = np.fromiter(chain.from_iterable(chain.from_iterable(ranges)), dtype=np.int64)
    return numbers[::2].copy(), numbers[1::2].copy(), np.repeat(np.arange(len(ranges)), [len(held) for held in ranges])


def piece_arrays(
    ranges: Sequence[Ranges], cu_seqlens: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """`document_pieces` of all ranks at once: rank, document, first position, last position + 1, document length."""
    starts, stops, ranks = range_arrays(ranges)
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    first = np.searchsorted(bounds, starts, side="right") - 1
    last = np.searchsorted(bounds, stops, side="left") - 1
    counts = last - first + 1
    piece = np.repeat(np.arange(len(starts)), counts)
    document = first[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = bounds[document]
    return (
        ranks[piece],
        document,
        np.maximum(starts[piece], begin) - begin,
        np.minimum(stops[piece], bounds[document + 1]) - begin,
        bounds[document + 1] - begin,
    )


def document_pieces(ranges: Ranges, cu_seqlens: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Cut ranges at document boundaries: ``(document, first position, last position + 1, document length)`` each."""
    pieces: list[tuple[int, int, int, int]] = []
    for start, stop in ranges:
        document = bisect_right(cu_seqlens, start) - 1
        while start < stop:
            begin, end = cu_seqlens[document], cu_seqlens[document + 1]
            cut = min(stop, end)
            pieces.append((document, start - begin, cut - begin, end - begin))
            start = cut
            document += 1
    return pieces
