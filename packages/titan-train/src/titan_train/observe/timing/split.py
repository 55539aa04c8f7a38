"""The windows of all ranks as one record: smallest, median and largest of each part of a step.

Each rank writes its window as a row of numbers, the rows are gathered, and one rank reads them. The parts of one rank add
up to its time; medians of different ranks need not.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan_train.observe.timing.clock import PHASES, AxisTotals, Window

_BEFORE = 3  # steps, wall_s, work
_PER_STEP = ("calls", "sent_bytes", "exposed_s", "moving_s", "hidden_s")
_PER_AXIS = (*_PER_STEP, "latency_s", "bytes_per_s")


class Spread(NamedTuple):
    """One figure over the ranks."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """From one value per rank."""
        return cls(min(values), statistics.median(values), max(values))


@dataclass(frozen=True, slots=True)
class Place:
    """Where ranks are: which of them communicate with each other on an axis."""

    world_size: int
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict[str, Sequence[Sequence[int]]])
    """Ranks of each group, by axis."""
    stages: Sequence[int] = ()
    """Pipeline coordinate of each rank; empty without a pipeline."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Names in the order of a row, with that of groups that no axis holds."""
        return (*self.groups, *(() if "world" in self.groups else ("world",)))

    def row(self, window: Window, work: float = 0.0) -> list[float]:
        """A window as numbers, in seconds and bytes per step.

        Args:
            window: This rank's.
            work: How much this rank has to compute, in any unit; 0 where unknown.
        """
        steps = max(1, window.steps)
        row = [float(window.steps), window.wall_s / steps, work, *(window.phases[name] / steps for name in PHASES)]
        for axis in self.axes:
            totals = window.axes.get(axis, AxisTotals())
            row += [getattr(totals, name) / steps for name in _PER_STEP]
            row += [totals.latency_s, totals.bytes_per_s]
        return row + [quarter[name] for quarter in (window.low, window.high) for name in PHASES]

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return _BEFORE + 3 * len(PHASES) + len(_PER_AXIS) * len(self.axes)


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """Communication on one axis, per step."""

    calls: float
    """The rank with the most."""
    sent_bytes: float
    """The rank that sends most."""
    exposed_s: Spread
    moving_s: Spread
    """The exposed time of a pipeline in which a message was on its way; 0 on other axes."""
    hidden_s: Spread
    latency_us: float | None
    """The shortest call of any rank; None if nothing was waited for."""
    gb_s: float | None
    """Bandwidth of the best call of any rank."""

    @property
    def overlapped(self) -> float:
        """Share of the communication, at the median rank, that ran under compute; in [0, 1]. Of a pipeline's messages, while
        they are on their way: waiting for a neighbour to compute is a bubble, which no link shortens.
        """
        exposed_s = self.moving_s if self.moving_s.most > 0 else self.exposed_s
        total = exposed_s.median + self.hidden_s.median
        return self.hidden_s.median / total if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Where the time of a step went, over some steps and all ranks."""

    step: int
    """The last step."""
    steps: int
    """Steps that it is the mean of."""
    wall_s: Spread
    """Seconds of a step, all included."""
    phases: dict[str, Spread]
    axes: dict[str, AxisSplit]
    """Only the axes on which something was sent."""
    rows: tuple[Mapping[str, float], ...] = ()
    """Each rank's own seconds by part; an axis is called ``exposed:tp``."""
    low: tuple[Mapping[str, float], ...] = ()
    """Each rank's seconds by phase that a quarter of its steps stayed below."""
    high: tuple[Mapping[str, float], ...] = ()
    """Each rank's seconds by phase that a quarter of its steps took longer than."""
    latencies: tuple[Mapping[str, float], ...] = ()
    """Each rank's shortest call, in seconds, by axis."""
    work: tuple[float, ...] = ()
    """How much each rank has to compute, in any unit; 0 where unknown."""

    def seconds(self) -> dict[str, float]:
        """The median rank's seconds by part; an axis gives ``tp exposed`` and ``tp hidden``."""
        parts = {name: spread.median for name, spread in self.phases.items()}
        for name, axis in self.axes.items():
            parts |= {f"{name} exposed": axis.exposed_s.median, f"{name} hidden": axis.hidden_s.median}
        return {name: round(value, 7) for name, value in parts.items()}

    def fields(self) -> dict[str, Any]:
        """The JSON values of the event ``step_split``: spreads are [least, median, most] in milliseconds."""
        return {
            "steps": self.steps,
            "wall_ms": _ms(self.wall_s),
            "phases_ms": {name: _ms(spread) for name, spread in self.phases.items()},
            "axes": {
                name: {
                    "calls": round(axis.calls, 2),
                    "bytes": round(axis.sent_bytes),
                    "exposed_ms": _ms(axis.exposed_s),
                    "hidden_ms": _ms(axis.hidden_s),
                    "overlapped": round(axis.overlapped, 4),
                    "latency_us": None if axis.latency_us is None else round(axis.latency_us, 1),
                    "gb_s": None if axis.gb_s is None else float(f"{axis.gb_s:.4g}"),
                }
                for name, axis in self.axes.items()
            },
        }


def combine(step: int, place: Place, rows: Sequence[Sequence[float]]) -> StepSplit:
    """All ranks' rows, in rank order, as one record."""
    names = place.axes
    first = _BEFORE + len(PHASES)
    phases = {name: Spread.of([row[_BEFORE + i] for row in rows]) for i, name in enumerate(PHASES)}
    axes: dict[str, AxisSplit] = {}
    columns: dict[str, list[AxisTotals]] = {}
    for i, name in enumerate(names):
        at = first + i * len(_PER_AXIS)
        totals = [AxisTotals(**dict(zip(_PER_AXIS, row[at : at + len(_PER_AXIS)], strict=True))) for row in rows]  # pyright: ignore[reportArgumentType]
        if any(t.calls for t in totals):
            columns[name] = totals
            axes[name] = _axis(totals)
    return StepSplit(
        step=step,
        steps=round(rows[0][0]),
        wall_s=Spread.of([row[1] for row in rows]),
        phases=phases,
        axes=axes,
        rows=tuple(
            {name: row[_BEFORE + i] for i, name in enumerate(PHASES)}
            | {f"exposed:{name}": totals[rank].exposed_s for name, totals in columns.items()}
            for rank, row in enumerate(rows)
        ),
        low=tuple(dict(zip(PHASES, row[-2 * len(PHASES) :], strict=False)) for row in rows),
        high=tuple(dict(zip(PHASES, row[-len(PHASES) :], strict=True)) for row in rows),
        latencies=tuple({n: t[rank].latency_s for n, t in columns.items()} for rank in range(len(rows))),
        work=tuple(row[2] for row in rows),
    )


def split_line(split: StepSplit) -> str:
    """One line of text: the median rank's milliseconds; an axis with what ran hidden under compute.

    ``split  step 40: 52.1 ms = forward 18.2, backward 25.0, optimizer 2.1, host 1.2, tp 5.4 (+ 3.0 hidden)``
    """
    parts = [f"{name} {1e3 * s.median:.1f}" for name, s in split.phases.items() if 1e3 * s.most >= 0.05]
    for name, axis in split.axes.items():
        hidden = f" (+ {1e3 * axis.hidden_s.median:.1f} hidden)" if 1e3 * axis.hidden_s.median >= 0.05 else ""
        parts.append(f"{name} {1e3 * axis.exposed_s.median:.1f}{hidden}")
    return f"split    step {split.step}: {1e3 * split.wall_s.median:.1f} ms = {', '.join(parts)}"


def _axis(totals: Sequence[AxisTotals]) -> AxisSplit:
    latencies = [t.latency_s for t in totals if t.latency_s > 0]
    rate = max(t.bytes_per_s for t in totals)
    return AxisSplit(
        calls=max(t.calls for t in totals),
        sent_bytes=max(t.sent_bytes for t in totals),
        exposed_s=Spread.of([t.exposed_s for t in totals]),
        moving_s=Spread.of([t.moving_s for t in totals]),
        hidden_s=Spread.of([t.hidden_s for t in totals]),
        latency_us=1e6 * min(latencies) if latencies else None,
        gb_s=rate / 1e9 if rate > 0 and math.isfinite(rate) else None,
    )


def _ms(spread: Spread) -> list[float]:
    return [round(1e3 * value, 3) for value in spread]
