"""The text of the progress display: a bar line and a sample for a terminal, `key=value` lines for a file."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titan_train.observe.format import short_count, short_duration, short_gib, short_loss
from titan_train.observe.records import StepRecord, ValidationRecord

if TYPE_CHECKING:
    from rich.text import Text

_LEAST_BAR, _MOST_BAR = 8, 40
_SAMPLE_LINES = 5
_SAMPLE_COLUMNS = 160
_SPARKS = "▁▂▃▄▅▆▇█"


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
        picked = [finite[i * (len(finite) - 1) // (width - 1)] for i in range(width)]
        low, high = min(picked), max(picked)
        span = (high - low) or 1.0
        return "".join(_SPARKS[round(7 * (v - low) / span)] for v in picked)


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
