"""What the person watches while a run trains: a block on a terminal, redrawn in place; a line every few seconds elsewhere.

A thread owns the terminal, so that the training loop never waits for it. The loop leaves what is new in memory and goes on;
the thread draws the bar a few times a second, or writes lines as they come. A terminal that is stopped (Ctrl-S), slow or
gone then holds up this thread only.
"""

import atexit
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from titan_train.config.metrics import MetricsConfig
from titan_train.observe.format import short_count, short_duration, short_gib, short_loss
from titan_train.observe.records import StepRecord, ValidationRecord
from titan_train.terminal import clean_console

if TYPE_CHECKING:
    from rich.text import Text

Mode = Literal["auto", "bar", "lines", "off"]
# The ETA follows the last steps, so that a slow first one (compilation) is forgotten soon.
_ETA_WINDOW = 32
# Between two lines of progress=auto, so that the log of a long run stays readable.
_SECONDS_BETWEEN_LINES = 5.0
_LEAST_BAR, _MOST_BAR = 8, 40
_SAMPLE_LINES = 5
_SAMPLE_COLUMNS = 160
_SPARKS = "▁▂▃▄▅▆▇█"
_REFRESH_S = 0.2
_CLOSE_TIMEOUT_S = 2.0
# At about 200 bytes a line: what a reader that has stopped reading may cost us in memory, 2 MB.
_MOST_LINES_KEPT = 10_000


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
        """Print a line between the steps' lines, at most one every few seconds; not with a bar or when off."""
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


class Screen:
    """Draws in the background: one live line at the bottom, or lines only."""

    def __init__(self, stream: TextIO, draw: "Callable[[int], Text] | None") -> None:
        """Start the thread.

        Args:
            stream: Where to write.
            draw: Makes the live line for a width in columns; None writes posted lines only.
        """
        self._stream = stream
        self._draw = draw
        self._lines: deque[Callable[[], str]] = deque(maxlen=_MOST_LINES_KEPT)
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="titan-progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def post(self, line: Callable[[], str]) -> None:
        """Show a line (above the live one); ``line`` makes its text, later, on the screen's thread."""
        self._lines.append(line)
        self._wake.set()

    def close(self) -> None:
        """Show what is still waiting, leave the live line as it is, and stop. Waits 2 s at most."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            if self._draw is None:
                self._write_lines()
            else:
                self._draw_live(self._draw)
        except (OSError, ValueError):  # the reader hung up, or the stream was closed under us: nobody is watching
            return

    def _write_lines(self) -> None:
        while True:
            closing = self._closing  # read before draining: what is posted before close() is always shown
            while self._lines:
                self._stream.write(self._lines.popleft()() + "\n")
            self._stream.flush()
            if closing:
                return
            self._wake.wait()
            self._wake.clear()

    def _draw_live(self, draw: "Callable[[int], Text]") -> None:
        from rich.live import Live

        console = clean_console(self._stream, force_terminal=True, highlight=False)
        before = (sys.stdout, sys.stderr)
        live = Live(console=console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True)
        with live, _log_follows(before):
            # Live hides the cursor; if the process is killed, nobody would bring it back.
            console.show_cursor(True)
            while True:
                closing = self._closing
                while self._lines:
                    console.print(self._lines.popleft()(), markup=False, soft_wrap=True)
                live.update(draw(console.width), refresh=True)
                if closing:
                    return
                self._wake.wait(_REFRESH_S)
                if self._wake.is_set() and not self._closing:
                    self._wake.clear()
                    time.sleep(_REFRESH_S / 4)  # a burst of messages is drawn together


@contextmanager
def _log_follows(before: tuple[TextIO, TextIO]) -> Generator[None]:
    """Log lines go above the live line, as prints do: handlers made earlier hold the streams that Live has replaced."""
    after = (sys.stdout, sys.stderr)
    moved: list[tuple[logging.StreamHandler[Any], TextIO]] = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in before:
            handler = cast("logging.StreamHandler[Any]", handler)
            moved.append((handler, handler.stream))
            handler.setStream(after[before.index(handler.stream)])
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the bar line; the one with the highest ``rank`` goes first when the terminal is narrow."""

    text: str
    style: str = ""
    rank: int = 0


@dataclass(slots=True)
class LossTrail:
    """The losses of a whole run in bounded memory, for a sparkline: every second one goes when it is full."""

    capacity: int = 64
    stride: int = 1
    values: list[float] = field(default_factory=list[float])
    seen: int = 0

    def add(self, loss: float) -> None:
        """Take the loss of one more step."""
        if self.seen % self.stride == 0:
            self.values.append(loss)
            if len(self.values) >= self.capacity:
                self.values = self.values[::2]
                self.stride *= 2
        self.seen += 1

    def sparkline(self, width: int = 10) -> str:
        """The course of the loss in ``width`` characters; empty while there is not enough of it."""
        # Without the first tenth: the fall from random weights would flatten all that follows.
        finite = [v for v in self.values[len(self.values) // 10 :] if v - v == 0]
        if len(finite) < width:
            return ""
        return sparks([finite[i * (len(finite) - 1) // (width - 1)] for i in range(width)])


def sparks(values: Sequence[float]) -> str:
    """Values as bars of eight heights."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_SPARKS[round(7 * (value - low) / span)] for value in values)


def bar_line(description: str, done: float, total: float | None, parts: list[Part], width: int) -> "Text":
    """One line: description, bar, parts; as much of it as ``width`` columns hold.

    Args:
        description: What is going on.
        done: How much of ``total`` is done.
        total: The end; None draws no bar.
        parts: What follows the bar, in this order.
        width: Columns.
    """
    from rich.text import Text

    shown = list(parts)
    least = len(description) + 2 + (_LEAST_BAR + 2 if total else 0)
    while shown and least + _length(shown) > width - 1:
        shown.remove(max(shown, key=lambda part: part.rank))
    line = Text(no_wrap=True, overflow="crop")
    line.append(description, style="bold")
    line.append("  ")
    room = width - 1 - _length(shown) - len(description) - 4
    if total and room >= _LEAST_BAR:
        size = min(room, _MOST_BAR)
        filled = max(0.0, min(1.0, done / total)) * size
        whole = int(filled)
        half = filled - whole >= 0.5
        finished = done >= total
        line.append("━" * whole + ("╸" if half else ""), style="green" if finished else "cyan")
        line.append("━" * (size - whole - half), style="bright_black")
        line.append("  ")
    for i, part in enumerate(shown):
        line.append(" · " if i else "", style="bright_black")
        line.append(part.text, style=part.style)
    return line


def step_parts(
    record: StepRecord, validation: ValidationRecord | None, total_steps: int, eta_s: float | None, trail: LossTrail
) -> list[Part]:
    """What the training bar says about the newest step."""
    spark = trail.sparkline()
    parts = [
        Part(f"{record.step}/{total_steps}"),
        Part(
            f"loss {short_loss(record.loss)}" + (" skipped" if record.skipped else ""),
            "bold red" if record.skipped else "bold",
            1,
        ),
    ]
    if spark:
        parts.append(Part(spark, "cyan", 7))
    if validation is not None:
        parts.append(Part(f"val {short_loss(validation.loss)}", "magenta", 4))
    parts.append(Part(f"{short_count(record.tokens_per_s)} tok/s", "", 3))
    if record.mfu is not None:
        parts.append(Part(f"MFU {record.mfu:.1%}", "", 5))
    parts.append(Part(short_gib(record.peak_mem_gib), "", 6))
    if record.data_wait_s > 0.1 * record.step_time_s > 0:
        parts.append(Part(f"data {record.data_wait_s / record.step_time_s:.0%}", "yellow", 6))
    if eta_s is not None:
        parts.append(Part(f"ETA {short_duration(eta_s)}", "green", 2))
    return parts


def step_line(record: StepRecord, total_steps: int, eta_s: float | None) -> str:
    """One step as ``key=value`` pairs, with the names of `StepRecord`."""
    pairs = [
        f"step={record.step}/{total_steps}",
        f"loss={record.loss:.4f}",
        f"grad_norm={record.grad_norm:.4g}",
        f"lr={record.lr:.3g}",
        f"tokens_per_s={record.tokens_per_s:.0f}",
    ]
    if record.tflops_per_gpu is not None:
        pairs.append(f"tflops_per_gpu={record.tflops_per_gpu:.3g}")
    if record.mfu is not None:
        pairs.append(f"mfu={record.mfu:.4f}")
    pairs += [
        f"peak_mem_gib={record.peak_mem_gib:.2f}",
        f"step_time_s={record.step_time_s:.4f}",
        f"data_wait_s={record.data_wait_s:.4f}",
    ]
    if eta_s is not None:
        pairs.append(f"eta={short_duration(eta_s).replace(' ', '')}")
    if record.skipped:
        pairs.append("skipped=true")
    return " ".join(pairs)


def validation_line(record: ValidationRecord) -> str:
    """One validation as ``key=value`` pairs."""
    line = f"step={record.step} validation_loss={record.loss:.4f}"
    if record.bits_per_byte is not None:
        line += f" bits_per_byte={record.bits_per_byte:.4f}"
    return f"{line} tokens={record.tokens}"


def sample_line(step: int, text: str) -> str:
    """What the model wrote, on one line of a file."""
    return f"step={step} sample={json.dumps(_shortened(text, _SAMPLE_COLUMNS), ensure_ascii=False)}"


def sample_lines(step: int, text: str, width: int) -> "Text":
    """What the model wrote, as the lines below a bar; none is longer than ``width`` columns."""
    from rich.text import Text

    found = Text(no_wrap=True, overflow="crop")
    found.append(f"\nafter step {step} the model writes:"[: width + 1], style="bright_black")
    for line in printable(text).splitlines()[:_SAMPLE_LINES]:
        found.append("\n  ")
        found.append(_shortened(line, width - 3), style="italic")
    return found


def printable(text: str) -> str:
    """Text without control characters but the line feed: a model may write an escape sequence."""
    return "".join(c if c == "\n" or c.isprintable() else " " if c == "\t" else "\ufffd" for c in text)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(0, most - 1)] + "…"


def _length(parts: list[Part]) -> int:
    return sum(len(part.text) for part in parts) + 3 * max(0, len(parts) - 1)
