"""State layers in float64, a token at a time: what the chunked and the context-parallel forms are compared with."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def reference_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | None = None,
    scale: float | None = None,
) -> Tensor:
    """`linear_attention` over whole sequences on one device, in float64, with plain differentiable operations.

    Args:
        q: Queries, shape ``[B, Hk, S, K]``.
        k: Keys, shape ``[B, Hk, S, K]``.
        v: Values, shape ``[B, H, S, V]``; ``Hk`` divides ``H``.
        decay: Log-decay, ``[B, H, S]`` or ``[B, H, S, K]``.
        beta: ``[B, H, S]``; None for no delta rule.
        cu_seqlens: Document boundaries, in tokens; None for one document. The state is zero at the start of each.
        scale: Factor on the queries; None for ``1/sqrt(K)``.

    Returns:
        float64, shape ``[B, H, S, V]``.
    """
    groups = v.shape[1] // k.shape[1]
    q, k = (x.double().repeat_interleave(groups, dim=1) for x in (q, k))
    q = q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    v = v.double()
    keep = (decay.unsqueeze(-1) if decay.ndim == 3 else decay).double().exp()
    starts = set((0,) if cu_seqlens is None else cu_seqlens)
    outputs: list[Tensor] = []
    state = v.new_zeros((*v.shape[:2], k.shape[-1], v.shape[-1]))
    for t in range(v.shape[2]):
        state = torch.zeros_like(state) if t in starts else state * keep[:, :, t].unsqueeze(-1)
        value, key = v[:, :, t], k[:, :, t]
        if beta is not None:
            value = beta[:, :, t, None].double() * (value - (key.unsqueeze(-2) @ state).squeeze(-2))
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        outputs.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=2)
