"""The families by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titan_pipeline._costs import Costs
from titan_pipeline._schedule import Schedule
from titan_pipeline.families._one_f_one_b import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from titan_pipeline.families._v_shaped import one_f_one_b_v, v_half, v_min
from titan_pipeline.families._zb_auto import zb_auto
from titan_pipeline.families._zero_bubble import dualpipe_v, interleaved_zb, zb_h1, zb_h2, zbv


@dataclass(frozen=True, slots=True)
class Family:
    """What a family accepts."""

    make: Callable[..., Schedule]
    chunks: tuple[int, int | None]
    """Fewest and most chunks a rank."""
    splits_backward: bool
    summary: str


FAMILIES: dict[str, Family] = {
    "gpipe": Family(gpipe, (1, 1), False, "all forwards, then all backwards"),
    "1f1b": Family(one_f_one_b, (1, 1), False, "one forward, one backward"),
    "interleaved_1f1b": Family(interleaved_1f1b, (1, None), False, "1F1B over several chunks a rank"),
    "looped_bfs": Family(looped_bfs, (1, None), False, "breadth-first over several chunks a rank"),
    "zb_h1": Family(zb_h1, (1, 1), True, "zero bubble with the memory of 1F1B"),
    "zb_h2": Family(zb_h2, (1, 1), True, "zero bubble with twice the memory of 1F1B"),
    "zb_auto": Family(zb_auto, (1, 1), True, "zero bubble for given costs and memory limit"),
    "interleaved_zb": Family(interleaved_zb, (1, None), True, "zero bubble over several chunks a rank"),
    "zbv": Family(zbv, (2, 2), True, "zero bubble on a V"),
    "v_half": Family(v_half, (2, 2), True, "half the memory of 1F1B, on a V"),
    "v_min": Family(v_min, (2, 2), True, "a third of the memory of 1F1B, on a V"),
    "dualpipe_v": Family(dualpipe_v, (2, 2), True, "overlapped forward and backward pairs, on a V"),
    "1f1b_v": Family(one_f_one_b_v, (2, 2), False, "whole backwards on a V"),
}


def build_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    costs: Costs | None = None,
    mem_limit: float | Sequence[float] | None = None,
) -> Schedule:
    """Make a schedule by family name.

    Args:
        name: A key of `FAMILIES`.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches a step.
        num_chunks: Stages a rank; by default the fewest of the family, but 2 for those made for several.
        costs: For ``zb_auto`` only.
        mem_limit: For ``zb_auto`` only.

    Raises:
        ValueError: For an unknown name, or numbers the family cannot serve; the message says which can.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise ValueError(f"schedule {name!r} is unknown. Use one of {', '.join(FAMILIES)}.")
    if num_ranks < 1 or num_microbatches < 1:
        raise ValueError(f"num_ranks={num_ranks}, num_microbatches={num_microbatches}: both must be at least 1.")
    low, high = family.chunks
    if num_chunks is None:
        num_chunks = low if high is not None else 2
    if num_chunks < low or (high is not None and num_chunks > high):
        wanted = f"exactly {low}" if low == high else f"at least {low}"
        raise ValueError(
            f"num_chunks={num_chunks}: {name} places {wanted} stage(s) on a rank. Use that, or interleaved_1f1b, "
            "looped_bfs or interleaved_zb, which take any number."
        )
    if name == "zb_auto":
        return zb_auto(num_ranks, num_microbatches, costs, mem_limit)
    if costs is not None or mem_limit is not None:
        raise ValueError(f"{name} has a fixed order; only zb_auto takes costs and mem_limit. Use solve() to combine.")
    if high is None:
        return family.make(num_ranks, num_microbatches, num_chunks)
    return family.make(num_ranks, num_microbatches)
