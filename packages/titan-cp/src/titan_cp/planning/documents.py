"""The ``documents`` layout: short documents stay whole on one rank, long ones are split over a few.

Problem: a document split over all ranks makes every rank need its keys. With thousands of short documents that is the
whole sequence, although a query sees no further than its own document.

Idea: documents are dealt out, heaviest first, each to the rank with the least work that has room for it. One that is
more than half of a rank's share of the work or of the tokens is cut head and tail, as in ``per_document``, over as many
ranks as that takes. What fits nowhere at the end is cut to fill the ranks up.

Cost: one pass over the documents. Source: longest processing time first (Graham, 1969).
"""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from titan_cp.planning.ranges import Ranges, attended_pairs, join_ranges, piece_arrays

_Cut = tuple[int, int, int]
"""``(rank, first position, last position + 1)`` of a piece of one document."""


@lru_cache(maxsize=16)
def deal_documents(cu_seqlens: tuple[int, ...], size: int, causal: bool, window: int | None) -> tuple[Ranges, ...]:
    """The ranges that each of ``size`` ranks holds; ``size`` divides the number of tokens."""
    dealer = _Dealer(cu_seqlens[-1] // size, size)
    documents = [(end - begin, begin) for begin, end in pairwise(cu_seqlens)]
    work = {n: attended_pairs(0, n, n, causal=causal, window=window) for n, _ in documents}
    mean = sum(work[n] for n, _ in documents) / size
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    late: list[tuple[int, int]] = []
    for length, begin in sorted(documents, key=lambda d: (-d[0], d[1])):
        parts = min(size, max(-int(-2 * work[length] // mean), -(-2 * length // dealer.each), 1))
        cuts = dealer.whole(length) if parts == 1 else dealer.split(length, parts)
        if cuts is None:
            late.append((length, begin))
            continue
        for rank, start, stop in cuts:
            amount = work[length] if parts == 1 else attended_pairs(start, stop, length, causal=causal, window=window)
            dealer.add_work(rank, amount)
            ranges[rank].append((begin + start, begin + stop))
    for length, begin in late:
        for rank, start, stop in dealer.fill(length):
            ranges[rank].append((begin + start, begin + stop))
    return tuple(join_ranges(held) for held in ranges)


class _Dealer:
    """Room and work of every rank, and the ways to place a document."""

    def __init__(self, each: int, size: int) -> None:
        self.each = each
        self.room: NDArray[np.int64] = np.full(size, each, dtype=np.int64)
        self.work = [0.0] * size
        self._lightest = [(0.0, rank) for rank in range(size)]

    def whole(self, length: int) -> list[_Cut] | None:
        """All of it on the rank with the least work; None where no rank has the room."""
        full: list[tuple[float, int]] = []
        found = None
        while self._lightest and found is None:
            work, rank = heappop(self._lightest)
            if work != self.work[rank]:
                continue  # an old entry: the rank has been given more since
            if self.room[rank] >= length:
                found = rank
            else:
                full.append((work, rank))
        for entry in full:
            heappush(self._lightest, entry)
        if found is None:
            return None
        self.room[found] -= length
        return [(found, 0, length)]

    def add_work(self, rank: int, amount: float) -> None:
        """Count ``amount`` of work for ``rank``."""
        self.work[rank] += amount
        heappush(self._lightest, (self.work[rank], rank))

    def split(self, length: int, parts: int) -> list[_Cut] | None:
        """Head and tail over ``parts`` ranks with room, or over all that have room if those are fewer."""
        while True:
            fits = np.flatnonzero(self.room >= length // parts + 2)
            if len(fits) >= parts:
                break
            if len(fits) < 2:
                return None
            parts = len(fits)
            if (self.room >= length // parts + 2).sum() < parts:
                return None
        ranks = sorted(sorted((int(r) for r in fits), key=lambda r: (self.work[r], r))[:parts])
        bounds = [length * i // (2 * parts) for i in range(2 * parts + 1)]
        cuts: list[_Cut] = []
        for i, rank in enumerate(ranks):
            for chunk in (i, 2 * parts - 1 - i):
                cuts.append((rank, bounds[chunk], bounds[chunk + 1]))
                self.room[rank] -= bounds[chunk + 1] - bounds[chunk]
        return cuts

    def fill(self, length: int) -> list[_Cut]:
        """In order into the ranks with the most room, cut where one is full."""
        cuts: list[_Cut] = []
        start = 0
        while start < length:
            rank = int(self.room.argmax())
            take = min(length - start, int(self.room[rank]))
            cuts.append((rank, start, start + take))
            self.room[rank] -= take
            start += take
        return cuts


def work_of(
    ranges: Sequence[Ranges], cu_seqlens: Sequence[int], *, causal: bool, window: int | None
) -> NDArray[np.float64]:
    """Query-key pairs that each rank computes, from all ranges at once."""
    rank, _, start, stop, length = piece_arrays(ranges, cu_seqlens)
    pairs = piece_pairs(start, stop, length, causal=causal, window=window)
    return np.bincount(rank, weights=pairs, minlength=len(ranges)).astype(np.float64)


def piece_pairs(
    start: NDArray[np.int64], stop: NDArray[np.int64], length: NDArray[np.int64], *, causal: bool, window: int | None
) -> NDArray[np.float64]:
    """`attended_pairs` of many pieces."""

    def capped(n: NDArray[np.int64], cap: int) -> NDArray[np.int64]:
        low = np.minimum(n, cap)
        return low * (low - 1) // 2 + np.maximum(n - cap, 0) * cap

    if window is None:
        pairs = (stop * (stop + 1) - start * (start + 1)) // 2 if causal else (stop - start) * length
        return pairs.astype(np.float64)
    pairs = capped(stop, window - 1) - capped(start, window - 1) + stop - start
    if not causal:
        pairs = pairs + capped(length - start, window - 1) - capped(length - stop, window - 1)
    return pairs.astype(np.float64)
