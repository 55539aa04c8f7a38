"""What holds a run up: one rank, one stage, one link, one data source.

Ranks of a run finish their steps together, so a slow one does not show in step times. It shows in its own time: every
other rank waits for it in collectives, and it waits for none.

    a rank's data phase far above the others'          its data source is slow
    all ranks of a stage above the other stages,
      by what their layers explain                     the stages are unbalanced
    a rank's own time far above those of its stage     the rank is slow: its host, or its compute
    no rank is late, but even the shortest call of a
      group takes long                                 the link is slow

A busy machine makes any step of any rank late. So ranks are compared by quarters of their steps: a rank is slow if even its
quick steps take longer than the slow ones of the others; of data, which comes in bursts, if its mean does.

The shortest call is one to which all ranks came together, so it is the link's own time. It is compared with the other
groups of the axis, and with the quickest window of the run so far.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_train.observe.timing.split import Place, StepSplit

_COMPUTE = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that makes the others wait."""

    kind: Literal["slow data", "slow rank", "unbalanced stage", "slow link"]
    ranks: tuple[int, ...]
    axis: str
    """The mesh axis on which the others wait; of a slow link, its own."""
    part: str
    """Which part of the step takes long: ``data``, ``host``, ``forward``, …; a link's is ``latency``."""
    excess_s: float
    """Seconds of a step more than where it is usual."""
    usual_s: float
    """What the same takes elsewhere, or took before."""
    stage: int | None = None

    @property
    def text(self) -> str:
        """One sentence."""
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        more = f"{1e3 * (self.usual_s + self.excess_s):.2f} ms against {1e3 * self.usual_s:.2f} ms"
        on = f" on axis {self.axis}" if self.axis else ""
        if self.kind == "slow link":
            return f"slow link on axis {self.axis} between {who}: the shortest call takes {more}"
        if self.kind == "unbalanced stage":
            return f"unbalanced pipeline: stage {self.stage} ({who}) computes {more} per step in the other stages"
        if self.kind == "slow data":
            return f"slow data source of {who}: a step waits {more} elsewhere for its batch; the others wait{on}"
        return f"slow {who}: {self.part} takes {more} per step elsewhere; the others wait{on}"

    def fields(self) -> dict[str, Any]:
        """The JSON values of the event ``straggler``."""
        return {
            "cause": self.kind,
            "ranks": list(self.ranks),
            "axis": self.axis,
            "part": self.part,
            "excess_ms": round(1e3 * self.excess_s, 3),
            "usual_ms": round(1e3 * self.usual_s, 3),
            "text": self.text,
        }


def find_causes(
    split: StepSplit, place: Place, *, share: float = 0.15, quickest: Mapping[tuple[str, int], float] | None = None
) -> list[Cause]:
    """What costs at least ``share`` of a step, the most expensive first; empty if the ranks are even.

    Args:
        split: The steps at hand.
        place: Which ranks meet on which axis.
        share: The least share of a step that is named.
        quickest: Seconds of the shortest call in earlier windows, by axis and group; see `shortest_calls`.
    """
    if len(split.rows) < 2:
        return []
    least_s = share * split.wall_s.median
    found = [*_late_ranks(split, place, least_s), *_unbalanced(split, place, least_s)]
    found += _slow_links(split, place, least_s, quickest or {})
    return sorted(found, key=lambda cause: -cause.excess_s)


def shortest_calls(split: StepSplit, place: Place) -> dict[tuple[str, int], float]:
    """Seconds of the shortest call of each group, by axis and number of the group.

    A collective ends for all ranks of a group together. So the rank that came last has the shortest, and the group's own is the
    smallest of its ranks'. A pipeline's message is timed from its arrival by the rank that reads it, and each rank by its own
    link: the group's own is the largest.
    """
    found: dict[tuple[str, int], float] = {}
    for axis, groups in place.groups.items():
        for number, ranks in enumerate(groups):
            calls = [s for rank in ranks if (s := split.latencies[rank].get(axis, 0.0)) > 0]
            if calls and len(ranks) > 1:
                messages = axis == "pp" and split.axes[axis].moving_s.most > 0  # a GPU's are not timed one by one
                found[axis, number] = max(calls) if messages else min(calls)
    return found


def _late_ranks(split: StepSplit, place: Place, least_s: float) -> list[Cause]:
    """Ranks whose own time is above that of the median of the ranks that do the same work."""
    causes: list[Cause] = []
    everybody = list(range(place.world_size))
    alike = [(part, everybody) for part in ("data", "host")]  # alike on all ranks
    alike += [(part, peers) for peers in _peers(place) for part in _COMPUTE]
    for part, peers in alike:
        if len(peers) > 1:
            usual = statistics.median_low([split.high[rank][part] for rank in peers])
            for rank in peers:
                value = split.rows[rank][part] if part == "data" else split.low[rank][part]
                if value - usual >= least_s:
                    kind = "slow data" if part == "data" else "slow rank"
                    causes.append(Cause(kind, (rank,), _waited_on(split, place, rank), part, value - usual, usual))
    return causes


def _unbalanced(split: StepSplit, place: Place, least_s: float) -> list[Cause]:
    """Stages that all their ranks compute longer than the other stages."""
    if len(set(place.stages)) < 2:
        return []
    ranks_of = {s: tuple(r for r, stage in enumerate(place.stages) if stage == s) for s in sorted(set(place.stages))}

    def computes(rows: Sequence[Mapping[str, float]]) -> dict[int, float]:
        return {s: min(rows[r]["forward"] + rows[r]["backward"] for r in ranks) for s, ranks in ranks_of.items()}

    seconds, low, high = computes(split.rows), computes(split.low), computes(split.high)
    slowest = max(low, key=lambda s: low[s])
    usual = statistics.median_low([value for s, value in high.items() if s != slowest])
    excess = low[slowest] - usual
    if excess < least_s:
        return []
    # ranks of a stage slow down together when it holds too much; of a stage of one rank, compare what it holds
    first = ranks_of[slowest]
    if len(first) == 1 and not _explained(split, {s: ranks[0] for s, ranks in ranks_of.items()}, seconds, slowest):
        return [Cause("slow rank", first, "pp", "forward and backward", excess, usual)]
    return [Cause("unbalanced stage", first, "pp", "forward and backward", excess, usual, slowest)]


def _explained(split: StepSplit, rank_of: Mapping[int, int], seconds: Mapping[int, float], stage: int) -> bool:
    """Whether a stage takes longer because it holds more: at least half of what it takes more is what it holds more."""
    others = [s for s in rank_of if s != stage]
    usual_work = statistics.median_low([split.work[rank_of[s]] for s in others])
    usual_s = statistics.median_low([seconds[s] for s in others])
    if usual_work <= 0 or usual_s <= 0:
        return True
    return split.work[rank_of[stage]] / usual_work - 1 >= (seconds[stage] / usual_s - 1) / 2


def _slow_links(
    split: StepSplit, place: Place, least_s: float, quickest: Mapping[tuple[str, int], float]
) -> list[Cause]:
    causes: list[Cause] = []
    now = shortest_calls(split, place)
    for (axis, number), seconds in now.items():
        others = [s for (name, other), s in now.items() if name == axis and other != number]
        before = quickest.get((axis, number))
        known = [*others, *([before] if before is not None else [])]
        if not known or axis not in split.axes:
            continue
        usual = min(known)
        ranks = tuple(place.groups[axis][number])
        exposed = min(split.rows[rank].get(f"exposed:{axis}", 0.0) for rank in ranks)
        # every call is longer by as much as the shortest one, so that the calls of a step together lose this
        lost = (seconds - usual) * split.axes[axis].calls
        if seconds >= 3 * usual and min(lost, exposed) >= least_s:
            causes.append(Cause("slow link", ranks, axis, "latency", seconds - usual, usual))
    return causes


def _peers(place: Place) -> list[list[int]]:
    """Ranks that do the same work: those of one stage, or all."""
    if not place.stages:
        return [list(range(place.world_size))]
    stages = sorted(set(place.stages))
    return [[r for r, stage in enumerate(place.stages) if stage == s] for s in stages]


def _waited_on(split: StepSplit, place: Place, rank: int) -> str:
    """The axis on which the peers of a late rank wait longer than it does."""
    best, most = "", 0.0
    for axis, groups in place.groups.items():
        name = f"exposed:{axis}"
        for ranks in groups:
            if rank in ranks and len(ranks) > 1:
                others = [split.rows[other].get(name, 0.0) for other in ranks if other != rank]
                longer = statistics.median(others) - split.rows[rank].get(name, 0.0)
                if longer > most:
                    best, most = axis, longer
    return best
