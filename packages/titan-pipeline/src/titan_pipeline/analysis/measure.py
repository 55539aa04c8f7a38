"""From what was measured back to costs: trace a few steps, solve again for the true costs, swap the schedule.

A measurement holds when every action of every rank ran, on one clock. `fit_costs` takes the median over microbatches
and steps, stage by stage, since one slow step must not become a cost; `Measurement.timeline` draws it like a
simulation, so that plan and measurement lie over each other in one trace.

Limits: clocks of different hosts differ, and messages between them then seem to arrive early or late; the fit takes the
shortest time a message ever took, at least 0. A schedule that does not split backwards says nothing about the halves:
each is taken to be half. Memory is not measured here: it is taken from the costs that you have.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from titan_pipeline.analysis.simulate import Breakdown, Simulation, Slot, Transfer, idle_by_phase, memory_curve
from titan_pipeline.errors import ScheduleError
from titan_pipeline.ir.costs import Costs, Link
from titan_pipeline.ir.schedule import COMPUTE, Action, Kind, Schedule, consumers, read_text

_FORMAT = "titan-pipeline/measurement"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One step as it ran: every compute action of every rank, in seconds on one clock that starts with the step."""

    schedule: Schedule
    """Without communication actions."""
    ranks: tuple[tuple[Slot, ...], ...]

    def __post_init__(self) -> None:
        for rank, (slots, program) in enumerate(zip(self.ranks, self.schedule.ranks, strict=True)):
            if tuple(s.action for s in slots) != program or any(a.kind not in COMPUTE for a in program):
                raise ValueError(
                    f"the {len(slots)} measured actions of rank {rank} are not those of schedule "
                    f"{self.schedule.name!r} ({len(program)}). Measure with the schedule you give."
                )

    @property
    def makespan(self) -> float:
        """From the first start to the last end of any rank, in seconds."""
        return max(s[-1].end for s in self.ranks) - min(s[0].start for s in self.ranks)

    def timeline(self, costs: Costs | None = None) -> Simulation:
        """The measurement in the form of a simulation, for drawing and tracing.

        A message seems to travel from the end of its producer to the start of its consumer. All idle time is in the
        breakdown's three phases.

        Args:
            costs: For memory; nothing is held without.
        """
        schedule = self.schedule
        costs = costs or _weightless(schedule.num_stages)
        costs.check(schedule.num_stages)
        begin = min(s[0].start for s in self.ranks)
        ranks = tuple(tuple(Slot(s.action, s.start - begin, s.end - begin) for s in slots) for slots in self.ranks)
        makespan = self.makespan
        phases = [idle_by_phase(list(slots), makespan) for slots in ranks]
        warm_up, steady, drain = (sum(p[k] for p in phases) / len(phases) for k in range(3))
        return Simulation(
            schedule,
            ranks,
            tuple(_transfers(schedule, ranks)),
            makespan,
            sum(s.end - s.start for slots in ranks for s in slots) / len(ranks),
            Breakdown(warm_up, steady, drain, 0.0, 0.0),
            tuple(memory_curve(schedule, r, costs, list(slots)) for r, slots in enumerate(ranks)),
        )

    def largest_lag(self, plan: Simulation) -> float:
        """Largest difference between the planned and the measured start of one action, in seconds."""
        if plan.schedule.digest != self.schedule.digest:
            raise ValueError("the plan is of another schedule. Simulate the one that was measured.")
        mine = self.timeline().timeline
        return max(
            abs(a.start - b.start) for x, y in zip(mine, plan.timeline, strict=True) for a, b in zip(x, y, strict=True)
        )

    def to_json(self) -> str:
        """Schedule and times as one JSON object."""
        body = {
            "format": _FORMAT,
            "version": 1,
            "schedule": json.loads(self.schedule.to_json()),
            "ranks": [[[s.start, s.end] for s in slots] for slots in self.ranks],
        }
        return json.dumps(body) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Measurement":
        """Read what `to_json` wrote.

        Raises:
            ScheduleError: Code ``format``.
        """
        try:
            raw = json.loads(text)
            if not isinstance(raw, dict) or cast(dict[str, Any], raw).get("format") != _FORMAT:
                raise ScheduleError("format", f"not a {_FORMAT} file.")
            body = cast(dict[str, Any], raw)
            schedule = Schedule.from_json(json.dumps(body["schedule"]))
            ranks = tuple(
                tuple(Slot(a, float(start), float(end)) for a, (start, end) in zip(program, times, strict=True))
                for program, times in zip(schedule.ranks, body["ranks"], strict=True)
            )
            return cls(schedule, ranks)
        except ScheduleError:
            raise
        except (KeyError, TypeError, ValueError) as err:
            raise ScheduleError("format", f"not a whole {_FORMAT} file ({err!r}). Write it with to_json.") from err

    @classmethod
    def load(cls, path: str | Path) -> "Measurement":
        """Read JSON from ``path``."""
        return cls.from_json(read_text(path))

    def save(self, path: str | Path) -> None:
        """Write JSON to ``path``."""
        Path(path).write_text(self.to_json())


def fit_costs(measurements: Sequence[Measurement], base: Costs | None = None) -> Costs:
    """Costs that explain what was measured: the median time of each stage and kind, the least latency of each link.

    Args:
        measurements: Steps of any schedules of one model split; leave out the first, which allocates and compiles.
        base: Where memory comes from; nothing is held without.

    Raises:
        ValueError: If there are none, or a stage ran no forward or no backward in them.
    """
    if not measurements:
        raise ValueError("measurements=(): measure at least one step.")
    stages = measurements[0].schedule.num_stages
    base = base or _weightless(stages)
    base.check(stages)
    times: dict[tuple[Kind, int], list[float]] = {}
    gaps: dict[tuple[int, int], float] = {}
    for measured in measurements:
        for slots in measured.ranks:
            for slot in slots:
                times.setdefault((slot.action.kind, slot.action.stage), []).append(slot.end - slot.start)
        for t in _transfers(measured.schedule, measured.ranks):
            link = (t.source, t.target)
            gaps[link] = max(0.0, min(gaps.get(link, float("inf")), t.arrival - t.departure))
    median = {key: statistics.median(values) for key, values in times.items()}
    rows: dict[Kind, list[float]] = {kind: [] for kind in COMPUTE}
    for s in range(stages):
        whole = median.get((Kind.B, s))
        first, second = median.get((Kind.I, s)), median.get((Kind.W, s))
        if (Kind.F, s) not in median or (whole is None and (first is None or second is None)):
            raise ValueError(f"stage {s} ran no forward or no backward in the measurements. Measure training steps.")
        rows[Kind.F].append(median[Kind.F, s])
        rows[Kind.I].append(first if first is not None else cast(float, whole) / 2)
        rows[Kind.W].append(second if second is not None else cast(float, whole) - rows[Kind.I][-1])
        rows[Kind.B].append(whole if whole is not None else rows[Kind.I][-1] + rows[Kind.W][-1])
    return replace(
        base,
        forward=tuple(rows[Kind.F]), input_grad=tuple(rows[Kind.I]), weight_grad=tuple(rows[Kind.W]),
        backward=tuple(rows[Kind.B]), payload=(), link=Link(),
        links={pair: Link(latency=gap) for pair, gap in sorted(gaps.items())},
    )  # fmt: skip


def _transfers(schedule: Schedule, ranks: Sequence[Sequence[Slot]]) -> list[Transfer]:
    """One per message: from the end of its producer to the start of its consumer."""
    found: list[Transfer] = []
    starts: dict[tuple[bool, int, int], float] = {}
    for slots in ranks:
        for slot in slots:
            if slot.action.kind is not Kind.W:
                starts[slot.action.kind is Kind.F, slot.action.stage, slot.action.microbatch] = slot.start
    for rank, slots in enumerate(ranks):
        for slot in slots:
            action: Action = slot.action
            for stage, _, _ in consumers(action, schedule.num_stages):
                target = schedule.placement[stage]
                if target != rank:
                    arrival = starts[action.kind is Kind.F, stage, action.microbatch]
                    found.append(Transfer(rank, target, action, slot.end, arrival))
    return found


def _weightless(num_stages: int) -> Costs:
    return Costs.uniform(num_stages, activation=0.0, weight_context=0.0)
