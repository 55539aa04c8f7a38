"""The attention functions: check the arguments against the plan, then run the method.

Tensors are ``[B, H, T, D]`` as in ``scaled_dot_product_attention``: batch, heads, this rank's tokens, channels. Every
check is made before any collective.
"""

import math
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from titan_cp.backends import Backend, Request, select
from titan_cp.methods.allgather import GatherSetup, allgather_apply, gather_sequence
from titan_cp.methods.compiling import graph_break
from titan_cp.methods.direct import direct_apply
from titan_cp.methods.ring import RingSetup, ring_apply
from titan_cp.methods.ulysses import heads_for_sequence, heads_of_rank, sequence_for_heads
from titan_cp.planning.groups import check_group
from titan_cp.planning.plan import AttentionPlan

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Local attention: queries ``[B, Hq, Tq, D]``, keys and values ``[B, Hk, Tk, D]`` to ``[B, Hq, Tq, D]``."""


@graph_break
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None = None,
    ring_group: dist.ProcessGroup | None = None,
    ulysses_group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor:
    """Attention by the plan's method: `ring_attention`, `allgather_attention`, `ulysses_attention` or `usp_attention`.

    Args:
        q: This rank's queries, shape ``[B, Hq, T, D]``.
        k: This rank's keys, shape ``[B, Hk, T, D]``.
        v: This rank's values, shape ``[B, Hk, T, E]``; ``E`` is at most ``D``, and never padded on its way.
        plan: The plan of this sequence length or packing.
        group: The context-parallel group, for every method but USP; None if the plan is for one rank.
        ring_group: USP's ring group.
        ulysses_group: USP's Ulysses group.
        scale: Factor on the scores; None for ``1/sqrt(D)``.
        sinks: A learned logit for each query head (gpt-oss), ``[Hq]``: one more key of that score and of value zero; None
            for none. Its gradient is this rank's part: sum it over the context-parallel group, as those of weights.
        backend: ``"auto"``, a name in `backends.BACKENDS`, or a `backends.Backend`.

    Raises:
        ValueError: If tensors, groups or backend do not fit the plan, before any communication.
    """
    if plan.method == "usp":
        if group is not None:
            raise ValueError(
                "plan.method='usp' needs two groups: pass ring_group and ulysses_group (the two axes of a 2-D "
                "DeviceMesh) instead of group."
            )
        return usp_attention(
            q,
            k,
            v,
            plan=plan,
            ring_group=ring_group,
            ulysses_group=ulysses_group,
            scale=scale,
            sinks=sinks,
            backend=backend,
        )
    if ring_group is not None or ulysses_group is not None:
        raise ValueError(
            f"plan.method={plan.method!r} takes group=, not ring_group or ulysses_group. Plan with method='usp' to use "
            "two groups."
        )
    method = {"ring": ring_attention, "allgather": allgather_attention, "ulysses": ulysses_attention}[plan.method]
    return method(q, k, v, plan=plan, group=group, scale=scale, sinks=sinks, backend=backend)


@graph_break
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor:
    """Ring attention: point-to-point, the next block's transfer behind this block's compute, forward and backward.

    Args:
        q: This rank's queries, shape ``[B, Hq, T, D]``.
        k: This rank's keys, shape ``[B, Hk, T, D]``; they travel with ``Hk`` heads, never repeated.
        v: This rank's values, shape ``[B, Hk, T, E]``, ``E <= D``.
        plan: A plan with ``method="ring"``.
        group: The context-parallel group, ``plan.size`` ranks; None for one rank.
        scale: Factor on the scores; None for ``1/sqrt(D)``.
        sinks: A logit per query head, as for `attention`; None for none.
        backend: ``"auto"``, a name in `backends.BACKENDS`, or a `backends.Backend`.

    Returns:
        The attention of this rank's queries with the keys of all ranks, ``[B, Hq, T, E]`` in the dtype of ``q``.
        Differentiable once.

    Raises:
        ValueError: If tensors, group or backend do not fit the plan, before any communication.
    """
    chosen = _check("ring", q, k, v, sinks, plan, backend)
    q, k, v = _channels_together(q, k, v)
    check_group(group, plan.size, plan.rank, "group")
    return _ring_or_direct(q, k, v, sinks, RingSetup(plan, group, chosen, _scale(scale, q)))


@graph_break
def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    backend: str | Backend = "auto",
    heads_per_step: int | None = None,
    attn_fn: AttentionFn | None = None,
) -> Tensor:
    """All-gather attention: the keys of all ranks, gathered a few heads at a time behind the compute.

    Args:
        q: This rank's queries, shape ``[B, Hq, T, D]``.
        k: This rank's keys, shape ``[B, Hk, T, D]``.
        v: This rank's values, shape ``[B, Hk, T, E]``, ``E <= D``.
        plan: A plan with ``method="allgather"``.
        group: The context-parallel group, ``plan.size`` ranks; None for one rank.
        scale: Factor on the scores; None for ``1/sqrt(D)``.
        sinks: A logit per query head, as for `attention`; None for none.
        backend: ``"auto"``, a name in `backends.BACKENDS`, or a `backends.Backend`.
        heads_per_step: KV heads gathered at a time: 1 needs the least memory, more make fewer, larger transfers. None: so
            many that what is gathered is at most 8 MiB for each row of the batch, or as large as this rank's own.
        attn_fn: A local attention of your own, in place of the plan's mask, ``scale`` and ``backend``: it is called
            once with this rank's queries and the keys of the whole sequence in order (all heads). Query row ``i`` is
            token ``plan.global_index()[i]``; FlexAttention masks go through `localize_mask`.

    Returns:
        The attention of this rank's queries, ``[B, Hq, T, E]`` in the dtype of ``q``. Differentiable once.

    Raises:
        ValueError: If tensors, group or backend do not fit the plan, before any communication.
    """
    chosen = _check("allgather", q, k, v, sinks, plan, backend)
    q, k, v = _channels_together(q, k, v)
    check_group(group, plan.size, plan.rank, "group")
    heads_per_step = plan.heads_per_step if heads_per_step is None else heads_per_step
    if not 1 <= heads_per_step <= plan.num_kv_heads:
        raise ValueError(
            f"heads_per_step={heads_per_step} is outside the {plan.num_kv_heads} KV heads. "
            f"Use 1 to {plan.num_kv_heads}."
        )
    if attn_fn is not None:
        _reject_sinks(sinks)
        return _call_local(attn_fn, q, *gather_sequence(k, v, plan, group))
    return allgather_apply(q, k, v, sinks, GatherSetup(plan, group, chosen, _scale(scale, q), heads_per_step))


@graph_break
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    backend: str | Backend = "auto",
    attn_fn: AttentionFn | None = None,
) -> Tensor:
    """Ulysses attention: an all-to-all around any local attention; KV heads are repeated when fewer than ranks.

    Args:
        q: This rank's queries, shape ``[B, Hq, T, D]``; ``plan.size`` divides ``Hq``.
        k: This rank's keys, shape ``[B, Hk, T, D]``.
        v: This rank's values, shape ``[B, Hk, T, E]``, ``E <= D``.
        plan: A plan with ``method="ulysses"``.
        group: The context-parallel group, ``plan.size`` ranks; None for one rank.
        scale: Factor on the scores; None for ``1/sqrt(D)``.
        sinks: A logit per query head, as for `attention`; None for none.
        backend: ``"auto"``, a name in `backends.BACKENDS`, or a `backends.Backend`.
        attn_fn: A local attention of your own, in place of the plan's mask, ``scale`` and ``backend``: it is called
            with ``Hq/N`` query heads (rounded up, with heads of zeros) and the whole sequence in order. FlexAttention fits.

    Returns:
        The attention of this rank's queries, ``[B, Hq, T, E]`` in the dtype of ``q``. Differentiable once.

    Raises:
        ValueError: If tensors, group or backend do not fit the plan, before any communication.
    """
    chosen = _check("ulysses", q, k, v, sinks, plan, backend)
    q, k, v = _channels_together(q, k, v)
    check_group(group, plan.size, plan.rank, "group")
    if attn_fn is not None:
        _reject_sinks(sinks)
    local_q, local_k, local_v = sequence_for_heads(q, k, v, plan, group)
    if attn_fn is not None:
        out = _call_local(attn_fn, local_q, local_k, local_v)
    else:
        out = ring_apply(
            local_q, local_k, local_v, heads_of_rank(sinks, plan), RingSetup(plan, None, chosen, _scale(scale, q))
        )
    return heads_for_sequence(out, plan, group)


@graph_break
def usp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: AttentionPlan,
    ring_group: dist.ProcessGroup | None,
    ulysses_group: dist.ProcessGroup | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor:
    """Ulysses within, the ring across: heads are shared by ``ulysses_degree`` ranks, keys travel between such groups.

    Rank ``n`` of the context-parallel group is Ulysses rank ``n % ulysses_degree`` and ring rank ``n //
    ulysses_degree``: the axes ``("ring", "ulysses")`` of a 2-D DeviceMesh in that order.

    Args:
        q: This rank's queries, shape ``[B, Hq, T, D]``.
        k: This rank's keys, shape ``[B, Hk, T, D]``.
        v: This rank's values, shape ``[B, Hk, T, E]``, ``E <= D``.
        plan: A plan with ``method="usp"``.
        ring_group: The ranks with this rank's Ulysses number; None if the ring degree is 1.
        ulysses_group: The ranks with this rank's ring number; None if the Ulysses degree is 1.
        scale: Factor on the scores; None for ``1/sqrt(D)``.
        sinks: A logit per query head, as for `attention`; None for none.
        backend: ``"auto"``, a name in `backends.BACKENDS`, or a `backends.Backend`.

    Returns:
        The attention of this rank's queries, ``[B, Hq, T, E]`` in the dtype of ``q``. Differentiable once.

    Raises:
        ValueError: If tensors, groups or backend do not fit the plan, before any communication.

    Source:
        Fang and Zhao, "USP: A Unified Sequence Parallelism Approach" (arXiv 2405.07719).
    """
    chosen = _check("usp", q, k, v, sinks, plan, backend)
    q, k, v = _channels_together(q, k, v)
    check_group(ring_group, plan.ring_degree, plan.ring_rank, "ring_group")
    check_group(ulysses_group, plan.ulysses_degree, plan.rank % plan.ulysses_degree, "ulysses_group")
    local_q, local_k, local_v = sequence_for_heads(q, k, v, plan, ulysses_group)
    setup = RingSetup(plan, ring_group, chosen, _scale(scale, q))
    out = _ring_or_direct(local_q, local_k, local_v, heads_of_rank(sinks, plan), setup)
    return heads_for_sequence(out, plan, ulysses_group)


def _ring_or_direct(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setup: RingSetup) -> Tensor:
    return (direct_apply if setup.plan.direct else ring_apply)(q, k, v, sinks, setup)


def _reject_sinks(sinks: Tensor | None) -> None:
    if sinks is not None:
        raise ValueError(
            "sinks and attn_fn were both given: a local attention of your own adds sinks itself. Drop one."
        )


def _check(
    method: str, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: AttentionPlan, backend: str | Backend
) -> Backend:
    if plan.method != method:
        raise ValueError(
            f"{method}_attention got a plan with method={plan.method!r}. Plan with method={method!r}, or call "
            "attention(), which follows the plan."
        )
    for name, x, heads in (("q", q, plan.num_heads), ("k", k, plan.num_kv_heads), ("v", v, plan.num_kv_heads)):
        want = (q.shape[0], heads, plan.local_len, x.shape[-1] if name == "v" else q.shape[-1])
        if x.ndim != 4 or tuple(x.shape) != want:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but the plan wants [batch, heads, local tokens, channels] = "
                f"[{', '.join(map(str, want))}]. Shard with plan.shard, keep {heads} heads "
                "(do not repeat KV heads), and transpose [B, T, H, D] to [B, H, T, D]."
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}: they must agree. "
                "Cast before attention."
            )
    if v.shape[-1] > q.shape[-1]:
        raise ValueError(
            f"v has {v.shape[-1]} channels and q has {q.shape[-1]}: values may be narrower than queries and keys, not "
            "wider. Split the values' channels over two calls."
        )
    if sinks is not None and (tuple(sinks.shape) != (plan.num_heads,) or sinks.device != q.device):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)} on {sinks.device}, but the plan has {plan.num_heads} query heads and q is "
            f"on {q.device}. Pass one logit per query head: shape [{plan.num_heads}]."
        )
    request = Request(q.device, q.dtype, q.shape[-1], len(plan.cu_seqlens) > 2, plan.window is not None)
    return select(backend, request, q)


def _channels_together(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each with the channels of a head side by side in memory: torch's private operators take no others, and do not say so."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def _scale(scale: float | None, q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _call_local(attn_fn: AttentionFn, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attn_fn(q, k, v)
    if out.shape != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(
            f"attn_fn returned shape {tuple(out.shape)} for queries {tuple(q.shape)} and values {tuple(v.shape)}. It must "
            "return [B, Hq, Tq, E] with the values' channels; a "
            "kernel that returns (out, lse) or [B, T, H, D] needs a small wrapper."
        )
    return out
