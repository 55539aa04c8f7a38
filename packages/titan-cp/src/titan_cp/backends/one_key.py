"""Attention of rows that see one key each: no softmax, so no kernel either.

Problem: documents of one token make such tiles, many rows at a time (`titan_cp.planning.tiles`: a band of width one). A dense
kernel would need a mask for them, which FlashAttention and cuDNN do not take; and cuDNN takes no single key at all
(``check_cudnn_tensor_shapes`` in torch).

Idea: the output is the value, the log-sum-exp is the score, and the derivatives are products of one row with one row. Sums
are over channels and over heads that share a key.

Cost: O(rows · channels), in the accumulators' dtype.
"""

from torch import Tensor

from titan_cp.planning.costs import accumulator_dtype


def one_key_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of each row to its key.

    Args:
        q: Queries, shape ``[B, Hq, T, D]``.
        k: Row ``t`` is the key of query row ``t``, shape ``[B, Hk, T, D]``; or the key of all rows, ``[B, Hk, 1, D]``.
        v: Values of these keys, shape as ``k``, perhaps of other width.
        scale: Factor on the scores.

    Returns:
        ``(out, lse)``, shapes ``[B, Hq, T, E]`` and ``[B, Hq, T]``, float32 or float64.
    """
    wide = accumulator_dtype(q.dtype)
    grouped = _grouped(q, k.shape[1]).to(wide)
    scores = (grouped * k.to(wide).unsqueeze(2)).sum(-1) * scale
    out = v.to(wide).unsqueeze(2).expand(*grouped.shape[:-1], -1)
    return out.flatten(1, 2), scores.flatten(1, 2)


def one_key_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``, shaped as they are; ``out`` and ``lse`` are of the rows' whole attention."""
    wide, heads = accumulator_dtype(q.dtype), k.shape[1]
    grad_out, q, out, lse = (_grouped(x, heads).to(wide) for x in (grad_out, q, out, lse))
    k, v = (x.to(wide).unsqueeze(2) for x in (k, v))
    p = ((q * k).sum(-1) * scale - lse).exp().unsqueeze(-1)
    grad_scores = p * (grad_out * (v - out)).sum(-1, keepdim=True) * scale
    grad_k, grad_v = ((x * y).sum(2) for x, y in ((grad_scores, q), (p, grad_out)))
    if k.shape[3] == 1:  # one key for all rows
        grad_k, grad_v = grad_k.sum(2, keepdim=True), grad_v.sum(2, keepdim=True)
    return (grad_scores * k).flatten(1, 2), grad_k, grad_v


def _grouped(x: Tensor, heads: int) -> Tensor:
    """``[B, Hq, ...]`` to ``[B, Hk, Hq/Hk, ...]``."""
    return x.unflatten(1, (heads, x.shape[1] // heads))
