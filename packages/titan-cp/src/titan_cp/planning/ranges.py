"""Sorted token ranges, and what a piece of a document costs. The words in which layouts, tiles and exchanges are stated."""

from bisect import bisect_right
from collections.abc import Sequence

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
