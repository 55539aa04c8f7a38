"""What a pipeline schedule costs when its stages are equal: the bubble, the microbatches in flight, whether backward is split.

The families of titan-pipeline have closed forms here, which a test holds to its simulator; a family that another package
registers, or a file, is simulated. Times are those of one microbatch on one rank, with forward and both halves of backward
a third each.
"""

from dataclasses import dataclass
from functools import lru_cache

from titan_pipeline import Schedule, find_family, simulate, verify

from titan_train.config import PipelineConfig
from titan_train.parallel.layout.run import plan_schedule
from titan_train.planner.setup import ON_A_V

SEARCHED = (
    "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv", "v_half", "v_min", "1f1b_v", "dualpipe_v", "zb_h2",
    "gpipe", "looped_bfs",
)  # fmt: skip
"""Families of the search, the plainest first. zb_auto is left out: it needs measured times and a memory limit."""
_FULL = frozenset({"dualpipe_v", "zb_h2"})
"""Families that need two microbatches a rank, or are another schedule with fewer."""
_HELD = 0.43
"""Of what a microbatch keeps, the part that waits from its input gradient to its weight gradient: titan-pipeline's default."""


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
        for v in dict.fromkeys(stages_of(name, v) for v in stages) if _fills(name, p, m) else ():
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
    family = find_family(name)
    if family is None or name not in (*SEARCHED, "zb_auto") or m < p or not _fills(name, p, m):
        return _simulated(name, p, v, m)
    bubble, first, last = _closed_form(name, p, v, m)
    return ScheduleCost(bubble, min(float(m), first), min(float(m), last), family.splits_backward, name in ON_A_V)


def _fills(name: str, p: int, m: int) -> bool:
    """Whether so many microbatches fill the ranks as the family's form has it."""
    if name == "zbv" and p < m < 2 * p:
        return False
    return m >= 2 * p if name in _FULL else stages_of(name, 0) > 0 or m % p == 0


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
        ValueError: As `plan_schedule`.
    """
    return plan_schedule(PipelineConfig(schedule=name, stages_per_rank=stages_of(name, v)), pp=p, microbatches=m)
