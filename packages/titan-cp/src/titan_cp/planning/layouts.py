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
- ``block``: blocks of ``block_size`` tokens, heaviest first, each to the lightest rank that has room.

Limits: all rows of a batch share one set of documents.

Source: head-and-tail pairing as in Megatron-LM and in "Striped Attention" (arXiv 2311.09431); longest-processing-time
scheduling (Graham, 1969) for blocks.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint, non-empty half-open token ranges over the packed sequence."""

LAYOUTS = ("contiguous", "zigzag", "per_document", "block")


def layout_multiple(layout: str, size: int, block_size: int) -> int:
    """The number that a sequence length must be a multiple of, for ``size`` ranks to hold equal token counts."""
    return {"contiguous": size, "zigzag": 2 * size, "per_document": size, "block": block_size * size}[layout]


def plan_ranges(
    layout: str, cu_seqlens: Sequence[int], size: int, *, causal: bool, window: int | None, block_size: int
) -> tuple[Ranges, ...]:
    """The ranges that each of ``size`` ranks holds.

    Args:
        layout: One of `LAYOUTS`.
        cu_seqlens: Document boundaries ``0 = c0 < c1 < … < cD = S``, in tokens.
        size: Number of ranks; `layout_multiple` must divide ``S`` (the caller has checked).
        causal: Whether a token attends only to itself and earlier tokens.
        window: Sliding window in tokens, None for no window.
        block_size: Tokens a block, for ``block``.

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
    if layout == "per_document":
        return _per_document(cu_seqlens, size, causal=causal, window=window)
    return _block(cu_seqlens, size, block_size, causal=causal, window=window)


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


def _per_document(cu_seqlens: Sequence[int], size: int, *, causal: bool, window: int | None) -> tuple[Ranges, ...]:
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


def _block(
    cu_seqlens: Sequence[int], size: int, block_size: int, *, causal: bool, window: int | None
) -> tuple[Ranges, ...]:
    blocks = [(s, s + block_size) for s in range(0, cu_seqlens[-1], block_size)]
    costs = [sum(_block_pairs(b, cu_seqlens, causal=causal, window=window)) for b in blocks]
    heaviest_first = sorted(range(len(blocks)), key=lambda b: (-costs[b], b))
    work = [0] * size
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    each = len(blocks) // size
    for b in heaviest_first:
        rank = min((r for r in range(size) if len(ranges[r]) < each), key=lambda r: (work[r], r))
        ranges[rank].append(blocks[b])
        work[rank] += costs[b]
    return tuple(join_ranges(r) for r in ranges)


def _block_pairs(block: tuple[int, int], cu_seqlens: Sequence[int], *, causal: bool, window: int | None) -> list[int]:
    return [
        attended_pairs(start, stop, length, causal=causal, window=window)
        for _, start, stop, length in document_pieces((block,), cu_seqlens)
    ]


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
