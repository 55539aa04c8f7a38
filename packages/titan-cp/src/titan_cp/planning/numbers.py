"""The numbers of a plan: ranges of tokens for each rank, tiles, work and bytes. Derived on demand and kept."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from titan_cp.planning.costs import (
    AttentionCosts,
    AttentionShape,
    DirectRows,
    HeadShares,
    crossover_size,
    gather_heads,
    plan_costs,
    share_heads,
    work_matrix,
)
from titan_cp.planning.documents import document_degrees, work_of
from titan_cp.planning.exchange import Round, plan_rounds, rows_needed
from titan_cp.planning.layouts import plan_ranges
from titan_cp.planning.ranges import Ranges, split_ranges
from titan_cp.planning.tiles import Tiles, build_once, plan_tiles
from titan_cp.planning.tokens import TokenOrder, token_order


@dataclass(frozen=True, kw_only=True)
class PlanNumbers:
    """Who holds which tokens, who computes what, and what it costs. `AttentionPlan` adds `explain` and the moving of tokens."""

    size: int
    """Ranks in the context-parallel group."""
    rank: int
    """This rank's number in the group. Under USP, ``ring rank · ulysses_degree + Ulysses rank``."""
    seq_len: int
    """Tokens of the whole sequence, without padding."""
    cu_seqlens: tuple[int, ...] = field(repr=False)
    """Document boundaries in tokens, the padding document included."""
    method: str
    """``ring``, ``allgather``, ``ulysses`` or ``usp``."""
    layout: str
    """``contiguous``, ``zigzag``, ``per_document``, ``documents`` or ``block``."""
    ulysses_degree: int
    """Ranks that share the heads; 1 for the ring and all-gather."""
    causal: bool
    """Whether a token attends only to itself and earlier tokens."""
    window: int | None
    """Sliding window in tokens; None for no limit."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """KV heads."""
    head_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    dtype: torch.dtype
    """Dtype of the queries."""
    block_size: int
    """Tokens per block of the ``block`` layout."""
    reasons: tuple[str, str] = field(repr=False, compare=False)
    """Why this method, and why this layout."""
    _tiles: dict[tuple[int, int], Tiles] = field(
        default_factory=dict[tuple[int, int], Tiles], init=False, repr=False, compare=False
    )
    _indices: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any], init=False, repr=False, compare=False)

    @property
    def pad_to(self) -> int:
        """The length that `shard` pads to: the smallest legal one, ``seq_len`` itself if that is legal."""
        return self.cu_seqlens[-1]

    @property
    def local_len(self) -> int:
        """Tokens on each rank."""
        return self.pad_to // self.size

    @property
    def ring_degree(self) -> int:
        """Ranks in the ring (or all-gather); 1 for Ulysses."""
        return self.size // self.ulysses_degree

    @property
    def ring_rank(self) -> int:
        """The number of this rank in its ring."""
        return self.rank // self.ulysses_degree

    @property
    def head_shares(self) -> HeadShares:
        """How Ulysses ranks share the heads: which are repeated, and which are added."""
        return share_heads(self.num_heads, self.num_kv_heads, self.ulysses_degree)

    @cached_property
    def ring_ranges(self) -> Sequence[Ranges]:
        """The tokens that each ring rank computes on (after the Ulysses exchange)."""
        if self.ring_degree == 1:
            return (((0, self.pad_to),),)
        return self._ranges(self.ring_degree)

    @cached_property
    def shard_ranges(self) -> Sequence[Ranges]:
        """The tokens that each rank holds outside attention."""
        if self.ring_degree == 1:
            return self._ranges(self.size)
        if self.ulysses_degree == 1:
            return self.ring_ranges
        return tuple(piece for held in self.ring_ranges for piece in split_ranges(held, self.ulysses_degree))

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """Query-key pairs of ring rank ``i``'s queries with ring rank ``j``'s keys, ``[i, j]``."""
        return work_matrix(self.ring_ranges, self.cu_seqlens, causal=self.causal, window=self.window)

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Query-key pairs times query heads that each rank computes in one forward, for one batch row."""
        heads = self.head_shares.num_heads // self.ulysses_degree
        pairs = work_of(self.ring_ranges, self.cu_seqlens, causal=self.causal, window=self.window)
        return tuple(int(pairs[rank // self.ulysses_degree]) * heads for rank in range(self.size))

    @property
    def imbalance(self) -> float:
        """The busiest rank's work over the mean; 1 is perfect."""
        return max(self.work) * self.size / sum(self.work)

    @property
    def degrees(self) -> dict[int, int]:
        """How many documents have which degree: the number of ranks that hold tokens of it."""
        degrees, counts = np.unique(document_degrees(self.shard_ranges, self.cu_seqlens), return_counts=True)
        return dict(zip(degrees.tolist(), counts.tolist(), strict=True))

    @property
    def step_imbalance(self) -> float:
        """The ring's busiest rank of every step, summed, over the mean work: its pace if ranks wait at each step."""
        ring = self.ring_degree
        steps = [max(int(self.pairs[i, (i - s) % ring]) for i in range(ring)) for s in range(ring)]
        return sum(steps) * ring / int(self.pairs.sum())

    @cached_property
    def hops(self) -> int:
        """How many ranks onward keys must travel: the ring's size less one, or what the window reaches."""
        longest = int(np.diff(self.cu_seqlens).max())
        if self.layout == "per_document" and self.window is None and longest >= 2 * self.ring_degree:
            return self.ring_degree - 1  # every rank has head and tail of that document
        needed = np.argwhere(self.rows_needed > 0)
        return max((int(i - j) % self.ring_degree for i, j in needed), default=0)

    @cached_property
    def rows_needed(self) -> NDArray[np.int64]:
        """Rows of ring rank ``j``'s keys that ring rank ``i``'s queries see, ``[i, j]``; a rank's own are not counted."""
        return rows_needed(self.ring_ranges, self.cu_seqlens, causal=self.causal, window=self.window)

    @cached_property
    def direct(self) -> bool:
        """Whether keys go straight to the ranks that see them, rather than round the ring.

        So where no rank needs more than half of the others' rows. Where most rows are needed everywhere, the ring sends
        as little, and only between neighbours.
        """
        if self.ring_degree == 1 or self.method == "allgather":
            return False
        if self.window is None and (self.layout in ("zigzag", "per_document") or len(self.cu_seqlens) == 2):
            return False  # about three quarters are needed
        most = int(self.rows_needed.sum(axis=1).max())
        return 2 * most <= self.pad_to * (self.ring_degree - 1) // self.ring_degree

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """What this rank exchanges where `direct` holds."""
        return plan_rounds(
            self.ring_ranges, self.rows_needed, self.ring_rank, self.cu_seqlens, causal=self.causal, window=self.window
        )

    @cached_property
    def sent_rows(self) -> tuple[int, ...]:
        """Rows of keys that each ring rank sends in one forward, values with them; backward sends as many again."""
        if self.method == "allgather":
            return (self.ring_len * (self.ring_degree - 1),) * self.ring_degree
        if self.direct:
            return tuple(int(rows) for rows in self.rows_needed.sum(axis=0))
        return (self.ring_len * self.hops,) * self.ring_degree

    @property
    def ring_len(self) -> int:
        """Tokens that a ring rank computes on."""
        return self.pad_to // self.ring_degree

    @property
    def heads_per_step(self) -> int:
        """KV heads that all-gather attention takes at a time."""
        return gather_heads(self.shape, self.size)

    @cached_property
    def costs(self) -> AttentionCosts:
        """Bytes sent, saved and buffered, per rank, for one batch row; on this rank, where ranks differ."""
        if self.direct:
            largest = max((sum(stop - start for start, stop in r.tokens) for r in self.rounds), default=0)
            received = int(self.rows_needed[self.ring_rank].sum())
            rows = DirectRows(self.sent_rows[self.ring_rank], received, largest)
            return plan_costs(
                self.method, self.shape, ulysses_degree=self.ulysses_degree, ring_degree=self.ring_degree, direct=rows
            )
        return plan_costs(
            self.method, self.shape, ulysses_degree=self.ulysses_degree, ring_degree=self.ring_degree, hops=self.hops
        )

    @property
    def shape(self) -> AttentionShape:
        """The (padded) attention this plan is for."""
        return AttentionShape(
            seq_len=self.pad_to,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
        )

    @property
    def crossover_size(self) -> int | None:
        """The smallest number of ranks at which Ulysses sends fewer bytes than the full ring; None if there is none."""
        return crossover_size(self.shape)

    def tiles(self, k_rank: int) -> Tiles:
        """The tiles of this rank's queries with the keys of ring rank ``k_rank``."""
        key = (self.ring_rank, k_rank)
        if key not in self._tiles:
            self._tiles[key] = plan_tiles(
                self.ring_ranges[key[0]], self.ring_ranges[k_rank], self.cu_seqlens, causal=self.causal,
                window=self.window,
            )  # fmt: skip
        return self._tiles[key]

    def round_tiles(self, index: int) -> Tiles:
        """The tiles of this rank's queries with the keys it receives in round ``index``."""
        key = (self.ring_rank, -2 - index)
        if key not in self._tiles:
            self._tiles[key] = plan_tiles(
                self.ring_ranges[key[0]], self.rounds[index].tokens, self.cu_seqlens, causal=self.causal,
                window=self.window,
            )  # fmt: skip
        return self._tiles[key]

    def sequence_tiles(self) -> Tiles:
        """The tiles of this rank's queries with the keys of the whole sequence, in its own order."""
        key = (self.ring_rank, -1)
        if key not in self._tiles:
            self._tiles[key] = plan_tiles(
                self.ring_ranges[key[0]], ((0, self.pad_to),), self.cu_seqlens, causal=self.causal, window=self.window
            )
        return self._tiles[key]

    def ring_order(self, device: torch.device) -> TokenOrder:
        """The tokens of the ring's ranks laid end to end, on ``device``; kept with the plan, 8 bytes a token."""
        return self.index_once(("ring", device), lambda: token_order(self.ring_ranges, device))

    def shard_order(self, device: torch.device) -> TokenOrder:
        """As `ring_order`, of what all ranks hold outside attention."""
        return self.index_once(("shards", device), lambda: token_order(self.shard_ranges, device))

    def index_once(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """What ``build`` makes, built at the first call with ``key``. The newest 64 plans are kept, and theirs with them."""
        return build_once(self._indices, key, build)

    def for_rank(self, rank: int) -> Self:
        """The same plan as another rank sees it."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank={rank} is outside the plan's {self.size} ranks. Use 0 to {self.size - 1}.")
        return replace(self, rank=rank)

    def _ranges(self, degree: int) -> Sequence[Ranges]:
        return plan_ranges(
            self.layout, self.cu_seqlens, degree, causal=self.causal, window=self.window, block_size=self.block_size
        )
