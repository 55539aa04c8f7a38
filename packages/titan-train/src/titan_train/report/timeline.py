"""Where the time of a step went and what memory was held, over the run: charts of what each step's line says.

`metrics.jsonl` may be gigabytes, and blocks do not keep these. Of a long file a thousand lines are read, evenly spread.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_train.observe.log import FILE_NAME, lines_of
from titan_train.report.chart import Chart, Layer, Series, build_chart, build_stack

_WHOLE_BYTES = 8 * 2**20
_MOST_LINES = 1000
# From the bottom up; what else a line names follows in its own order.
_ORDER = ("forward", "backward", "optimizer")
_LAST = ("host", "data", "validation", "checkpoint")
_ROLES = ("run0", "run1", "run2", "run3", "run4", "run5", "run6", "run7")
_MEMORY = (("peak_gib", "peak"), ("reserved_gib", "reserved"), ("active_gib", "active"))


def time_split(run_dir: Path) -> Chart | None:
    """Seconds of a step by what they were spent on, one over the other; None where no step says."""
    steps, tables = _tables(run_dir, "split")
    names = _ordered(tables)
    if not names:
        return None
    layers = [
        Layer(name, [table.get(name, 0.0) for table in tables], _ROLES[i % len(_ROLES)]) for i, name in enumerate(names)
    ]
    return build_stack("Time of a step", "seconds a step, median rank, one part over the other", steps, layers)


def memory_timeline(run_dir: Path) -> Chart | None:
    """Memory of rank 0 over the run; None where fewer than two steps say more than their peak."""
    steps, tables = _tables(run_dir, "memory")
    if len(tables) < 2:
        return None
    series = [
        Series(label, steps, [table.get(key, math.nan) for table in tables], _ROLES[i])
        for i, (key, label) in enumerate(_MEMORY)
    ]
    return build_chart("Memory", "GiB of rank 0", series, zero=True)


def _ordered(tables: list[dict[str, float]]) -> list[str]:
    # what is hidden ran under compute: its seconds are in forward and backward already
    found = list(dict.fromkeys(name for table in tables for name in table if not name.endswith(" hidden")))
    middle = [name for name in found if name not in (*_ORDER, *_LAST)]
    return [name for name in (*_ORDER, *middle, *_LAST) if name in found]


def _tables(run_dir: Path, key: str) -> tuple[list[int], list[dict[str, float]]]:
    """The steps whose line has numbers under ``key``, and those numbers."""
    steps: dict[int, dict[str, float]] = {}
    for line in _lines(run_dir / FILE_NAME):
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


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        size = path.stat().st_size
    except OSError:
        return
    starts = [0, size] if size <= _WHOLE_BYTES else [size * i // _MOST_LINES for i in range(_MOST_LINES + 1)]
    for start, end in pairwise(starts):
        if size <= _WHOLE_BYTES:
            yield from (line for line, _, _ in lines_of(path) if line is not None)
        else:
            yield from _first_step(path, start, end)


def _first_step(path: Path, start: int, end: int) -> Iterator[dict[str, Any]]:
    """The first whole line of a step between two places of the file; where it starts inside a line, that one is torn."""
    for line, _, at in lines_of(path, start):
        if line is not None and line.get("kind") == "step":
            yield line
            return
        if at >= end:
            return
