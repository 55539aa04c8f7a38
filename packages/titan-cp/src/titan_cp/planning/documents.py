"""The ``documents`` layout: a degree for each document. Short ones stay whole on one rank, long ones are split over a few.

Problem: a document split over all ranks makes every rank need its keys. With thousands of short documents that is the
whole sequence, although a query sees no further than its own document.

Idea: every document has a degree, a power of two (or all ranks): the smallest at which a part is no more than 0.6 of a
rank's share of the work and of the tokens. The longest are dealt out first, each head and tail over the run of that many
neighbouring ranks (of 2: 0-1, 2-3, …; of 4: 0-3, …; so that runs stay on a node) that has the least work and room for
equal parts. What fits nowhere at the end fills up the rooms that are left, over the fewest ranks. If the ranks then
differ by more than `BALANCED`, it is done again with smaller parts. Lengths alone decide, not a window: layers with
other windows find the tokens in the same places.

Cost: a pass over the documents; seldom two or more. Source: longest processing time first (Graham, 1969); degrees in powers of
two as in Megatron-LM's hybrid context parallelism.
"""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from titan_cp.planning.ranges import Ranges, RangeTable, piece_arrays

BALANCED = 1.05
"""The largest imbalance that is called balanced."""
_PARTS = (1.7, 3.4, 14.0, 56.0)
"""In each attempt, how many of the largest parts of documents make a rank's share of the work."""


@lru_cache(maxsize=16)
def deal_documents(cu_seqlens: tuple[int, ...], size: int, causal: bool) -> RangeTable:
    """The ranges that each of ``size`` ranks holds; ``size`` divides the number of tokens."""
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    lengths = np.diff(bounds)
    order = np.argsort(-lengths, kind="stable")
    begins, lengths = bounds[:-1][order], lengths[order]
    pairs = piece_pairs(np.zeros_like(lengths), lengths, lengths, causal=causal, window=None)
    even = float(pairs.sum()) / size
    best, most = None, np.inf
    for parts in _PARTS:
        wanted = np.maximum(pairs * (parts / even), lengths * (_PARTS[0] * size / lengths.sum()))
        powers = 2 ** np.ceil(np.log2(np.maximum(wanted, 1.0))).astype(np.int64)
        dealer = _Dealer(cu_seqlens[-1] // size, size, causal, most)
        if dealer.deal(lengths, begins, pairs, np.where(powers < size, powers, size)):
            best, most = dealer, dealer.busiest
        if most <= BALANCED * even:
            break
    assert best is not None
    return best.ranges()


def document_degrees(ranges: Sequence[Ranges], cu_seqlens: Sequence[int]) -> NDArray[np.int64]:
    """How many ranks hold tokens of each document."""
    rank, document, *_ = piece_arrays(ranges, cu_seqlens)
    held = np.unique(document * len(ranges) + rank) // len(ranges)
    return np.bincount(held, minlength=len(cu_seqlens) - 1)


class _Dealer:
    """Room and work of every rank, and the pieces that are placed."""

    def __init__(self, each: int, size: int, causal: bool, most: float) -> None:
        self._size, self._causal, self._most = size, causal, most
        self._room: NDArray[np.int64] = np.full(size, each, dtype=np.int64)
        self._work = np.zeros(size)
        self._every = np.arange(size)
        self._placed: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
        """Owners, starts and stops."""

    @property
    def busiest(self) -> float:
        """The most work that a rank has."""
        return float(self._work.max())

    def ranges(self) -> RangeTable:
        """What was placed."""
        owners, starts, stops = (np.concatenate(column) for column in zip(*self._placed, strict=True))
        order = np.argsort(starts)
        return RangeTable.of(owners[order], starts[order], stops[order], self._size)

    def deal(
        self,
        lengths: NDArray[np.int64],
        begins: NDArray[np.int64],
        pairs: NDArray[np.float64],
        degrees: NDArray[np.int64],
    ) -> bool:
        """Place all documents, which are given longest first; False once a rank has as much work as one may not have."""
        split = int(np.count_nonzero(degrees > 1))  # the first ones: degrees fall with the length
        for length, begin, degree in zip(
            lengths[:split].tolist(), begins[:split].tolist(), degrees[:split].tolist(), strict=True
        ):
            self._split(length, begin, degree)
        late = self._whole(lengths[split:].tolist(), begins[split:].tolist(), pairs[split:].tolist())
        for length, begin in late:
            if self.busiest >= self._most:
                return False
            self._fill(length, begin)
        return self.busiest < self._most

    def _whole(self, lengths: list[int], begins: list[int], pairs: list[float]) -> list[tuple[int, int]]:
        """Each to the rank with the least work that has room; the lengths and begins of those that fit nowhere."""
        room, work = self._room.tolist(), self._work.tolist()
        lightest = [(load, rank) for rank, load in enumerate(work)]
        heapify(lightest)
        owners: list[int] = []
        placed: list[int] = []
        late: list[tuple[int, int]] = []
        largest = max(room)
        for n, length in enumerate(lengths):
            if length > largest:
                late.append((length, begins[n]))
                continue
            load, rank = lightest[0]
            while load != work[rank]:  # an old entry: the rank has been given more since
                heappop(lightest)
                load, rank = lightest[0]
            if room[rank] < length:
                fitting = [(work[r], r) for r in range(self._size) if room[r] >= length]
                if not fitting:
                    largest = max(room)
                    late.append((length, begins[n]))
                    continue
                rank = min(fitting)[1]
                heappush(lightest, (work[rank] + pairs[n], rank))
            else:
                heapreplace(lightest, (load + pairs[n], rank))
            room[rank] -= length
            work[rank] += pairs[n]
            owners.append(rank)
            placed.append(n)
        starts = np.asarray(begins, dtype=np.int64)[placed]
        stops = starts + np.asarray(lengths, dtype=np.int64)[placed]
        self._placed.append((np.asarray(owners, dtype=np.int64), starts, stops))
        self._room[:], self._work[:] = room, work
        return late

    def _split(self, length: int, begin: int, degree: int) -> None:
        """Head and tail over a run of ``degree`` ranks; over the next larger where no run has the room."""
        while True:
            runs = self._size // degree
            room = self._room[: runs * degree].reshape(runs, degree)
            fits = room.min(axis=1) >= -(-length // degree)
            if fits.any():
                break
            if degree == self._size:
                return self._fill(length, begin)
            degree = 2 * degree if 2 * degree < self._size else self._size
        work = self._work[: runs * degree].reshape(runs, degree).max(axis=1)
        run = int(np.where(fits, work, np.inf).argmin())
        shares = np.full(degree, length // degree)
        if length % degree:
            shares[np.argsort(-room[run], kind="stable")[: length % degree]] += 1
        return self._give(length, begin, self._every[run * degree : (run + 1) * degree], shares)

    def _fill(self, length: int, begin: int) -> None:
        """Head and tail over the fewest ranks that have the room together, all of it but the last one's."""
        ranks = np.argsort(-self._room, kind="stable")
        ends = np.cumsum(self._room[ranks])
        ranks = ranks[: int(np.searchsorted(ends, length)) + 1]
        shares = self._room[ranks]
        shares[-1] -= int(ends[len(ranks) - 1]) - length
        self._give(length, begin, ranks, shares)

    def _give(self, length: int, begin: int, ranks: NDArray[np.int64], shares: NDArray[np.int64]) -> None:
        """The first rank takes the first tokens and the last ones, the second those next to them, and so on."""
        heads = shares // 2
        tails = shares - heads
        head_stops, tail_starts = np.cumsum(heads), length - np.cumsum(tails)
        head_starts, tail_stops = head_stops - heads, tail_starts + tails
        if self._causal:
            pairs = heads * (head_starts + head_stops + 1) + tails * (tail_starts + tail_stops + 1)
            self._work[ranks] += pairs / 2
        else:
            self._work[ranks] += shares * float(length)
        self._room[ranks] -= shares
        self._placed.append((ranks, head_starts + begin, head_stops + begin))
        self._placed.append((ranks, tail_starts + begin, tail_stops + begin))


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
