"""The plan: who holds which tokens, who computes what, and what it costs. Pure; it needs no process group.

An `AttentionPlan` is made once for a sequence length or a packing, on every rank alike, and then handed to the attention
functions. It is the only place where layout, mask and method are stated, so they cannot disagree between the data
loader, the rotary positions and the attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.planning import tokens as token_moves
from titan_cp.planning.checks import (
    check_arguments,
    check_documents,
    legal_multiple,
    pad_documents,
    reject_length,
)
from titan_cp.planning.choose import choose_layout, choose_method, packed_ring_share, plan_degrees
from titan_cp.planning.costs import AttentionShape
from titan_cp.planning.explain import explain_plan
from titan_cp.planning.numbers import PlanNumbers


def plan(
    seq_len: int | None = None,
    *,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    size: int,
    rank: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    method: str = "auto",
    layout: str = "auto",
    ulysses_degree: int | None = None,
    causal: bool = True,
    window: int | None = None,
    block_size: int = 128,
    pad: bool = False,
) -> "AttentionPlan":
    """Plan context parallelism for one sequence length, or one packing of documents.

    Args:
        seq_len: Tokens of the whole sequence; may be left out if ``cu_seqlens`` is given.
        cu_seqlens: Boundaries of packed documents, ``[0, …, S]`` in tokens, strictly increasing; the same for every
            row of the batch. None for one document.
        size: Ranks in the context-parallel group.
        rank: This rank's number in that group.
        num_heads: Query heads (of this rank's tensors, if tensor parallelism has split them).
        num_kv_heads: KV heads, a divisor of ``num_heads``; None for as many.
        head_dim: Channels of a query or key head; for the byte counts.
        value_dim: Channels of a value head, at most ``head_dim``; None for as many. For the byte counts.
        dtype: Dtype of the queries; for the byte counts.
        method: ``ring``, ``allgather``, ``ulysses``, ``usp``, or ``auto``: the fewest bytes forward + backward.
        layout: ``contiguous``, ``zigzag``, ``per_document``, ``documents``, ``block``, or ``auto``: the balanced one that
            sends least.
        ulysses_degree: Ranks that share the heads under ``usp``; None for the divisor of ``size`` that sends least.
        causal: Whether a token attends only to itself and earlier tokens.
        window: A token attends to tokens less than ``window`` away; None for no limit.
        block_size: Tokens per block of the ``block`` layout.
        pad: Pad to the next legal length, as one more document that no other attends to.

    Returns:
        The plan, the same on every rank but for ``rank``.

    Raises:
        ValueError: If a length, head count, window or document boundary cannot work; the message names the nearest
            legal choice.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    check_arguments(
        size, rank, num_heads, num_kv_heads, (head_dim, value_dim), window, block_size, method, layout, ulysses_degree
    )
    documents = check_documents(seq_len, cu_seqlens)
    return _plan(
        documents, size, rank, num_heads, num_kv_heads, head_dim, value_dim, dtype, method, layout, ulysses_degree, causal,
        window, block_size, pad,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _plan(
    documents: tuple[int, ...], size: int, rank: int, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int,
    dtype: torch.dtype, method: str, layout: str, ulysses_degree: int | None, causal: bool, window: int | None,
    block_size: int, pad: bool,
) -> "AttentionPlan":  # fmt: skip
    """`plan` of checked arguments. Kept: the plan of a packing that comes again holds its tiles already."""
    wanted = documents[-1]
    shape = AttentionShape(
        seq_len=wanted, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim,
        dtype=dtype,
    )  # fmt: skip
    share = 1.0
    if method == "auto":
        share = packed_ring_share(documents, size, layout, causal=causal, window=window, block_size=block_size)
    chosen, method_reason = choose_method(method, shape, size, ulysses_degree, ring_share=share)
    ulysses, ring = plan_degrees(chosen, shape, size, ulysses_degree)
    layout, layout_reason = choose_layout(
        layout, chosen, documents, ring, causal=causal, window=window, block_size=block_size
    )
    multiple = legal_multiple(chosen, layout, size, ring, block_size)
    if wanted % multiple:
        if not pad:
            reject_length(wanted, multiple, layout, chosen, size)
        documents = pad_documents(documents, multiple)
    return AttentionPlan(
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
        value_dim=value_dim,
        dtype=dtype,
        block_size=block_size,
        reasons=(method_reason, layout_reason),
    )


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(PlanNumbers):
    """Who holds which tokens and who computes what; made by `plan`, which checks it."""

    def explain(self) -> str:
        """Bytes, memory, work and balance, why this method and layout, and where the crossover lies; print it."""
        return explain_plan(self)

    def global_index(self, device: torch.device | str = "cpu") -> Tensor:
        """The place of each local token in the (padded) sequence, shape ``[local_len]``, int64."""
        return token_moves.range_index(self.shard_ranges[self.rank], device)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """The position of each local token in its document, for rotary embeddings: shape ``[local_len]``, int64."""
        return token_moves.document_positions(self.shard_ranges[self.rank], self.cu_seqlens, device)

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
        held = self.shard_ranges[self.rank]

        def index() -> Tensor:
            return self.index_once(("held", x.device), lambda: token_moves.range_index(held, x.device))

        return token_moves.shard(x, dim, held, self.seq_len, self.pad_to, pad_value, index)

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

        def places() -> Tensor:
            return self.shard_order(x.device).places[: self.seq_len]

        return token_moves.unshard(x, dim, self.local_len, group, self.rank, self.size, places)

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
        return token_moves.shift_labels(tokens, dim, self.cu_seqlens, self.seq_len, ignore_index)
