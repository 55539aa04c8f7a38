"""What each method costs: bytes sent, bytes kept, and query-key pairs computed. Closed forms, no ranks needed.

Per rank, one attention layer, one batch row. ``N`` ranks = ``u`` Ulysses × ``r`` ring, ``S`` tokens, ``Hq`` query
heads, ``Hk`` KV heads, ``D`` channels of a query or key, ``E`` of a value, ``b`` bytes an element, ``a`` bytes an
accumulator (4; 8 for float64), ``h`` ring hops (``r - 1`` unless the window reaches fewer ranks)::

    ring        forward  h · KV                       KV = (S/N) Hk (D + E) b
                backward h · KV + (h + 1) · dKV       dKV = (S/N) Hk (D + E) a   (it also travels home)
    ... direct  forward  the rows that others see, Hk (D + E) b each; backward those again, and Hk (D + E) a for each row
                received (packed documents and windows, see `titan_cp.planning.exchange`)
    all-gather  forward  (N - 1) · KV
                backward (N - 1) · (KV + dKV)
    Ulysses     each way (Hq' + Hk') (S/N) (D + E) b (u - 1)/u,  Hk' = lcm(Hk, u): KV heads repeated where needed;
                Hq' = Hq where u divides it, otherwise with heads of zeros, see `share_heads`
    USP         Ulysses over u, then the ring over r with Hk'/u heads and S/r tokens

    saved for the backward   (S/N) ((Hq + Hk) (D + E) b + Hq a), with Hq', Hk' under Ulysses: flat in N for S/N fixed

Source: byte counts as derived for ring attention (arXiv 2310.01889), DeepSpeed-Ulysses (arXiv 2309.14509) and USP
(arXiv 2405.07719), with float32 dKV.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from titan_cp.planning.ranges import Ranges, document_pieces

# A collective of fewer bytes takes its start rather than its bytes.
_SMALL_BYTES = 8 << 20
# Up to so many ranks, blocks of one rank's keys are no more calls of the kernel than the pieces of the sequence.
_FEW_RANKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCosts:
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
class AttentionShape:
    """The attention whose cost is asked for."""

    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DirectRows:
    """Rows of keys that one rank sends and receives where they go straight to the ranks that see them."""

    sent: int
    received: int
    largest_round: int
    """Received at the same time."""


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial outputs and gradients of ``dtype`` tensors are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class HeadShares(NamedTuple):
    """Heads as Ulysses exchanges them: KV heads repeated, and heads of zeros added, so that ranks get equal, whole shares."""

    groups: int
    """KV heads before repeating, those of zeros included."""
    group_heads: int
    """Query heads per KV head, those of zeros included."""
    repeats: int
    """How often a KV head is repeated."""

    @property
    def num_heads(self) -> int:
        """Query heads that are exchanged."""
        return self.groups * self.group_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads that are exchanged."""
        return self.groups * self.repeats


def share_heads(num_heads: int, num_kv_heads: int, ulysses_degree: int) -> HeadShares:
    """How ``ulysses_degree`` ranks share the heads.

    None is added where the degree divides the query heads. Otherwise query heads are added to each KV head, and KV heads
    with theirs, whichever makes the fewest query heads, and of those the fewest KV heads.
    """
    per_group = num_heads // num_kv_heads
    most = num_kv_heads if num_heads % ulysses_degree == 0 else num_kv_heads + ulysses_degree - 1
    choices: list[HeadShares] = []
    for groups in range(num_kv_heads, most + 1):
        repeats = ulysses_degree // math.gcd(groups, ulysses_degree)
        choices.append(HeadShares(groups, -(-per_group // repeats) * repeats, repeats))
    return min(choices, key=lambda shares: (shares.num_heads, shares.num_kv_heads))


def gather_heads(shape: AttentionShape, size: int) -> int:
    """KV heads that the all-gather takes at a time: as many as make 8 MiB, or the size of this rank's keys and values."""
    element = torch.empty((), dtype=shape.dtype).element_size()
    head = shape.seq_len * (shape.head_dim + shape.value_dim) * element
    return max(1, min(shape.num_kv_heads, max(shape.num_kv_heads // size, _SMALL_BYTES // head)))


def gathers_by_rank(size: int, kv_heads: int, at_once: int) -> bool:
    """Whether all-gather attention takes the keys rank by rank, its own first: where a few ranks gather all heads at once."""
    return size <= _FEW_RANKS and at_once == kv_heads


def plan_costs(
    method: str,
    shape: AttentionShape,
    *,
    ulysses_degree: int,
    ring_degree: int,
    hops: int = 0,
    direct: DirectRows | None = None,
) -> AttentionCosts:
    """The closed forms of the module's docstring, for one rank; ``direct`` where keys do not go round the ring."""
    size = ulysses_degree * ring_degree
    element, wide_element = (
        torch.empty((), dtype=d).element_size() for d in (shape.dtype, accumulator_dtype(shape.dtype))
    )
    shares = share_heads(shape.num_heads, shape.num_kv_heads, ulysses_degree)
    heads, kv_heads = shares.num_heads, shares.num_kv_heads
    tokens = shape.seq_len // size
    # What a rank computes on has the same size before and after the all-to-all.
    q, out = (tokens * heads * dim * element for dim in (shape.head_dim, shape.value_dim))
    row = kv_heads * (shape.head_dim + shape.value_dim) * element
    kv, wide = tokens * row, wide_element // element
    lse = tokens * heads * wide_element
    exchanged = (q + out + kv) * (ulysses_degree - 1) // ulysses_degree
    buffers = _Buffers(q, out, kv, q * wide, out * wide, kv * wide, lse)
    if method == "allgather":
        forward, backward = (size - 1) * kv, (size - 1) * kv * (1 + wide)
        transient = buffers.allgather(size, kv_heads, gather_heads(shape, size))
    elif direct is not None:
        row //= ulysses_degree  # the all-to-all has shared the heads out
        forward = exchanged + direct.sent * row
        backward = exchanged + (direct.sent + direct.received * wide) * row
        transient = buffers.direct(direct.largest_round * row, wide)
    else:
        forward = exchanged + hops * kv
        backward = exchanged + hops * kv + (hops + 1) * kv * wide * (hops > 0)
        transient = buffers.ring(hops)
    if ulysses_degree > 1:
        transient = buffers.around_ulysses(transient, repeated=kv_heads > shape.num_kv_heads or heads > shape.num_heads)
    return AttentionCosts(
        forward_bytes=forward,
        backward_bytes=backward,
        saved_bytes=q + out + kv + lse,
        forward_buffer_bytes=transient[0],
        backward_buffer_bytes=transient[1],
    )


@dataclass(frozen=True)
class _Buffers:
    """What the code holds at its peak, on top of the arguments and of what is kept: ``(forward, backward)`` bytes.

    An estimate in multiples of the tensors' sizes, within 25 % of a memory profile (``tests/test_bytes_and_memory.py``).
    """

    q: int
    out: int
    kv: int
    """Keys and values together."""
    wide_q: int
    """Queries' size in the accumulators' dtype."""
    wide_out: int
    wide_kv: int
    lse: int

    @property
    def cast(self) -> int:
        """A block's output in the accumulators' dtype, where that is another than the queries'."""
        return self.wide_out if self.wide_out != self.out else 0

    def ring(self, hops: int) -> tuple[int, int]:
        """Two KV buffers; in the backward three dKV: computed, arriving, and leaving."""
        turns = 2 if hops else 1
        forward = self.wide_out + self.lse + self.out + self.cast + turns * self.kv
        backward = self.wide_q + turns * self.kv + (3 if hops else 1) * self.wide_kv + self.q + self.kv
        return forward, backward

    def direct(self, received: int, wide: int) -> tuple[int, int]:
        """The rows of one round twice (arriving, in order), its gradients twice, and the rank's own gradients."""
        forward = self.wide_out + self.lse + self.out + self.cast + 2 * received
        backward = self.wide_q + self.wide_kv + (2 + 2 * wide) * received + self.q + self.kv
        return forward, backward

    def allgather(self, size: int, kv_heads: int, at_once: int) -> tuple[int, int]:
        """Of the heads gathered at a time: in use, arriving, and in order; gradients: computed, reordered, in flight."""
        some, wide = (size * x * at_once // kv_heads for x in (self.kv, self.wide_kv))
        block = (self.out + self.cast) * at_once // kv_heads
        turns = 3 if at_once < kv_heads else 2
        blocks = 1 if gathers_by_rank(size, kv_heads, at_once) else turns
        forward = self.wide_out + self.lse + self.kv + block + turns * some  # gloo holds twice what arrives
        backward = self.wide_q + 2 * self.kv + blocks * some + turns * wide + block
        return forward, backward

    def around_ulysses(self, inner: tuple[int, int], *, repeated: bool) -> tuple[int, int]:
        """The exchange sends, receives and reorders queries, keys and values; or the attention inside is the peak."""
        one = self.q + self.kv
        forward = max(3 * one + self.kv * repeated, one + inner[0])
        backward = max(4 * one, one + self.q + inner[1])
        return forward, backward


def crossover_size(shape: AttentionShape, limit: int = 4096) -> int | None:
    """The smallest number of ranks at which Ulysses sends fewer bytes (forward + backward) than the full ring.

    Only sizes that divide the query heads count, where none is added. None if there is none.
    """
    for size in range(2, min(shape.num_heads, limit) + 1):
        if shape.num_heads % size:
            continue
        # The ratio does not depend on the length; one that every size divides keeps the arithmetic exact.
        even = AttentionShape(
            seq_len=size, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            value_dim=shape.value_dim, dtype=shape.dtype,
        )  # fmt: skip
        ring = plan_costs("ring", even, ulysses_degree=1, ring_degree=size, hops=size - 1)
        ulysses = plan_costs("ulysses", even, ulysses_degree=size, ring_degree=1, hops=0)
        if total_bytes(ulysses) < total_bytes(ring):
            return size
    return None


def total_bytes(costs: AttentionCosts) -> int:
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


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A block without autocast; on devices that have none (meta), nothing."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
