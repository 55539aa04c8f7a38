"""The whole course of a run as a report draws it: step by step, or in blocks of steps where the run is long."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from titan_train.observe.log import (
    FILE_NAME,
    NOT_OURS,
    QUANTITIES,
    EventRecord,
    StepBlock,
    as_event,
    as_validation,
    lines_of,
    read_blocks,
)
from titan_train.observe.records import ValidationRecord
from titan_train.observe.run_info import parent_of, read_run_info

# Up to this size, about 10,000 steps, metrics.jsonl is read whole. Of a longer one only the first steps are: a logarithmic
# axis shows them one by one.
_WHOLE_BYTES = 4 * 2**20
_FIRST_STEPS = 1024


@dataclass(slots=True)
class Curve:
    """One quantity: a value for each point of the run, and the extremes of the steps that the point stands for."""

    mean: list[float] = field(default_factory=list[float])
    low: list[float] = field(default_factory=list[float])
    high: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class History:
    """A run as points in step order. A point is a step, or the mean of a block of steps; NaN where nothing is known."""

    began: int = 0
    """The step that the run began with: a branch has the numbers of its parent before."""
    steps: list[int] = field(default_factory=list[int])
    """The (last) step of each point."""
    counts: list[int] = field(default_factory=list[int])
    """How many logged steps each point stands for."""
    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in QUANTITIES})
    validations: list[ValidationRecord] = field(default_factory=list[ValidationRecord])
    events: list[EventRecord] = field(default_factory=list[EventRecord])
    tokens: int = 0
    """Tokens trained on, steps between two logged ones included."""
    tokens_per_step: int = 0
    """In the last step."""
    seconds: float = 0.0
    """Seconds of training over all attempts, whether a resumed attempt's clock went on or began at 0."""
    skipped: int = 0
    """Steps whose update was left out."""
    unreadable_lines: int = 0
    """Lines that are not a whole record; a killed run leaves at most one."""
    _elapsed_s: float = 0.0

    def add_step(self, line: dict[str, Any]) -> None:
        """Add one step of `metrics.jsonl`; of several lines about one step the last one counts.

        Raises:
            KeyError, TypeError, ValueError: The line is not a step's.
        """
        before = next((step for step in reversed(self.steps) if step < line["step"]), self.began)
        block = StepBlock(last=before, elapsed_s=self._elapsed_s)
        values = block.add_step(line)
        block.mean, block.low, block.high = list(values), list(values), list(values)
        self._drop_from(block.last)
        self.add_block(block)

    def add_block(self, block: StepBlock) -> None:
        """Add a block."""
        self.steps.append(block.last)
        self.counts.append(block.count)
        for curve, *values in zip(self.curves.values(), block.mean, block.low, block.high, strict=True):
            for points, value in zip((curve.mean, curve.low, curve.high), values, strict=True):
                points.append(math.nan if value is None else value)
        self.tokens += block.tokens
        self.tokens_per_step = block.tokens_per_step
        self.seconds += block.seconds
        self._elapsed_s = block.elapsed_s
        self.skipped += block.skipped
        for line in block.others:
            self.add_other(line)

    def add_other(self, line: dict[str, Any]) -> None:
        """Add a validation or an event.

        Raises:
            KeyError, TypeError, ValueError: The line is neither.
        """
        if line["kind"] == "validation":
            validation = as_validation(line)
            self.validations = [known for known in self.validations if known.step != validation.step] + [validation]
        elif line["kind"] == "event":
            self.events.append(as_event(line))

    def weighted(self, name: str) -> float:
        """A quantity summed over the steps where it is known."""
        pairs = zip(self.curves[name].mean, self.counts, strict=True)
        return math.fsum(value * count for value, count in pairs if math.isfinite(value))

    def median(self, name: str, *, later: bool = False) -> float:
        """The median of a quantity over the steps where it is positive, of all or of the later half; NaN if there are none."""
        first = (self.steps[0] + self.steps[-1]) / 2 if later and self.steps else 0
        points = zip(self.curves[name].mean, self.counts, self.steps, strict=True)
        known = sorted((value, n) for value, n, step in points if step >= first and 0 < value < math.inf and n > 0)
        ends = list(accumulate(n for _, n in known))
        if not ends:
            return math.nan
        low, high = (known[bisect_right(ends, at)][0] for at in ((ends[-1] - 1) // 2, ends[-1] // 2))
        return (low + high) / 2

    def _drop_from(self, step: int) -> None:
        """Forget points from ``step`` on: a run that went back without resuming, which nothing of ours leaves."""
        while self.steps and self.steps[-1] >= step:
            for points in (
                self.steps,
                self.counts,
                *(p for c in self.curves.values() for p in (c.mean, c.low, c.high)),
            ):
                points.pop()


def read_history(run_dir: str | Path, *, whole_bytes: int = _WHOLE_BYTES) -> History:
    """Read the course of a run, also from files that a killed or running process left incomplete.

    Args:
        run_dir: The run's folder. Missing files give an empty history.
        whole_bytes: Up to this size `metrics.jsonl` is read line by line.
    """
    path = Path(run_dir) / FILE_NAME
    parent = parent_of(read_run_info(run_dir))
    history = History(began=parent[1] if parent is not None else 0)
    try:
        long = path.stat().st_size > whole_bytes
    except OSError:
        return history
    blocks = [block for block, _ in read_blocks(Path(run_dir), path)] if long else []
    head = 0
    while head < len(blocks) and sum(block.count for block in blocks[:head]) < _FIRST_STEPS:
        head += 1
    _add_lines(history, path, 0, blocks[head - 1].end if head else 0)
    for block in blocks[head:]:
        history.add_block(block)
    _add_lines(history, path, blocks[-1].end if blocks else 0, None)
    return history


def _add_lines(history: History, path: Path, start: int, end: int | None) -> None:
    for line, _, at in lines_of(path, start):
        if end is not None and at > end:
            return
        try:
            if line is None:
                history.unreadable_lines += 1
            elif line["kind"] == "step":
                history.add_step(line)
            else:
                history.add_other(line)
        except NOT_OURS:
            history.unreadable_lines += 1
