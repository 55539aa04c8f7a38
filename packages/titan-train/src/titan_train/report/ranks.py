"""How ranks differ, and what each mesh axis sent: the newest record ``step_split`` of a run as tables."""

from dataclasses import dataclass
from typing import Any

from titan_train.observe import EventRecord

KIND = "step_split"


@dataclass(frozen=True, slots=True)
class RankTables:
    """The record as rows of text."""

    step: int
    steps: int
    """Steps that the figures are the mean of."""
    phases: list[tuple[str, str, str, str]]
    """Part of a step; ms of the fastest, the median and the slowest rank."""
    axes: list[tuple[str, ...]]
    """Axis, calls, MiB sent, exposed ms, hidden ms, overlapped, latency, bandwidth."""


def rank_tables(events: list[EventRecord]) -> RankTables | None:
    """The tables of the newest record; None without one, or where it cannot be read."""
    for event in reversed(events):
        if event.kind != KIND:
            continue
        try:
            return _tables(event)
        except (KeyError, TypeError, ValueError, IndexError):  # of another version, or edited
            continue
    return None


def _tables(event: EventRecord) -> RankTables:
    fields: dict[str, Any] = event.fields
    spreads = {"whole step": fields["wall_ms"], **fields["phases_ms"]}
    phases = [(str(name), *(f"{float(value):.4g}" for value in spread)) for name, spread in spreads.items()]
    axes = [
        (
            str(name),
            f"{float(axis['calls']):g}",
            f"{float(axis['bytes']) / 2**20:.4g}",
            f"{float(axis['exposed_ms'][1]):.4g}",
            f"{float(axis['hidden_ms'][1]):.4g}",
            f"{float(axis['overlapped']):.0%}",
            _known(axis["latency_us"], "µs"),
            _known(axis["gb_s"], "GB/s"),
        )
        for name, axis in fields["axes"].items()
    ]
    rows = [(name, low, middle, high) for name, low, middle, high in phases]
    return RankTables(event.step, int(fields["steps"]), rows, axes)


def _known(value: Any, unit: str) -> str:
    return "–" if value is None else f"{float(value):.4g} {unit}"
