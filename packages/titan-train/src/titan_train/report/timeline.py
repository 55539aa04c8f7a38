"""Where the time of steps went and what memory was held: charts over the run, and the newest ``step_split`` as tables.

`metrics.jsonl` may be gigabytes, and its blocks do not keep these. Of a long file a thousand lines are drawn, evenly spread.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_train.files import open_file
from titan_train.observe import EventRecord
from titan_train.observe.log import FILE_NAME, lines_of
from titan_train.report.chart import Chart, Layer, Series, build_chart, build_stack

_WHOLE_BYTES = 8 * 2**20
_MOST_LINES = 1000
_PART_BYTES = 2**20  # of each part of a long file
# From the bottom up; what else a line names follows in its own order.
_ORDER = ("forward", "backward", "optimizer")
_LAST = ("host", "data", "validation", "checkpoint")
_ROLES = ("run0", "run1", "run2", "run3", "run4", "run5", "run6", "run7")
_MEMORY = (("peak_gib", "peak"), ("reserved_gib", "reserved"), ("active_gib", "active"))


def time_split(run_dir: Path) -> Chart | None:
    """Seconds of a step by what they were spent on, one over the other; None where no step says."""
    steps, tables = step_tables(run_dir, "split")
    names = _ordered(tables)
    if not names:
        return None
    layers = [
        Layer(name, [table.get(name, 0.0) for table in tables], _ROLES[i % len(_ROLES)]) for i, name in enumerate(names)
    ]
    return build_stack("Time of a step", "seconds a step, median rank, one part over the other", steps, layers)


def memory_timeline(run_dir: Path) -> Chart | None:
    """Memory of rank 0 over the run; None where fewer than two steps say more than their peak."""
    steps, tables = step_tables(run_dir, "memory")
    if len(tables) < 2:
        return None
    series = [
        Series(label, steps, [table.get(key, math.nan) for table in tables], _ROLES[i])
        for i, (key, label) in enumerate(_MEMORY)
    ]
    return build_chart("Memory", "GiB of rank 0", series, zero=True)


@dataclass(frozen=True, slots=True)
class RankTables:
    """One record ``step_split`` as rows of text."""

    step: int
    steps: int
    """Steps that the figures are the mean of."""
    phases: list[tuple[str, ...]]
    """Part of a step; ms of the fastest, the median and the slowest rank."""
    axes: list[tuple[str, ...]]
    """Axis, calls, MiB sent, exposed ms, hidden ms, overlapped, latency, bandwidth."""

    @classmethod
    def of(cls, step: int, fields: Mapping[str, Any]) -> "RankTables":
        """The tables of a record's fields."""
        spreads = {"whole step": fields["wall_ms"], **fields["phases_ms"]}
        return cls(
            step,
            int(fields["steps"]),
            [(str(name), *(f"{float(value):.4g}" for value in spread)) for name, spread in spreads.items()],
            [
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
            ],
        )

    def __str__(self) -> str:
        heads = (
            ("ms of a step", "fastest rank", "median rank", "slowest rank"),
            ("mesh axis", "calls", "MiB sent", "exposed, ms", "hidden, ms", "overlapped", "latency", "bandwidth"),
        )
        tables = [aligned([head, *rows]) for head, rows in zip(heads, (self.phases, self.axes), strict=True) if rows]
        return "\n\n".join(tables)


def rank_tables(events: Iterable[EventRecord]) -> RankTables | None:
    """The tables of the newest record; None without one, or where none can be read."""
    for event in reversed([event for event in events if event.kind == "step_split"]):
        try:
            return RankTables.of(event.step, event.fields)
        except (KeyError, TypeError, ValueError, IndexError):  # of another version, or edited
            continue
    return None


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _known(value: Any, unit: str) -> str:
    return "–" if value is None else f"{float(value):.4g} {unit}"


def step_tables(run_dir: Path, key: str) -> tuple[list[int], list[dict[str, float]]]:
    """The steps whose line has numbers under ``key``, and those numbers."""
    steps: dict[int, dict[str, float]] = {}
    for line in _lines(run_dir / FILE_NAME, key):
        table, step = line.get(key), line.get("step")
        if line.get("kind") != "step" or not isinstance(table, dict) or not isinstance(step, int):
            continue
        numbers = {
            str(name): float(value)
            for name, value in table.items()
            if isinstance(value, int | float) and math.isfinite(value) and value >= 0
        }
        if numbers:
            steps[step] = numbers
    ordered = sorted(steps)
    return ordered, [steps[step] for step in ordered]


def _ordered(tables: list[dict[str, float]]) -> list[str]:
    # what is hidden ran under compute: its seconds are in forward and backward already
    found = list(dict.fromkeys(name for table in tables for name in table if not name.endswith(" hidden")))
    middle = [name for name in found if name not in (*_ORDER, *_LAST)]
    return [name for name in (*_ORDER, *middle, *_LAST) if name in found]


def _lines(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """All lines of a file, or of each of a thousand parts of a long one the first step's that has something under ``key``."""
    size = path.stat().st_size if path.is_file() else 0
    if size <= _WHOLE_BYTES:
        yield from (line for line, _, _ in lines_of(path) if line is not None)
        return
    wanted = re.compile(rb'"%s":\s*\{\s*"' % key.encode())  # parsing every line would take minutes
    with open_file(path) as file:
        for start, end in pairwise(size * i // _MOST_LINES for i in range(_MOST_LINES + 1)):
            file.seek(start)
            part = file.read(min(end - start, _PART_BYTES))
            for found in wanted.finditer(part):
                begin = part.rfind(b"\n", 0, found.start()) + 1  # where a part starts inside a line, that one is torn
                line, _, _ = next(lines_of(path, start + begin), (None, b"", 0))
                if line is not None and line.get("kind") == "step":
                    yield line
                    break
