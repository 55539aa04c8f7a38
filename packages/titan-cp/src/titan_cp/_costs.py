"""What each method costs: bytes sent, bytes kept, and query-key pairs computed. Closed forms, no ranks needed.

Per rank, one attention layer, one batch row. ``N`` ranks = ``u`` Ulysses × ``r`` ring, ``S`` tokens, ``Hq`` query
heads, ``Hk`` KV heads, ``D`` channels, ``b`` bytes an element, ``a`` bytes an accumulator (4; 8 for float64), ``h``
ring hops (``r - 1`` unless the window reaches fewer ranks)::

    ring        forward  h · KV                       KV = 2 (S/N) Hk D b
                backward h · KV + (h + 1) · dKV       dKV = 2 (S/N) Hk D a   (it also travels home)
    all-gather  forward  (N - 1) · KV
                backward (N - 1) · (KV + dKV)
    Ulysses     each way (2 Hq + 2 Hk') (S/N) D b (u - 1)/u,  Hk' = lcm(Hk, u): KV heads repeated where needed
    USP         Ulysses over u, then the ring over r with Hk'/u heads and S/r tokens

    saved for the backward   (S/N) ((2 Hq + 2 Hk) D b + Hq a), with Hk' for Hk under Ulysses: flat in N for S/N fixed

Source: byte counts as derived for ring attention (arXiv 2310.01889), DeepSpeed-Ulysses (arXiv 2309.14509) and USP
(arXiv 2405.07719), with float32 dKV.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from titan_cp._layout import Ranges, document_pieces
from titan_cp.backends._backend import accumulator_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Bytes per rank for one attention layer and one batch row."""

    forward_bytes: int
    """Sent in the forward."""
    backward_bytes: int
    """Sent in the backward."""
    saved_bytes: int
    """Kept from forward to backward."""
    forward_buffer_bytes: int
    """Transient in the forward: receive buffers, gathered keys, accumulators. Kernel workspace not counted."""
    backward_buffer_bytes: int
    """Transient in the backward, the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The attention whose cost is asked for."""

    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


def kv_heads_for(num_kv_heads: int, ulysses_degree: int) -> int:
    """KV heads after repeating them so that ``ulysses_degree`` ranks get equal, whole shares."""
    return math.lcm(num_kv_heads, ulysses_degree)


def plan_costs(method: str, shape: Shape, *, ulysses_degree: int, ring_degree: int, hops: int) -> Costs:
    """The closed forms of the module's docstring, for one rank."""
    size = ulysses_degree * ring_degree
    each = torch.empty((), dtype=shape.dtype).element_size() * shape.head_dim
    wide_element = torch.empty((), dtype=accumulator_dtype(shape.dtype)).element_size()
    wide = wide_element * shape.head_dim
    kv_heads = kv_heads_for(shape.num_kv_heads, ulysses_degree)
    tokens = shape.seq_len // size
    # Head-tokens a rank computes on: the same before and after the all-to-all.
    q_rows, kv_rows = tokens * shape.num_heads, tokens * kv_heads
    forward = backward = 0
    forward_buffers = q_rows * (each + 2 * wide + wide_element)
    backward_buffers = q_rows * wide + 2 * kv_rows * wide
    if ulysses_degree > 1:
        exchanged = (2 * q_rows + 2 * kv_rows) * each
        forward = backward = exchanged * (ulysses_degree - 1) // ulysses_degree
        forward_buffers += 2 * exchanged
        backward_buffers += 2 * exchanged
    kv, grad_kv = 2 * kv_rows * each, 2 * kv_rows * wide
    if method == "allgather":
        forward += (size - 1) * kv
        backward += (size - 1) * (kv + grad_kv)
        # One KV head at a time, the next one in flight: gathered, and in the order of the sequence.
        forward_buffers += 3 * size * kv // kv_heads
        backward_buffers += (3 * kv + 2 * grad_kv) * size // kv_heads
    elif hops:
        forward += hops * kv
        backward += hops * kv + (hops + 1) * grad_kv
        forward_buffers += 2 * kv
        backward_buffers += 2 * kv + 2 * grad_kv
    saved = (2 * q_rows + 2 * kv_rows) * each + q_rows * wide_element
    return Costs(
        forward_bytes=forward,
        backward_bytes=backward,
        saved_bytes=saved,
        forward_buffer_bytes=forward_buffers,
        backward_buffer_bytes=backward_buffers,
    )


def crossover_size(shape: Shape, limit: int = 4096) -> int | None:
    """The smallest number of ranks at which Ulysses sends fewer bytes (forward + backward) than the full ring.

    Only sizes that divide the query heads count, since Ulysses has no others. None if there is none.
    """
    for size in range(2, min(shape.num_heads, limit) + 1):
        if shape.num_heads % size:
            continue
        # The ratio does not depend on the length; one that every size divides keeps the arithmetic exact.
        even = Shape(
            seq_len=size, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            dtype=shape.dtype,
        )  # fmt: skip
        ring = plan_costs("ring", even, ulysses_degree=1, ring_degree=size, hops=size - 1)
        ulysses = plan_costs("ulysses", even, ulysses_degree=size, ring_degree=1, hops=0)
        if total_bytes(ulysses) < total_bytes(ring):
            return size
    return None


def total_bytes(costs: Costs) -> int:
    """Bytes sent in forward and backward."""
    return costs.forward_bytes + costs.backward_bytes


def work_matrix(
    ranges: Sequence[Ranges], cu_seqlens: Sequence[int], *, causal: bool, window: int | None
) -> NDArray[np.int64]:
    """Query-key pairs that rank ``i``'s queries have with rank ``j``'s keys, ``[i, j]``, counted in closed form."""
    size = len(ranges)
    by_document: dict[int, list[tuple[int, int, int]]] = {}
    for rank, held in enumerate(ranges):
        for document, start, stop, _ in document_pieces(held, cu_seqlens):
            by_document.setdefault(document, []).append((rank, start, stop))
    work = np.zeros((size, size), dtype=np.int64)
    for pieces in by_document.values():
        rank, start, stop = np.array(pieces, dtype=np.int64).T
        a, b = start[:, None], stop[:, None]
        c, d = start[None, :], stop[None, :]
        if causal:
            pairs = _pairs_at_least(0, a, b, c, d)
            if window is not None:
                pairs = pairs - _pairs_at_least(window, a, b, c, d)
        elif window is not None:
            pairs = _pairs_at_least(1 - window, a, b, c, d) - _pairs_at_least(window, a, b, c, d)
        else:
            pairs = (b - a) * (d - c)
        np.add.at(work, (rank[:, None], rank[None, :]), pairs)
    return work


def _pairs_at_least(
    distance: int, a: NDArray[np.int64], b: NDArray[np.int64], c: NDArray[np.int64], d: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Pairs ``q - k >= distance`` with ``q`` in ``[a, b)`` and ``k`` in ``[c, d)``."""

    def triangle(n: NDArray[np.int64]) -> NDArray[np.int64]:
        n = np.maximum(n, 0)
        return n * (n + 1) // 2

    a, b = a - distance, b - distance
    return triangle(b - c) - triangle(a - c) - triangle(b - d) + triangle(a - d)
