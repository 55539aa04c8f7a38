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

Cost: O(documents) Python per pair of ranks, once per plan.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from titan_cp.planning.ranges import Ranges, document_pieces


@dataclass(frozen=True, slots=True)
class Tile:
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


@dataclass(slots=True)
class _Run:
    """A tile under construction: bounds at its first row, and how they move (None: one row, not known yet)."""

    q_start: int
    rows: int
    lo: int
    hi: int
    lo_step: int | None
    hi_step: int | None

    def tile(self) -> Tile:
        hi_last = self.hi + (self.hi_step or 0) * (self.rows - 1)
        return Tile(self.q_start, self.q_start + self.rows, self.lo, hi_last, bool(self.hi_step), bool(self.lo_step))

    def absorb(self, other: "_Run") -> bool:
        """Take over a run that continues this one; False where it does not."""
        if other.q_start != self.q_start + self.rows:
            return False
        steps: list[int] = []
        for start, step, other_start, other_step in (
            (self.lo, self.lo_step, other.lo, other.lo_step),
            (self.hi, self.hi_step, other.hi, other.hi_step),
        ):
            seam = other_start - (start + (step or 0) * (self.rows - 1))
            if seam not in (0, 1) or step not in (None, seam) or other_step not in (None, seam):
                return False
            steps.append(seam)
        self.rows += other.rows
        self.lo_step, self.hi_step = steps
        return True


def plan_tiles(
    q_ranges: Ranges, k_ranges: Ranges, cu_seqlens: Sequence[int], *, causal: bool, window: int | None
) -> tuple[Tile, ...]:
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
    keys = _local_pieces(k_ranges, cu_seqlens)
    runs: list[_Run] = []
    for document, pieces in _local_pieces(q_ranges, cu_seqlens).items():
        if document not in keys:
            continue
        for run in _runs(pieces, keys[document], causal, window):
            if not (runs and runs[-1].absorb(run)):
                runs.append(run)
    return tuple(run.tile() for run in runs)


def _local_pieces(ranges: Ranges, cu_seqlens: Sequence[int]) -> dict[int, list[tuple[int, int, int]]]:
    """By document: ``(first position, last position + 1, local row of the first)``."""
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    row = 0
    for document, start, stop, _ in document_pieces(ranges, cu_seqlens):
        pieces.setdefault(document, []).append((start, stop, row))
        row += stop - start
    return pieces


def _runs(
    queries: list[tuple[int, int, int]], keys: list[tuple[int, int, int]], causal: bool, window: int | None
) -> Iterator[_Run]:
    starts = [start for start, _, _ in keys]
    last = keys[-1][2] + keys[-1][1] - keys[-1][0]

    def keys_below(position: int) -> int:
        """The local row of the first key at or after ``position``."""
        piece = bisect_right(starts, position) - 1
        if piece < 0:
            return keys[0][2]
        start, stop, row = keys[piece]
        return row + min(position, stop) - start

    # hi(t) = keys_below(t + ahead), lo(t) = keys_below(t - behind); None where that bound does not depend on t.
    ahead = 1 if causal else window
    behind = None if window is None else window - 1
    shifts = [s for s in (ahead, None if behind is None else -behind) if s is not None]
    # A bound changes behaviour only where it reaches the edge of a key piece.
    edges = sorted({edge - s + d for s in shifts for start, stop, _ in keys for edge in (start, stop) for d in (0, 1)})
    for start, stop, row in queries:
        cuts = [start, *(e for e in edges if start < e < stop), stop]
        for t, end in pairwise(cuts):
            hi = last if ahead is None else keys_below(t + ahead)
            lo = keys[0][2] if behind is None else keys_below(t - behind)
            if hi <= lo:
                continue
            hi_step = lo_step = None
            if end - t > 1:
                hi_step = 0 if ahead is None else keys_below(t + 1 + ahead) - hi
                lo_step = 0 if behind is None else keys_below(t + 1 - behind) - lo
            yield _Run(row + t - start, end - t, lo, hi, lo_step, hi_step)
