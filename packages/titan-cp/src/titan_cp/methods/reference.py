"""Full attention in float64: what every method of this package is compared with.

The whole score matrix, an explicit mask, plain differentiable torch operations and nothing clever. O(S²) memory.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Full attention over whole sequences, computed in float64 on one device.

    Args:
        q: Queries, shape ``[B, Hq, S, D]``, any float dtype.
        k: Keys, shape ``[B, Hk, S, D]``; ``Hk`` divides ``Hq``.
        v: Values, shape ``[B, Hk, S, D]``.
        causal: Whether a token attends only to itself and earlier tokens.
        window: A token attends to tokens less than ``window`` away; None for no limit.
        cu_seqlens: Document boundaries, in tokens; None for one document.
        scale: Factor on the scores; None for ``1/sqrt(D)``.
        sinks: A logit per query head, ``[Hq]``: one more key of that score and of value zero; None for none.

    Returns:
        ``(out, lse)``: float64, shapes ``[B, Hq, S, D]`` and ``[B, Hq, S]``; lse is the natural log-sum-exp of the
        scaled scores, sinks included. Differentiable in all tensors.
    """
    mask = attention_mask(q.shape[2], causal=causal, window=window, cu_seqlens=cu_seqlens, device=q.device)
    groups = q.shape[1] // k.shape[1]
    k64 = k.double().repeat_interleave(groups, dim=1)
    v64 = v.double().repeat_interleave(groups, dim=1)
    scores = q.double() @ k64.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    return torch.exp(scores - lse.unsqueeze(-1)) @ v64, lse


def attention_mask(
    seq_len: int,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The boolean mask of a whole packed sequence, True where a query sees a key, shape ``[S, S]``."""
    token = torch.arange(seq_len, device=device)
    distance = token[:, None] - token[None, :]
    mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device)
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance.abs() < window
    if cu_seqlens is not None:
        ends = torch.tensor(list(cu_seqlens)[1:], device=device)
        document = torch.bucketize(token, ends, right=True)
        mask &= document[:, None] == document[None, :]
    return mask
