"""Attention sinks: a learned logit for each head that takes part in the softmax and brings no value (gpt-oss).

A sink is one more key, whose score is the same number for every query of a head and whose value is zero. No fused kernel has
sinks, but any kernel has keys. So keys get channels of their own: they are zero, but for the sink's key, where the first is 1;
queries hold the sink's logit there. That is exact, gradients too, and costs 8 channels and one token a document.

Under context parallelism `titan_cp.attention` merges sinks by the log-sum-exp instead.

Shapes: B batch, S tokens of a row, H query heads, K key-value heads, D key width, E value width, N documents.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_train.models.common.packed import packed_attention

_CHANNELS = 8
"""Added to keys, of which one is used: kernels want multiples of 8."""


def with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and mask with the sinks' key before the others: attention of these has the sinks.

    Args:
        q: ``[B, H, S, D]``.
        k: ``[B, K, S, D]``.
        v: ``[B, K, S, E]``.
        mask: Boolean, ``[..., S, S]``, True where a query may look.
        sinks: ``[H]``.
    """
    wide = F.pad(k, (0, _CHANNELS))
    keys = torch.cat([_sink_key(wide).expand(*k.shape[:2], 1, -1), wide], dim=2)
    return _queries(q, sinks[:, None, None]), keys, F.pad(v, (0, 0, 1, 0)), F.pad(mask, (1, 0), value=True)


def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, boundaries: Tensor | None) -> Tensor:
    """Causal attention inside each document, with sinks; memory linear in the tokens.

    Args:
        q: ``[B, S, H, D]``.
        k: ``[B, S, K, D]``.
        v: ``[B, S, K, E]``.
        sinks: ``[H]``.
        boundaries: Of the documents of all rows, as `titan_train.models.common.packed.packed_boundaries` gives them; None:
            a row is one document.

    Returns:
        ``[B, S, H, E]``.
    """
    rows, length = q.shape[:2]
    if boundaries is None:
        boundaries = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device)
    documents = boundaries.shape[0] - 1
    tokens = torch.arange(rows * length, device=q.device)
    # a token moves on by the sinks' keys before it: those of the documents before, and its own's
    places = tokens + torch.searchsorted(boundaries, tokens.to(boundaries.dtype), right=True)
    firsts = (boundaries[:-1] + torch.arange(documents, device=q.device)).long()

    def spread(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat.new_zeros((flat.shape[0] + documents, *flat.shape[1:])).index_copy(0, places, flat)

    keys = spread(F.pad(k, (0, _CHANNELS)))
    keys = keys.index_copy(0, firsts, _sink_key(keys).expand(documents, *keys.shape[1:]))
    out = packed_attention(
        spread(_queries(q, sinks[:, None])),
        keys,
        spread(v),
        boundaries + torch.arange(documents + 1, dtype=boundaries.dtype, device=q.device),
        longest=length + 1,
    )
    return out.index_select(0, places).unflatten(0, (rows, length))


def _queries(q: Tensor, sinks: Tensor) -> Tensor:
    """Queries whose scores with keys of more channels are what they were, and with the sinks' key the sinks."""
    width = q.shape[-1]
    wide = width + _CHANNELS
    own = (sinks * wide**0.5).to(q.dtype).expand(*q.shape[:-1], 1)
    return torch.cat([q * (wide / width) ** 0.5, own, q.new_zeros((*q.shape[:-1], _CHANNELS - 1))], dim=-1)


def _sink_key(keys: Tensor) -> Tensor:
    """The sinks' key ``[D + 8]``, for keys that have the channels already."""
    channels = torch.arange(keys.shape[-1], device=keys.device)
    return (channels == keys.shape[-1] - _CHANNELS).to(keys.dtype)
