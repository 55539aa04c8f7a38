"""Makespan, span and peak memory of a schedule, without a timeline: what a search compares hundreds of schedules by.

The numbers are those of `titan_pipeline.simulate` and `titan_pipeline.verify`, in a twentieth of their time.
"""

from typing import NamedTuple

from titan_pipeline.analysis.bounds import Objective
from titan_pipeline.analysis.simulate import memory_levels
from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.schedule import Kind, Schedule


class ScheduleScore(NamedTuple):
    """What a search compares."""

    makespan: float
    span: float
    peak: tuple[float, ...]

    def value(self, objective: Objective) -> float:
        """The number to be small."""
        return self.makespan if objective == "makespan" else self.span


def score(schedule: Schedule, costs: Costs) -> ScheduleScore | None:
    """Play a schedule without communication actions; None if it never finishes."""
    stages, m, place = schedule.num_stages, schedule.num_microbatches, schedule.placement
    time = {Kind.F: costs.forward, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}
    time[Kind.B] = tuple(costs.backward_of(s) for s in range(stages))
    unknown = -1.0
    # by stage and microbatch: when the input and the gradient arrive; when the forward has ended
    arrived = {Kind.F: [0.0] * m + [unknown] * (m * (stages - 1)), Kind.I: [unknown] * (m * (stages - 1)) + [0.0] * m}
    ended = [unknown] * (m * stages)
    halves = [unknown] * (m * stages)
    free: dict[tuple[int, int], float] = {}
    ways = {way: _ways(costs, place, way) for way in (1, -1)}
    position, clock, begin = ([0] * len(schedule.ranks), [0.0] * len(schedule.ranks), [unknown] * len(schedule.ranks))
    moved = True
    while moved:
        moved = False
        for r, program in enumerate(schedule.ranks):
            i, now = position[r], clock[r]
            while i < len(program):
                kind, s, k = program[i]
                at = s * m + k
                if kind is Kind.F:
                    ready = arrived[Kind.F][at]
                elif kind is Kind.W:
                    ready = halves[at]
                else:
                    ready = unknown if ended[at] < 0 else arrived[Kind.I][at]
                if ready < 0:
                    break
                start = now if now > ready else ready
                now = start + time[kind][s]
                if begin[r] < 0:
                    begin[r] = start
                if kind is not Kind.W:
                    forward = kind is Kind.F
                    (ended if forward else halves)[at] = now
                    _deliver(now, s, k, m, 1 if forward else -1, ways, arrived, free)
                i += 1
                moved = True
            position[r], clock[r] = i, now
    if any(position[r] < len(program) for r, program in enumerate(schedule.ranks)):
        return None
    peak = tuple(max(memory_levels(schedule, r, costs)) for r in range(len(schedule.ranks)))
    return ScheduleScore(max(clock), max(c - b for c, b in zip(clock, begin, strict=True)), peak)


_Way = tuple[tuple[int, int], float, float] | None


def _ways(costs: Costs, place: tuple[int, ...], way: int) -> list[_Way]:
    """By stage: link, sending time and latency to the next stage in that direction; None within a rank."""
    found: list[_Way] = []
    for s, rank in enumerate(place):
        t = s + way
        if not 0 <= t < len(place) or place[t] == rank:
            found.append(None)
            continue
        link = costs.link_of(rank, place[t])
        found.append(((rank, place[t]), costs.payload_of(min(s, t)) / link.bandwidth, link.latency))
    return found


def _deliver(
    now: float, s: int, k: int, m: int, way: int, ways: dict[int, list[_Way]], arrived: dict[Kind, list[float]],
    free: dict[tuple[int, int], float],
) -> None:  # fmt: skip
    """The result of an action travels to its neighbour stage."""
    at = (s + way) * m + k
    if not 0 <= at < len(arrived[Kind.F]):
        return
    found = ways[way][s]
    if found is not None:
        link, sending, latency = found
        now = max(now, free.get(link, 0.0)) + sending
        free[link] = now
        now += latency
    arrived[Kind.F if way > 0 else Kind.I][at] = now
