"""What ``auto`` means, each choice with its reason. The rules are few and stated; nothing is measured at run time.

Method: the fewest bytes forward + backward among the ring, Ulysses, and USP at each degree, USP only where Ulysses
itself is impossible (it needs two groups). All-gather is never chosen: it sends about what the ring does, and holds the
keys of the whole sequence; it is there for kernels that must see them all at once. Of packed documents the ring sends only
the keys that are seen, see `titan_cp.planning.exchange`, and is counted so; the all-to-alls of Ulysses cannot know.

Layout: the balanced one. Ulysses is balanced by heads, so its tokens stay in order.
"""

import functools
from collections.abc import Sequence

from titan_cp.planning.checks import divisors
from titan_cp.planning.costs import AttentionShape, plan_costs, total_bytes
from titan_cp.planning.documents import BALANCED, deal_documents, work_of
from titan_cp.planning.exchange import rows_needed
from titan_cp.planning.layouts import layout_multiple, plan_ranges
from titan_cp.planning.ranges import Ranges

DIRECT = 0.5
"""Up to this share of the others' keys, keys go straight to the ranks that see them."""


def choose_method(
    method: str,
    shape: AttentionShape,
    size: int,
    ulysses_degree: int | None,
    *,
    ring_share: float = 1.0,
) -> tuple[str, str]:
    """The method, and why.

    Args:
        method: As asked for.
        shape: Of the attention.
        size: Ranks.
        ulysses_degree: As asked for.
        ring_share: Of the others' keys that the ring brings to a rank; see `packed_ring_share`.
    """
    if method != "auto":
        return method, f"method={method!r} was asked for"
    if size == 1:
        return "ring", "one rank: nothing is sent"
    candidates: dict[str, float] = {"ring": ring_share * _bytes("ring", shape, 1, size)}
    if shape.num_heads % size == 0:
        candidates["ulysses"] = _bytes("ulysses", shape, size, 1)
    else:
        degree = best_ulysses_degree(shape, size)
        if degree > 1:
            candidates["usp"] = _bytes("usp", shape, degree, size // degree)
    chosen = min(candidates, key=lambda name: (candidates[name], name != "ulysses"))
    if not candidates[chosen]:
        return chosen, "auto: every document stays on one rank, so nothing is sent"
    # Bytes are per token here: the sequence length cancels.
    others = ", ".join(
        f"{name} {value / candidates[chosen]:.2f}×" for name, value in candidates.items() if name != chosen
    )
    if chosen == "ring" and not others:
        return chosen, "auto: the only one possible"
    packed = f", as packed documents need {ring_share:.1%} of a ring" if ring_share < 1 else ""
    return chosen, f"auto: fewest bytes forward + backward ({others} as many{packed})"


def packed_ring_share(
    cu_seqlens: Sequence[int], size: int, layout: str, *, causal: bool, window: int | None, block_size: int
) -> float:
    """Share of the other ranks' keys that the busiest rank of a ring is sent: 1 where the whole ring travels.

    Known before the layout is chosen for packed documents without a window, and for a layout that was asked for.
    """
    if size == 1 or len(cu_seqlens) <= 2 or (window is not None and layout == "auto"):
        return 1.0
    if layout in ("auto", "documents") and window is None:
        imbalance, share = _dealt(tuple(cu_seqlens), size, causal)
        if layout == "auto" and imbalance > BALANCED:
            return 1.0
    elif (window is None and layout in ("zigzag", "per_document")) or (
        cu_seqlens[-1] % layout_multiple(layout, size, block_size)
    ):
        return 1.0  # as in `AttentionPlan.direct`
    else:
        ranges = plan_ranges(layout, cu_seqlens, size, causal=causal, window=window, block_size=block_size)
        share = _share(ranges, cu_seqlens, causal=causal, window=window)
    return share if share <= DIRECT else 1.0


def _share(ranges: Sequence[Ranges], cu_seqlens: Sequence[int], *, causal: bool, window: int | None) -> float:
    size = len(ranges)
    needed = rows_needed(ranges, cu_seqlens, causal=causal, window=window).sum(axis=1)
    return float(needed.max()) / (cu_seqlens[-1] * (size - 1) / size)


def plan_degrees(method: str, shape: AttentionShape, size: int, ulysses_degree: int | None) -> tuple[int, int]:
    """``(Ulysses degree, ring degree)`` of a method."""
    if method == "ulysses":
        return size, 1
    if method == "usp":
        ulysses = ulysses_degree or best_ulysses_degree(shape, size)
        return ulysses, size // ulysses
    return 1, size


def best_ulysses_degree(shape: AttentionShape, size: int) -> int:
    """The divisor of ``size`` at which USP sends the fewest bytes; proper divisors first, then the largest."""
    legal = [u for u in divisors(size) if shape.num_heads % u == 0]
    proper = [u for u in legal if 1 < u < size] or legal
    return min(proper, key=lambda u: (_bytes("usp", shape, u, size // u), -u))


def choose_layout(
    layout: str,
    method: str,
    cu_seqlens: Sequence[int],
    ring_degree: int,
    *,
    causal: bool,
    window: int | None,
    block_size: int,
) -> tuple[str, str]:
    """The layout, and why."""
    if layout != "auto":
        return layout, f"layout={layout!r} was asked for"
    if method == "ulysses" or ring_degree == 1:
        return "contiguous", "auto: Ulysses balances by heads, tokens stay in order"
    packed = len(cu_seqlens) > 2
    if not causal and not packed and window is None:
        return "contiguous", "auto: without a causal mask every token costs the same"
    usual = "per_document" if packed else "zigzag"
    if packed and window is None:
        dealt = _documents_if_better(cu_seqlens, ring_degree, causal=causal)
        if dealt is not None:
            return "documents", dealt
    reasons = {
        "contiguous": "the window keeps it balanced, with the fewest ring hops",
        "per_document": "costs start again at each document, so each is split head and tail",
        "zigzag": "one document, so head and tail chunks are paired",
        "block": f"the window leaves {usual} unbalanced, so blocks are dealt out by cost",
    }
    if window is None:
        return usual, f"auto: {reasons[usual]}"
    # A window ends the growth of costs at some point: what is balanced then depends on the lengths, so look.
    imbalances: dict[str, float] = {}
    for name in ("contiguous", usual, "block"):
        if cu_seqlens[-1] % layout_multiple(name, ring_degree, block_size) == 0:
            ranges = plan_ranges(name, cu_seqlens, ring_degree, causal=causal, window=window, block_size=block_size)
            work = work_of(ranges, cu_seqlens, causal=causal, window=window)
            imbalances[name] = float(work.max() * ring_degree / work.sum())
            if imbalances[name] <= BALANCED:
                return name, f"auto: {reasons[name]} (imbalance {imbalances[name]:.3f})"
    if not imbalances:
        return usual, f"auto: {reasons[usual]}"
    best = min(imbalances, key=lambda name: imbalances[name])
    tried = ", ".join(f"{name} {value:.3f}" for name, value in imbalances.items())
    return best, f"auto: the least unbalanced with this window and length ({tried})"


def _documents_if_better(cu_seqlens: Sequence[int], ring_degree: int, *, causal: bool) -> str | None:
    """Why whole documents are better dealt out than split, None if they are not: balanced, and half the keys stay."""
    imbalance, share = _dealt(tuple(cu_seqlens), ring_degree, causal)
    if imbalance > BALANCED or share > DIRECT:
        return None
    return (
        f"auto: short documents stay whole, so a rank needs {share:.1%} of the others' keys (imbalance {imbalance:.3f})"
    )


@functools.lru_cache(maxsize=16)
def _dealt(cu_seqlens: tuple[int, ...], ring_degree: int, causal: bool) -> tuple[float, float]:
    """Imbalance of whole documents, and the share of the others' keys that the busiest rank needs."""
    bounds = cu_seqlens
    if bounds[-1] % ring_degree:
        bounds = (*bounds, -(-bounds[-1] // ring_degree) * ring_degree)
    ranges = deal_documents(bounds, ring_degree, causal)
    work = work_of(ranges, bounds, causal=causal, window=None)
    return float(work.max() * ring_degree / work.sum()), _share(ranges, bounds, causal=causal, window=None)


def _bytes(method: str, shape: AttentionShape, ulysses_degree: int, ring_degree: int) -> int:
    """Bytes forward + backward of a length that divides evenly, with the full number of hops."""
    even = AttentionShape(
        seq_len=ulysses_degree * ring_degree,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        dtype=shape.dtype,
    )
    return total_bytes(
        plan_costs(method, even, ulysses_degree=ulysses_degree, ring_degree=ring_degree, hops=ring_degree - 1)
    )
