"""What a pipeline schedule costs when its stages are equal: the bubble, the microbatches in flight, whether backward is split.

The families of titan-pipeline have closed forms here, which a test holds to its simulator; a family that another package
registers, or a file, is simulated. Times are those of one microbatch on one rank, with forward and both halves of backward
a third each.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from titan_pipeline import FAMILIES, build_schedule, find_family, simulate, verify
from titan_pipeline.ir.schedule import Schedule

from titan_train.planner.setup import ON_A_V

SEARCHED = (
    "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv", "v_half", "v_min", "1f1b_v", "dualpipe_v", "zb_h2",
    "gpipe", "looped_bfs",
)  # fmt: skip
"""Families of the search, the plainest first. zb_auto is left out: it needs measured times and a memory limit."""
_SPLIT = frozenset({"zb_h1", "zb_h2", "zb_auto", "interleaved_zb", "zbv", "v_half", "v_min", "dualpipe_v"})
_FULL = frozenset({"dualpipe_v", "zb_h2"})
"""Families that need two microbatches a rank, or are another schedule with fewer."""
_HELD = 0.43
"""Of what a microbatch keeps, the part that waits from its input gradient to its weight gradient: titan-pipeline's default."""
_INTERLEAVED = frozenset({"interleaved_1f1b", "interleaved_zb", "looped_bfs"})


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """One schedule for a number of ranks, stages and microbatches."""

    bubble: float
    """Idle time of a rank, in times of one microbatch on one rank."""
    first: float
    """Most microbatches that the first rank holds activations of."""
    last: float
    """The same for the last rank."""
    splits: bool
    """Gradients of inputs and of weights are computed apart."""
    on_a_v: bool
    """The first rank has the last stage too: embedding and head are on it."""

    def never_worse(self, other: "ScheduleCost") -> bool:
        """Whether this one is at least as good in everything."""
        return (
            self.bubble <= other.bubble
            and max(self.first, self.last) <= max(other.first, other.last)
            and self.splits <= other.splits
            and self.on_a_v <= other.on_a_v
        )


@lru_cache(maxsize=65536)
def schedules_for(p: int, m: int, layers: int, stages: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Families of the search that serve these numbers, with their stages per rank.

    Left out is what another family with as few stages equals or beats in bubble, memory, split and placement alike.
    """
    legal: list[tuple[str, int, ScheduleCost]] = []
    for name in SEARCHED:
        if (name == "zbv" and p < m < 2 * p) or (name in _INTERLEAVED and m % p) or (name in _FULL and m < 2 * p):
            continue
        for v in stages if name in _INTERLEAVED else (stages_of(name),):
            if p * v <= layers:
                legal.append((name, v, schedule_cost(name, p, v, m)))
    kept: list[tuple[str, int, ScheduleCost]] = []
    for name, v, cost in legal:
        others = [o for o in legal if o[:2] != (name, v) and o[1] <= v and o[2].never_worse(cost)]
        if not any(not cost.never_worse(o[2]) or o[1] < v or o in kept for o in others):
            kept.append((name, v, cost))
    return tuple((name, v) for name, v, _ in kept)


def stages_of(name: str, interleaved: int = 2) -> int:
    """Stages per rank of a family: its own number, or ``interleaved`` where it takes any."""
    family = find_family(name)
    if family is None:
        return 1
    low, high = family.chunks
    return interleaved if high is None else low


@lru_cache(maxsize=65536)
def schedule_cost(name: str, p: int, v: int, m: int) -> ScheduleCost:
    """The costs of schedule ``name`` over ``p`` ranks with ``v`` stages each and ``m`` microbatches.

    Raises:
        ValueError: Neither a family nor a file, or it cannot serve these numbers.
    """
    if (
        (name == "zbv" and p < m < 2 * p)
        or (name in _INTERLEAVED and m % p)
        or (name in _FULL and m < 2 * p)
        or name not in (*SEARCHED, "zb_auto")
        or m < p
    ):
        return _simulated(name, p, v, m)
    bubble, first, last = _closed_form(name, p, v, m)
    return ScheduleCost(bubble, min(float(m), first), min(float(m), last), name in _SPLIT, name in ON_A_V)


def _closed_form(name: str, p: int, v: int, m: int) -> tuple[float, float, float]:
    """Bubble, and microbatches in flight on the first and last rank; upper bounds on those of split schedules."""
    idle = p - 1.0
    if name == "1f1b":
        return (idle, p, 1.0) if v == 1 else (idle / v, p + idle / v, p - idle / v)
    if name == "interleaved_1f1b":
        return idle / v, p + idle / v, p - idle / v
    if name == "zbv":
        return idle / (3 if m == p else 6), p, p  # p microbatches do not fill both arms of the V
    if name == "v_half":
        return (3 * idle if p % 2 == 0 else 3 * p - 4) / 6, (p + 2) // 2, (p + 2) // 2
    if name == "v_min":
        return (4 * p - (3 if p % 3 == 0 else 5)) / 6, (p + 4) // 3, (p + 4) // 3
    if name == "1f1b_v":
        return idle + (p - 1) % 3 / 6, 2 * p // 3 + 1, 2 * p // 3 + 1
    plain = {
        "gpipe": (idle, m, m),
        "looped_bfs": (idle / v, m, m),
        "zb_h1": (idle / 3, p, p - idle * (1 - _HELD)),
        "zb_h2": (idle / 3, 2 * p - 1, 2 * p - 1),
        "zb_auto": (idle / 3, m, m),
        "interleaved_zb": (idle / (3 * v), p, p - idle * (1 - _HELD) / v),
        "dualpipe_v": (idle / 6, p + 0.5, p + 0.5),
    }
    return plain[name]


def _simulated(name: str, p: int, v: int, m: int) -> ScheduleCost:
    schedule = schedule_of(name, p, v, m)
    family = find_family(name)
    splits = schedule.splits_backward if family is None else family.splits_backward
    waiting, peaks = simulate(schedule).makespan_bubble, verify(schedule).peak
    placement = schedule.placement
    return ScheduleCost(
        m * waiting / (1 - waiting), peaks[0], peaks[-1], splits, placement[-1] == placement[0] and p > 1
    )


def schedule_of(name: str, p: int, v: int, m: int) -> Schedule:
    """The schedule of a family, or of a file, for ``p`` ranks of ``v`` stages and ``m`` microbatches.

    Raises:
        ValueError: There is neither a family nor a file of this name, or it is for other numbers.
    """
    family = find_family(name)
    if family is not None:
        low, high = family.chunks
        return build_schedule(name, p, m, num_chunks=v if high is None or low <= v <= high else None)
    if Path(name).is_file():
        text = Path(name).read_text()
        schedule = Schedule.from_text(text) if text.lstrip().startswith("#") else Schedule.from_json(text)
        if (schedule.num_ranks, schedule.num_microbatches) != (p, m):
            raise ValueError(
                f"pipeline.schedule={name!r} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches; "
                f"this layout has {p} and {m}. Write one for these numbers with `titan-pipeline solve`."
            )
        return schedule
    raise ValueError(f"pipeline.schedule={name!r} is neither a family ({', '.join(FAMILIES)}) nor a file here.")
