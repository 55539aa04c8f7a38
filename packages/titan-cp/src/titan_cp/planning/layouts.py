"""Layouts: which tokens of a packed sequence each rank holds.

Problem: causal attention costs a token as much as it has predecessors in its document, so equal token counts are not
equal work: of a 128k document cut into 8 contiguous parts, the last rank computes 15 times what the first does.

Idea: a layout is, for each rank, a sorted tuple of disjoint half-open ranges ``(start, stop)`` over the packed
sequence. Every rank holds the same number of tokens, and always in ascending order; that order is what lets a whole
step of ring attention be described by a few rectangles and staircases (see `titan_cp.planning.tiles`).

- ``contiguous``: one range a rank. Balanced without a causal mask; the fewest ring hops with a sliding window.
- ``zigzag``: the sequence in ``2N`` equal chunks, rank ``r`` holds chunks ``r`` and ``2N-1-r``. Balanced for one causal
  document; **not** for packed ones, whose costs start again at each boundary.
- ``per_document``: the head-and-tail pairing inside each document, chunks as uneven as the lengths demand; leftover
  tokens go to the ranks that hold the fewest. No document needs padding, one token long or a million.
- ``documents``: a degree for each document: short ones whole on one rank, long ones split over as many neighbouring ranks as
  their work takes; balanced like ``per_document``, and few keys travel (see `titan_cp.planning.documents`).
- ``block``: blocks of ``block_size`` tokens, heaviest first, each to the lightest rank that has room.

Limits: all rows of a batch share one set of documents.

Source: head-and-tail pairing as in Megatron-LM and in "Striped Attention" (arXiv 2311.09431); longest-processing-time
scheduling (Graham, 1969) for blocks.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from titan_cp.planning.documents import deal_documents, piece_pairs, work_of
from titan_cp.planning.ranges import Ranges, RangeTable, attended_pairs, join_ranges

_MANY = 65
"""From this many boundaries on, documents are dealt in turn."""
_BALANCED = 1.02
_MANY_BLOCKS = 2048
"""From this many blocks on, they are dealt in rounds."""

LAYOUTS = ("contiguous", "zigzag", "per_document", "documents", "block")


def layout_multiple(layout: str, size: int, block_size: int) -> int:
    """The number that a sequence length must be a multiple of, for ``size`` ranks to hold equal token counts."""
    return {
        "contiguous": size,
        "zigzag": 2 * size,
        "per_document": size,
        "documents": size,
        "block": block_size * size,
    }[layout]


def plan_ranges(
    layout: str, cu_seqlens: Sequence[int], size: int, *, causal: bool, window: int | None, block_size: int
) -> Sequence[Ranges]:
    """The ranges that each of ``size`` ranks holds.

    Args:
        layout: One of `LAYOUTS`.
        cu_seqlens: Document boundaries ``0 = c0 < c1 < … < cD = S``, in tokens.
        size: Number of ranks; `layout_multiple` must divide ``S`` (the caller has checked).
        causal: Whether a token attends only to itself and earlier tokens.
        window: Sliding window in tokens, None for no window.
        block_size: Tokens per block, for ``block``.

    Returns:
        One `Ranges` for each rank, together covering ``[0, S)`` exactly once.
    """
    seq_len = cu_seqlens[-1]
    if layout == "contiguous":
        part = seq_len // size
        return tuple(((r * part, (r + 1) * part),) for r in range(size))
    if layout == "zigzag":
        part = seq_len // (2 * size)
        chunks = [(c * part, (c + 1) * part) for c in range(2 * size)]
        return tuple(join_ranges([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size))
    if layout == "documents":
        return deal_documents(tuple(cu_seqlens), size, causal)
    if layout == "per_document":
        return _per_document(cu_seqlens, size, causal=causal, window=window)
    return _block(cu_seqlens, size, block_size, causal=causal, window=window)


def _per_document(cu_seqlens: Sequence[int], size: int, *, causal: bool, window: int | None) -> Sequence[Ranges]:
    """Every document cut head and tail over all ranks."""
    if len(cu_seqlens) > _MANY:
        ranges, work = _per_document_in_turn(cu_seqlens, size, causal=causal, window=window)
        if work.max() * size <= _BALANCED * work.sum():
            return ranges
        slower = _per_document_by_work(cu_seqlens, size, causal=causal, window=window)
        other = work_of(slower, cu_seqlens, causal=causal, window=window)
        return slower if other.max() < work.max() else ranges
    return _per_document_by_work(cu_seqlens, size, causal=causal, window=window)


def _per_document_in_turn(
    cu_seqlens: Sequence[int], size: int, *, causal: bool, window: int | None
) -> tuple[RangeTable, NDArray[np.float64]]:
    """All documents at once: leftover tokens go to the ranks in turn, head and tail chunk by turns.

    Among many documents that evens out, as dealing by work does, without looking at one after the other. Returns the
    ranges and each rank's work.
    """
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    begin, length = bounds[:-1], np.diff(bounds)
    base, rest = np.divmod(length, 2 * size)
    everyone, some = np.divmod(rest, size)
    first = np.cumsum(some) - some  # leftover tokens before this document
    turn = np.arange(size)
    extra = everyone[:, None] + (turn < some[:, None])
    lighter = (turn + first[:, None] // size) % 2 == 0  # who takes one leftover token in the tail chunk
    head = base[:, None] + ((extra == 2) | ((extra == 1) & ~lighter))
    tail = base[:, None] + ((extra == 2) | ((extra == 1) & lighter))
    counts = np.concatenate([head, tail[:, ::-1]], axis=1)
    stops = np.cumsum(counts, axis=1)
    # [document, rank, head or tail] to [rank, document · head or tail], which is ascending
    mine = (turn - first[:, None]) % size
    chunks = np.stack([mine, 2 * size - 1 - mine], axis=2).transpose(1, 0, 2)
    document = np.arange(len(length))[None, :, None]
    stop, count = (x[document, chunks].reshape(size, -1) for x in (stops, counts))
    start = stop - count
    pairs = piece_pairs(start, stop, np.repeat(length, 2)[None, :], causal=causal, window=window)
    offset = np.repeat(begin, 2)[None, :]
    owners = np.broadcast_to(turn[:, None], start.shape)
    ranges = RangeTable.of(owners.reshape(-1), (start + offset).reshape(-1), (stop + offset).reshape(-1), size)
    return ranges, pairs.sum(axis=1)


def _per_document_by_work(
    cu_seqlens: Sequence[int], size: int, *, causal: bool, window: int | None
) -> tuple[Ranges, ...]:
    """One document after the other: leftover tokens go to the lightest ranks."""
    tokens = [0] * size
    work = [0] * size
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(size)]

    def give(rank: int, document: int, length: int, start: int, stop: int) -> None:
        ranges[rank].append((document + start, document + stop))
        tokens[rank] += stop - start
        work[rank] += attended_pairs(start, stop, length, causal=causal, window=window)

    for begin, end in pairwise(cu_seqlens):
        length = end - begin
        base, rest = divmod(length, 2 * size)
        everyone, some = divmod(rest, size)
        # The ranks with the fewest tokens take one more: token counts never differ by more than one between documents.
        fewest = sorted(range(size), key=lambda r: (tokens[r], work[r], r))[:some]
        extra = [everyone + (r in fewest) for r in range(size)]
        if base == 0:
            # Fewer tokens than chunks: hand them out one by one, the costliest (the last) to the lightest rank.
            for t in reversed(range(length)):
                rank = min((r for r in range(size) if extra[r]), key=lambda r: (work[r], r))
                extra[rank] -= 1
                give(rank, begin, length, t, t + 1)
            continue
        # One leftover token costs more in the tail chunk than in the head chunk: the lighter half takes it there.
        by_work = sorted(range(size), key=lambda r: (work[r], r))
        lighter = set(by_work[: size // 2])
        head = [base + (extra[r] == 2 or (extra[r] == 1 and r not in lighter)) for r in range(size)]
        tail = [base + (extra[r] == 2 or (extra[r] == 1 and r in lighter)) for r in range(size)]
        position = 0
        for rank, count in [*enumerate(head), *reversed(list(enumerate(tail)))]:
            give(rank, begin, length, position, position + count)
            position += count
    return tuple(join_ranges(r) for r in ranges)


def _block(cu_seqlens: Sequence[int], size: int, block_size: int, *, causal: bool, window: int | None) -> RangeTable:
    starts = np.arange(0, cu_seqlens[-1], block_size)
    blocks = RangeTable(starts, starts + block_size, range(len(starts) + 1))
    costs = work_of(blocks, cu_seqlens, causal=causal, window=window)
    deal = _one_by_one if len(starts) < _MANY_BLOCKS else _in_rounds
    return RangeTable.of(deal(costs, size), starts, starts + block_size, size)


def _one_by_one(costs: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """The rank of each block: the heaviest first, to the lightest rank that has room."""
    owners = np.empty(len(costs), dtype=np.int64)
    lightest = [(0.0, rank) for rank in range(size)]
    room = [len(costs) // size] * size
    for block in np.argsort(-costs, kind="stable").tolist():
        work, rank = heappop(lightest)
        owners[block] = rank
        room[rank] -= 1
        if room[rank]:
            heappush(lightest, (work + float(costs[block]), rank))
    return owners


def _in_rounds(costs: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """The rank of each block: heaviest first, one to each rank in a round, its heaviest to the rank with the least work.

    Of many blocks that is as even, without looking at one after the other.
    """
    owners = np.empty(len(costs), dtype=np.int64)
    work = np.zeros(size)
    for dealt in np.argsort(-costs, kind="stable").reshape(-1, size):
        lightest = np.argsort(work, kind="stable")
        owners[dealt] = lightest
        work[lightest] += costs[dealt]
    return owners
