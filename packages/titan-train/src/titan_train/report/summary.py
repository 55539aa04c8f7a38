"""The numbers of a run that one reads first, and the same as text for the terminal."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_train.observe.format import short_count, short_duration, short_gib, short_loss
from titan_train.report.folder import RunFolder, read_folder

# The loss of one batch is noisy: "at the end" is the mean of this part of the run, of at most _MOST_AVERAGED steps.
_AVERAGED_PART, _MOST_AVERAGED = 0.05, 100


@dataclass(frozen=True, slots=True)
class Headline:
    """One number, with what it says."""

    label: str
    value: str
    note: str = ""


def headlines(folder: RunFolder) -> list[Headline]:
    """The run in at most eight numbers; those that are not known are left out."""
    steps, validations = folder.metrics.steps, folder.metrics.validations
    found: list[Headline] = []
    if not steps:
        return found
    last = steps[-1]
    losses = [record.loss for record in steps if math.isfinite(record.loss)]
    if losses:
        count = tail_count(len(losses))
        averaged = f"mean of the last {count} logged steps" if count > 1 else "of the last logged step"
        note = f"{averaged}; started at {short_loss(losses[0])}"
        found.append(Headline("Training loss", short_loss(tail_mean(losses)), note))
    if validations:
        best = min(validations, key=lambda record: record.loss if math.isfinite(record.loss) else math.inf)
        newest = validations[-1]
        note = f"best {short_loss(best.loss)} at step {best.step}" if best.step != newest.step else "best so far"
        found.append(Headline("Validation loss", short_loss(newest.loss), note))
        if newest.bits_per_byte is not None:
            found.append(Headline("Bits per byte", short_loss(newest.bits_per_byte), "on the validation text"))
    total = folder.total_steps
    share = f"{last.step / total:.0%} of {total:,}" if total else ""
    found.append(Headline("Steps", f"{last.step:,}", share))
    found.append(Headline("Tokens", short_count(trained_tokens(folder)), f"{short_count(last.tokens)} per step"))
    rates = [record.tokens_per_s for record in steps if record.tokens_per_s > 0]
    if rates:
        per_rank = statistics.median(record.tokens_per_s_per_rank for record in steps)
        note = f"median; {short_count(per_rank)} per rank"
        found.append(Headline("Tokens per second", short_count(statistics.median(rates)), note))
    mfus = [record.mfu for record in steps if record.mfu is not None]
    if mfus:
        tflops = [record.tflops_per_gpu for record in steps if record.tflops_per_gpu is not None]
        note = f"median; {statistics.median(tflops):.0f} TFLOP/s per GPU" if tflops else "median"
        found.append(Headline("MFU", f"{statistics.median(mfus):.1%}", note))
    found.append(Headline("Peak memory", short_gib(max(record.peak_mem_gib for record in steps)), "per rank"))
    found.append(Headline("Time", short_duration(trained_seconds(folder)), _waiting(folder)))
    return found


def tail_mean(values: Sequence[float]) -> float:
    """Mean of the last twentieth of the values, of at most 100, of at least one."""
    return statistics.fmean(values[-tail_count(len(values)) :])


def tail_count(count: int) -> int:
    """How many of ``count`` values `tail_mean` averages."""
    return max(1, min(_MOST_AVERAGED, round(count * _AVERAGED_PART)))


def trained_tokens(folder: RunFolder) -> int:
    """Tokens trained on, steps between two logged ones included."""
    total, previous = 0, 0
    for record in folder.metrics.steps:
        total += record.tokens * (record.step - previous)
        previous = record.step
    return total


def trained_seconds(folder: RunFolder) -> float:
    """Seconds of training over all attempts, whether a resumed attempt's clock went on or began at 0."""
    total, previous = 0.0, 0.0
    for record in folder.metrics.steps:
        total += record.elapsed_s - previous if record.elapsed_s >= previous else record.elapsed_s
        previous = record.elapsed_s
    return total


def setting(folder: RunFolder) -> str:
    """What trained where, in one line: ``42.1M parameters · 2 × cpu · started 2026-11-21 05:09``."""
    info = folder.info
    parts: list[str] = []
    if isinstance(info.get("parameters"), int):
        parts.append(f"{short_count(info['parameters'])} parameters")
    if info.get("device"):
        parts.append(f"{info.get('world_size', 1)} × {info['device']}")
    if folder.attempts:
        parts.append(f"started {when(folder.attempts[0].get('started'))}")
        if len(folder.attempts) > 1:
            parts.append(f"{len(folder.attempts)} attempts")
    return " · ".join(parts)


def when(stamp: Any) -> str:
    """An ISO time as people write it, to the minute."""
    return stamp[:16].replace("T", " ") + " UTC" if isinstance(stamp, str) and len(stamp) >= 16 else "–"


def summarize(run_dir: str | Path) -> str:
    """The run in a few lines of text.

    Raises:
        ValueError: If ``run_dir`` is not the folder of a run.
    """
    folder = read_folder(run_dir)
    lines = [f"{folder.name}: {folder.status}", setting(folder)]
    if folder.attempts and folder.attempts[-1].get("error"):
        lines.append(f"error: {folder.attempts[-1]['error']}")
    rows = headlines(folder)
    width = max((len(row.label) for row in rows), default=0)
    lines += [f"  {row.label:<{width}}  {row.value}" + (f"  ({row.note})" if row.note else "") for row in rows]
    if not rows:
        lines.append("  no step was logged")
    skipped = sum(record.skipped for record in folder.metrics.steps)
    if skipped:
        lines.append(f"  {skipped} steps were skipped because the loss or the gradient was not finite")
    return "\n".join(line for line in lines if line)


def _waiting(folder: RunFolder) -> str:
    busy = sum(record.step_time_s for record in folder.metrics.steps)
    waited = sum(record.data_wait_s for record in folder.metrics.steps)
    return f"{waited / busy:.1%} of step time waiting for data" if busy > 0 else ""
