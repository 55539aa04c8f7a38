"""The numbers of a run that one reads first, and the same as text for the terminal."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_train.observe import History
from titan_train.observe.format import short_count, short_duration, short_gib, short_loss
from titan_train.report.changes import branched_from, change_lines
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
    history, validations = folder.history, folder.history.validations
    found: list[Headline] = []
    if not history.steps:
        return found
    losses = _known(history, "loss")
    if losses:
        count = tail_count(history, "loss")
        averaged = f"mean of the last {count} logged steps" if count > 1 else "the last logged step"
        note = f"{averaged}; started at {short_loss(losses[0])}"
        found.append(Headline("Training loss", short_loss(tail_mean(history, "loss")), note))
    if validations:
        best = min(validations, key=lambda record: record.loss if math.isfinite(record.loss) else math.inf)
        newest = validations[-1]
        other = f"best {short_loss(best.loss)} at step {best.step}" if best.step != newest.step else "the best"
        note = f"the last, on {short_count(newest.tokens)} tokens; {other}"
        found.append(Headline("Validation loss", short_loss(newest.loss), note))
        if newest.bits_per_byte is not None:
            found.append(Headline("Bits per byte", short_loss(newest.bits_per_byte), "of the last validation"))
    total = folder.total_steps
    share = f"{history.steps[-1] / total:.0%} of {total:,}" if total else ""
    found.append(Headline("Steps", f"{history.steps[-1]:,}", share))
    parent = branched_from(folder)
    before = f"; those of {parent} come before" if parent else ""
    found.append(
        Headline("Tokens", short_count(history.tokens), f"{short_count(history.tokens_per_step)} per step{before}")
    )
    rate, per_rank, mfu, tflops = map(
        history.median, ("tokens_per_s", "tokens_per_s_per_rank", "mfu", "tflops_per_gpu")
    )
    if math.isfinite(rate):
        note = f"median; {short_count(per_rank)} per rank" if math.isfinite(per_rank) else "median"
        found.append(Headline("Tokens per second", short_count(rate), note))
    if math.isfinite(mfu):
        note = f"median; {tflops:.0f} TFLOP/s per GPU" if math.isfinite(tflops) else "median"
        found.append(Headline("MFU", f"{mfu:.1%}", note))
    peaks = [peak for peak in history.curves["peak_mem_gib"].high if math.isfinite(peak)]
    if peaks:
        found.append(Headline("Peak memory", short_gib(max(peaks)), "the most of rank 0"))
    found.append(Headline("Time", short_duration(history.seconds), _waiting(history)))
    return found


def tail_mean(history: History, name: str) -> float:
    """Mean of a quantity over the last twentieth of the steps, of at most 100, of at least one."""
    wanted = tail_count(history, name)
    total, taken = 0.0, 0
    for value, steps in reversed(list(zip(history.curves[name].mean, history.counts, strict=True))):
        if math.isfinite(value):
            count = min(steps, wanted - taken)
            total, taken = total + value * count, taken + count
    return total / taken


def tail_count(history: History, name: str) -> int:
    """How many steps `tail_mean` averages."""
    pairs = zip(history.curves[name].mean, history.counts, strict=True)
    known = sum(count for value, count in pairs if math.isfinite(value))
    return max(1, min(_MOST_AVERAGED, round(known * _AVERAGED_PART)))


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
    if parent := branched_from(folder):
        parts.append(f"branched from {parent}")
    return " · ".join(parts)


def when(stamp: Any) -> str:
    """An ISO time as people write it, to the minute."""
    return stamp[:16].replace("T", " ") + " UTC" if isinstance(stamp, str) and len(stamp) >= 16 else "–"


def summarize(run: str | Path | RunFolder) -> str:
    """The run in a few lines of text.

    Args:
        run: Its folder, or what was read of it.

    Raises:
        ValueError: If ``run`` is not the folder of a run.
    """
    folder = run if isinstance(run, RunFolder) else read_folder(run)
    lines = [f"{folder.name}: {folder.status}", setting(folder)]
    if folder.attempts and folder.attempts[-1].get("error"):
        lines.append(f"error: {folder.attempts[-1]['error']}")
    rows = headlines(folder)
    width = max((len(row.label) for row in rows), default=0)
    lines += [f"  {row.label:<{width}}  {row.value}" + (f"  ({row.note})" if row.note else "") for row in rows]
    if not rows:
        lines.append("  no step was logged")
    lines += [f"  {line}" for line in (*change_lines(folder.history.events), *_skipped(folder.history))]
    return "\n".join(line for line in lines if line)


def _skipped(history: History) -> list[str]:
    """Steps that were left out, by their reasons: events tell the others, and those of steps that were not logged too."""
    steps: dict[str, set[int]] = {"nonfinite": set(), "spike": set(), "persistent hardware": set()}
    for event in history.events:
        kind = str(event.fields.get("verdict")) if event.kind == "rerun" else event.kind
        steps.get(kind, set()).add(event.step)
    spikes, faulty = len(steps["spike"]), len(steps["persistent hardware"] - steps["spike"])
    nonfinite = len(steps["nonfinite"] - steps["persistent hardware"])
    counts = {
        "the loss or the gradient was not finite": max(nonfinite, history.skipped - spikes - faulty),
        "the gradient was far larger than usual": spikes,
        "a rank computed wrongly": faulty,
    }
    return [
        f"{count} step{'s were' if count > 1 else ' was'} skipped because {reason}"
        for reason, count in counts.items()
        if count > 0
    ]


def _waiting(history: History) -> str:
    busy, waited = history.weighted("step_time_s"), history.weighted("data_wait_s")
    return f"{waited / busy:.1%} of step time waiting for data" if busy > 0 else ""


def _known(history: History, name: str) -> list[float]:
    """The finite values of a quantity."""
    return [value for value in history.curves[name].mean if math.isfinite(value)]
