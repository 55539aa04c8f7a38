"""The plan: who holds which tokens, who computes what, and what it costs. Pure; it needs no process group.

A `Plan` is made once for a sequence length or a packing, on every rank alike, and then handed to the attention
functions. It is the only place where layout, mask and method are stated, so they cannot disagree between the data
loader, the rotary positions and the attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from titan_cp import _tokens
from titan_cp._choose import choose_layout, choose_method, plan_degrees
from titan_cp._costs import Costs, Shape, crossover_size, kv_heads_for, plan_costs, work_matrix
from titan_cp._explain import explain_plan
from titan_cp._layout import Ranges, plan_ranges, split_ranges
from titan_cp._legal import (
    check_arguments,
    check_documents,
    legal_multiple,
    pad_documents,
    reject_length,
)
from titan_cp._tiles import Tile, plan_tiles


def plan(
    seq_len: int | None = None,
    *,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    size: int,
    rank: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    method: str = "auto",
    layout: str = "auto",
    ulysses_degree: int | None = None,
    causal: bool = True,
    window: int | None = None,
    block_size: int = 128,
    pad: bool = False,
) -> "Plan":
    """Plan context parallelism for one sequence length, or one packing of documents.

    Args:
        seq_len: Tokens of the whole sequence; may be left out if ``cu_seqlens`` is given.
        cu_seqlens: Boundaries of packed documents, ``[0, …, S]`` in tokens, strictly increasing; the same for every
            row of the batch. None for one document.
        size: Ranks in the context-parallel group.
        rank: This rank's number in that group.
        num_heads: Query heads (of this rank's tensors, if tensor parallelism has split them).
        num_kv_heads: KV heads, a divisor of ``num_heads``; None for as many.
        head_dim: Channels a head; for the byte counts.
        dtype: Dtype of the queries; for the byte counts.
        method: ``ring``, ``allgather``, ``ulysses``, ``usp``, or ``auto``: the fewest bytes forward + backward.
        layout: ``contiguous``, ``zigzag``, ``per_document``, ``block``, or ``auto``: the balanced one.
        ulysses_degree: Ranks that share the heads under ``usp``; None for the divisor of ``size`` that sends least.
        causal: Whether a token attends only to itself and earlier tokens.
        window: A token attends to tokens less than ``window`` away; None for no limit.
        block_size: Tokens a block of the ``block`` layout.
        pad: Pad to the next legal length, as one more document that no other attends to.

    Returns:
        The plan, the same on every rank but for ``rank``.

    Raises:
        ValueError: If a length, head count, window or document boundary cannot work; the message names the nearest
            legal choice.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_arguments(size, rank, num_heads, num_kv_heads, head_dim, window, block_size, method, layout, ulysses_degree)
    documents = check_documents(seq_len, cu_seqlens)
    wanted = documents[-1]
    shape = Shape(seq_len=wanted, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    chosen, method_reason = choose_method(method, shape, size, ulysses_degree)
    ulysses, ring = plan_degrees(chosen, shape, size, ulysses_degree)
    layout, layout_reason = choose_layout(
        layout, chosen, documents, ring, causal=causal, window=window, block_size=block_size
    )
    multiple = legal_multiple(chosen, layout, size, ring, block_size)
    if wanted % multiple:
        if not pad:
            reject_length(wanted, multiple, layout, chosen, size)
        documents = pad_documents(documents, multiple)
    return Plan(
        size=size,
        rank=rank,
        seq_len=wanted,
        cu_seqlens=documents,
        method=chosen,
        layout=layout,
        ulysses_degree=ulysses,
        causal=causal,
        window=window,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=block_size,
        reasons=(method_reason, layout_reason),
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who holds which tokens and who computes what; made by `plan`, which checks it."""

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
    """``contiguous``, ``zigzag``, ``per_document`` or ``block``."""
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
    """Channels a head."""
    dtype: torch.dtype
    """Dtype of the queries."""
    block_size: int
    """Tokens a block of the ``block`` layout."""
    reasons: tuple[str, str] = field(repr=False, compare=False)
    """Why this method, and why this layout."""
    _tiles: dict[tuple[int, int], tuple[Tile, ...]] = field(
        default_factory=dict[tuple[int, int], tuple[Tile, ...]], init=False, repr=False, compare=False
    )

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
    def repeated_kv_heads(self) -> int:
        """KV heads after repeating them for Ulysses; ``num_kv_heads`` where no repeating is needed."""
        return kv_heads_for(self.num_kv_heads, self.ulysses_degree)

    @cached_property
    def ring_ranges(self) -> tuple[Ranges, ...]:
        """The tokens that each ring rank computes on (after the Ulysses exchange)."""
        if self.ring_degree == 1:
            return (((0, self.pad_to),),)
        return self._ranges(self.ring_degree)

    @cached_property
    def shard_ranges(self) -> tuple[Ranges, ...]:
        """The tokens that each rank holds outside attention."""
        if self.ring_degree == 1:
            return self._ranges(self.size)
        return tuple(piece for held in self.ring_ranges for piece in split_ranges(held, self.ulysses_degree))

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """Query-key pairs of ring rank ``i``'s queries with ring rank ``j``'s keys, ``[i, j]``."""
        return work_matrix(self.ring_ranges, self.cu_seqlens, causal=self.causal, window=self.window)

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Query-key pairs times query heads that each rank computes in one forward, for one batch row."""
        heads = self.num_heads // self.ulysses_degree
        by_ring_rank = [int(pairs) * heads for pairs in self.pairs.sum(axis=1)]
        return tuple(by_ring_rank[rank // self.ulysses_degree] for rank in range(self.size))

    @property
    def imbalance(self) -> float:
        """The busiest rank's work over the mean; 1 is perfect."""
        return max(self.work) * self.size / sum(self.work)

    @property
    def step_imbalance(self) -> float:
        """The ring's busiest rank of every step, summed, over the mean work: its pace if ranks wait at each step."""
        ring = self.ring_degree
        steps = [max(int(self.pairs[i, (i - s) % ring]) for i in range(ring)) for s in range(ring)]
        return sum(steps) * ring / int(self.pairs.sum())

    @cached_property
    def hops(self) -> int:
        """How many ranks onward keys must travel: the ring's size less one, or what the window reaches."""
        needed = np.argwhere(self.pairs > 0)
        return max(int(i - j) % self.ring_degree for i, j in needed)

    @cached_property
    def costs(self) -> Costs:
        """Bytes sent, saved and buffered, per rank, for one batch row."""
        return plan_costs(
            self.method, self.shape, ulysses_degree=self.ulysses_degree, ring_degree=self.ring_degree, hops=self.hops
        )

    @property
    def shape(self) -> Shape:
        """The (padded) attention this plan is for."""
        return Shape(
            seq_len=self.pad_to,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )

    @property
    def crossover_size(self) -> int | None:
        """The smallest number of ranks at which Ulysses sends fewer bytes than the full ring; None if there is none."""
        return crossover_size(self.shape)

    def tiles(self, k_rank: int) -> tuple[Tile, ...]:
        """The tiles of this rank's queries with the keys of ring rank ``k_rank``."""
        key = (self.ring_rank, k_rank)
        if key not in self._tiles:
            self._tiles[key] = plan_tiles(
                self.ring_ranges[key[0]], self.ring_ranges[k_rank], self.cu_seqlens, causal=self.causal,
                window=self.window,
            )  # fmt: skip
        return self._tiles[key]

    def sequence_tiles(self) -> tuple[Tile, ...]:
        """The tiles of this rank's queries with the keys of the whole sequence, in its own order."""
        key = (self.ring_rank, -1)
        if key not in self._tiles:
            self._tiles[key] = plan_tiles(
                self.ring_ranges[key[0]], ((0, self.pad_to),), self.cu_seqlens, causal=self.causal, window=self.window
            )
        return self._tiles[key]

    def for_rank(self, rank: int) -> "Plan":
        """The same plan as another rank sees it."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank={rank} is outside the plan's {self.size} ranks. Use 0 to {self.size - 1}.")
        return replace(self, rank=rank)

    def explain(self) -> str:
        """Bytes, memory, work and balance, why this method and layout, and where the crossover lies; print it."""
        return explain_plan(self)

    def global_index(self, device: torch.device | str = "cpu") -> Tensor:
        """The place of each local token in the (padded) sequence, shape ``[local_len]``, int64."""
        return _tokens.range_index(self.shard_ranges[self.rank], device)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """The position of each local token in its document, for rotary embeddings: shape ``[local_len]``, int64."""
        return _tokens.document_positions(self.shard_ranges[self.rank], self.cu_seqlens, device)

    def shard(self, x: Tensor, dim: int = 1, *, pad_value: float = 0) -> Tensor:
        """The tokens this rank holds, in ascending order. A new tensor; differentiable; no communication.

        Args:
            x: The sequence, ``seq_len`` tokens along ``dim``.
            dim: The sequence dim.
            pad_value: What padding tokens hold, if the plan pads.

        Returns:
            ``local_len`` tokens along ``dim``.

        Raises:
            ValueError: If ``x`` is not ``seq_len`` long along ``dim``.
        """
        return _tokens.shard(x, dim, self.shard_ranges[self.rank], self.seq_len, self.pad_to, pad_value)

    def unshard(self, x: Tensor, dim: int = 1, *, group: dist.ProcessGroup | None) -> Tensor:
        """The whole sequence from every rank's tokens, padding removed: the inverse of `shard`. One all-gather.

        Its gradient is that of the *sum* over ranks of what each rank computes from the result (one reduce-scatter). A
        loss that every rank computes alike must be divided by the number of ranks.

        Args:
            x: This rank's tokens, ``local_len`` along ``dim``.
            dim: The sequence dim.
            group: The context-parallel group, ``size`` ranks in the plan's order; None if ``size`` is 1.

        Raises:
            ValueError: If ``x`` is not ``local_len`` long along ``dim``, or the group does not fit the plan.
        """
        return _tokens.unshard(x, dim, self.shard_ranges, self.seq_len, group, self.rank)

    def shift_labels(self, tokens: Tensor, dim: int = -1, *, ignore_index: int = -100) -> Tensor:
        """Next-token labels of a whole sequence: ``tokens`` shifted by one, never across a document's end.

        Shift first, then shard with ``pad_value=ignore_index``: a rank's last token has its label on another rank.

        Args:
            tokens: Token ids, ``seq_len`` along ``dim``.
            dim: The sequence dim.
            ignore_index: Label of each document's last token.

        Returns:
            Labels, the shape of ``tokens``; a new tensor.
        """
        return _tokens.shift_labels(tokens, dim, self.cu_seqlens, self.seq_len, ignore_index)

    def _ranges(self, degree: int) -> tuple[Ranges, ...]:
        return plan_ranges(
            self.layout, self.cu_seqlens, degree, causal=self.causal, window=self.window, block_size=self.block_size
        )
