"""What the person watches: one block on a terminal, redrawn in place; a line every few seconds elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TextIO

from titan_train.config.metrics import MetricsConfig
from titan_train.observe.bar import (
    LossTrail,
    Part,
    bar_line,
    sample_line,
    sample_lines,
    step_line,
    step_parts,
    validation_line,
)
from titan_train.observe.records import StepRecord, ValidationRecord
from titan_train.observe.screen import Screen

if TYPE_CHECKING:
    from rich.text import Text

Mode = Literal["auto", "bar", "lines", "off"]
# The ETA follows the last steps, so that a slow first one (compilation) is forgotten soon.
_ETA_WINDOW = 32
# Between two lines that nobody asked for one by one: a log of a long run stays readable.
_SECONDS_BETWEEN_LINES = 5.0


class TrainProgress:
    """The display of one training run. Every call returns at once; a thread does the drawing.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        config: MetricsConfig,
        *,
        total_steps: int,
        first_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the display.

        Args:
            config: ``config.progress`` says how.
            total_steps: Steps of the whole run.
            first_step: Steps made before this process began.
            stream: Where to write; standard output by default.
            clock: Seconds, monotonic.
        """
        self._total = total_steps
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque([(first_step, clock())], maxlen=_ETA_WINDOW)
        self._record: StepRecord | None = None
        self._validation: ValidationRecord | None = None
        self._sample: tuple[int, str] | None = None
        self._trail = LossTrail()
        self._first_step = first_step
        output = stream if stream is not None else sys.stdout
        self._mode = resolve_mode(config.progress, output)
        self._pause_s = _SECONDS_BETWEEN_LINES if config.progress == "auto" else 0.0
        self._written: float | None = None
        self._noted: float | None = None
        self._screen = Screen(output, self._draw if self._mode == "bar" else None)

    def update(self, record: StepRecord) -> None:
        """Show a step. Costs a few microseconds."""
        now = self._clock()
        self._marks.append((record.step, now))
        self._trail.add(record.loss)
        self._record = record
        if self._mode == "lines" and self._line_is_due(record, now):
            self._written = now
            eta = self._eta_s()
            self._screen.post(lambda: step_line(record, self._total, eta))

    def validation(self, record: ValidationRecord) -> None:
        """Show a validation."""
        self._validation = record
        if self._mode == "lines":
            self._screen.post(lambda: validation_line(record))

    def sample(self, step: int, text: str) -> None:
        """Show what the model wrote after step ``step``."""
        self._sample = (step, text)
        if self._mode == "lines":
            self._screen.post(lambda: sample_line(step, text))

    def line(self, text: str) -> None:
        """Print a line between the steps' lines, at most one every few seconds; nothing beside a bar or when off."""
        now = self._clock()
        if self._mode == "lines" and (self._noted is None or now - self._noted >= self._pause_s):
            self._noted = now
            self._screen.post(lambda: text)

    def message(self, text: str) -> None:
        """Print a line above the bar; in every mode, even when the display is off."""
        self._screen.post(lambda: text)

    def close(self) -> None:
        """Show the last state and give the terminal back. Safe to call twice."""
        self._screen.close()

    def __enter__(self) -> "TrainProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line_is_due(self, record: StepRecord, now: float) -> bool:
        """The first step, the last one, one that was skipped, and one every few seconds between."""
        first = self._written is None or now - self._written >= self._pause_s
        return first or record.step == self._total or record.skipped

    def _eta_s(self) -> float | None:
        """Seconds left at the pace of the last steps, or None before the first one."""
        (first, started), (last, now) = self._marks[0], self._marks[-1]
        if last <= first:
            return None
        return (self._total - last) * (now - started) / (last - first)

    def _draw(self, width: int) -> "Text":
        text = self._draw_bar(width)
        if self._sample is not None:
            text.append_text(sample_lines(*self._sample, width))
        return text

    def _draw_bar(self, width: int) -> "Text":
        record = self._record
        if record is None:
            parts = [Part(f"{self._first_step}/{self._total}"), Part("waiting for the first step", "bright_black", 1)]
            return bar_line("train", self._first_step, self._total, parts, width)
        eta = self._eta_s() if record.step < self._total else None
        parts = step_parts(record, self._validation, self._total, eta, self._trail)
        return bar_line("train", record.step, self._total, parts, width)


def resolve_mode(mode: Mode, stream: TextIO) -> Mode:
    """What ``auto`` means for a stream: a bar where a person watches a terminal that can draw one, lines elsewhere."""
    if mode != "auto":
        return mode
    from rich.console import Console

    return "bar" if stream.isatty() and not Console(file=stream).is_dumb_terminal else "lines"
