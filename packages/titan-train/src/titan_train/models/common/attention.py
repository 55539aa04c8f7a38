"""Causal attention over rows of packed documents, in one replaceable module.

A row of a batch may hold several documents. Attention then must not cross from one into another:
the mask is causal inside each document and closed outside. `SequenceContext` carries what every layer needs to know
about the rows (positions, documents, rotary angles); it is computed once per forward and handed to every block.

`CausalAttention` has no parameters. It is a module, rather than a function, so that something outside the model can
replace it: the key-value cache of generation and ring attention do.

Memory is linear in S: the fused causal kernel, or one document after the other (`titan_train.models.common.packed`).

Shapes: B batch, S sequence, T keys, H query heads, K key-value heads, D head width, N documents of a row (padded).
"""

from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.models.common.packed import packed_attention, packed_boundaries
from titan_train.models.common.sinks import sink_attention

# FSDP2 casts the floating-point tensors that it finds in a block's arguments to the parameters' dtype, also in tuples and in the
# fields of dataclasses. Rotary angles are to stay float32: ``rope`` is an attribute, but no field.
_Rope = tuple[Tensor, Tensor] | None
if not TYPE_CHECKING:  # type checkers refuse to read what is given this way
    _Rope = InitVar[_Rope]


@dataclass(frozen=True)
class SequenceContext:
    """Where each token of a batch sits; the same for every layer."""

    positions: Tensor
    """Position of each token in its document, ``[B or 1, S]`` int64."""
    cu_seqlens: Tensor | None = None
    """Cumulative document lengths ``[B, N + 1]`` int32 from 0 to S, padded by repeating S; None: one document a row."""
    boundaries: Tensor | None = None
    """Of the documents of all rows, from `packed_boundaries`; None: each layer takes them from ``cu_seqlens``."""
    rope: _Rope = None
    """Cosine and sine of the rotary angles, each ``[B or 1, S, 1, D / 2]`` float32, for models that rotate."""
    attention_plan: Any = None
    """For what replaces `CausalAttention`: context parallelism's plan of these rows. The boundaries are then None, as
    the plan knows the documents."""
    padding: Tensor | None = None
    """Which tokens only fill a row, ``[B, S]`` bool, for a mixture of experts; None: there are none."""

    def __post_init__(self, rope: _Rope) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        object.__setattr__(self, "rope", rope)


class CausalAttention(nn.Module):
    """Scaled dot-product attention in which a token sees itself and what precedes it in its document."""

    window: int = 0
    """Tokens that a query of this layer sees, itself included, where what calls it has a sliding window; FLOP counting reads
    it. 0: all."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, *, value_dim: int | None = None) -> None:
        """Record the shape, which FLOP counting and context parallelism read; there are no parameters.

        Args:
            num_heads: H.
            num_kv_heads: K.
            head_dim: D.
            value_dim: E, channels of a value, at most D; None takes D.
        """
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend.

        Args:
            q: Queries ``[B, S, H, D]``.
            k: Keys ``[B, S, K, D]``.
            v: Values ``[B, S, K, E]``.
            context: Of this batch.
            sinks: A learned logit for each head, ``[H]``: one more key of that score and of value zero; None for none.

        Returns:
            ``[B, S, H, E]``, in the dtype of ``q``.
        """
        boundaries = context.boundaries
        if boundaries is None and context.cu_seqlens is not None:  # of a user's model
            boundaries = packed_boundaries(context.cu_seqlens, q.shape[1])
        if sinks is not None:
            return sink_attention(q, k, v, sinks, boundaries)
        if boundaries is not None:
            out = packed_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), boundaries, longest=q.shape[1])
            return out.unflatten(0, q.shape[:2])
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention through torch's fused kernels.

    Args:
        q: ``[B, H, S, D]``.
        k: ``[B, K, T, D]``; K divides H.
        v: ``[B, K, T, E]``; E is at most D.
        mask: Boolean, broadcastable to ``[B, H, S, T]``, True where a query may look; None is causal with S = T.

    Returns:
        ``[B, H, S, E]``.
    """
    channels = v.shape[-1]
    if channels < q.shape[-1] and not q.is_cuda:  # the CPU's flash kernel needs values as wide as keys
        v = F.pad(v, (0, q.shape[-1] - channels))
    groups = q.shape[1] // k.shape[1]
    if mask is not None and groups > 1:
        # No kernel with a mask groups heads: torch would repeat every key. The queries of a group see the same keys by the
        # same mask, so they can be concatenated in one head.
        rows = mask.expand(q.shape[0], 1, q.shape[2], k.shape[2]).repeat(1, 1, groups, 1)
        folded = q.unflatten(1, (k.shape[1], groups)).flatten(2, 3)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=rows)
        return out.unflatten(2, (groups, q.shape[2])).flatten(1, 2)[..., :channels]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1)
    return out[..., :channels]


def document_positions(cu_seqlens: Tensor, seq_len: int) -> Tensor:
    """Positions that restart at every document.

    Args:
        cu_seqlens: ``[B, N + 1]``, see `SequenceContext`.
        seq_len: S.

    Returns:
        ``[B, S]`` int64.
    """
    places = torch.arange(seq_len, device=cu_seqlens.device)
    starts = cu_seqlens.long().gather(1, document_numbers(cu_seqlens, places) - 1)
    return places - starts


def row_positions(seq_len: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Positions of rows that bring none: from each document's start, or from the row's without documents.

    Args:
        seq_len: S.
        cu_seqlens: ``[B, N + 1]``, see `SequenceContext`; None: every row is one document.
        device: Where they go.

    Returns:
        ``[B, S]`` int64, or ``[1, S]`` without documents.
    """
    if cu_seqlens is not None:
        return document_positions(cu_seqlens, seq_len)
    return torch.arange(seq_len, device=device).unsqueeze(0)


def document_mask(cu_seqlens: Tensor, seq_len: int) -> Tensor:
    """The block-causal mask of packed rows: what `packed_attention` computes without it.

    Args:
        cu_seqlens: ``[B, N + 1]``, see `SequenceContext`.
        seq_len: S.

    Returns:
        ``[B, 1, S, S]`` bool: True where the key is in the query's document and not after the query.
    """
    places = torch.arange(seq_len, device=cu_seqlens.device)
    document = document_numbers(cu_seqlens, places)
    same = document[:, :, None] == document[:, None, :]
    return (same & (places[:, None] >= places[None, :])).unsqueeze(1)


def document_numbers(cu_seqlens: Tensor, places: Tensor) -> Tensor:
    """The document each place is in, counted from 1, ``[B, S]``: how many documents have started by then.

    Args:
        cu_seqlens: ``[B, N + 1]``, see `SequenceContext`.
        places: ``[S]``, places in a row.
    """
    rows = places.to(cu_seqlens.dtype).expand(cu_seqlens.shape[0], -1).contiguous()
    return torch.searchsorted(cu_seqlens.contiguous(), rows, right=True)
