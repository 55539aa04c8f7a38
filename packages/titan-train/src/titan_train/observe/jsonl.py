"""`metrics.jsonl`: one JSON object a line, the record of a run that every other view is made from.

A line is one `write` to a file opened for appending, so a killed process loses nothing that was logged and leaves at
most one torn line, its last. Readers skip such a line; opening the file for a resumed run removes it, together with
every line of a step that will be made again. NaN is written as null and infinity as 1e999, so each line is JSON that
any reader accepts.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from titan_train.files import write_atomic
from titan_train.observe.records import StepRecord, ValidationRecord

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord:
    """Something that happened at a step, such as a checkpoint."""

    kind: str
    """``checkpoint_saved``, ``checkpoint_restored``, ``nonfinite``, ``stopped``, …"""
    step: int
    time: float
    """When, in Unix seconds."""
    fields: dict[str, Any]
    """What else was logged with it."""


@dataclass(slots=True)
class RunMetrics:
    """What `metrics.jsonl` says, each list in step order."""

    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    validations: list[ValidationRecord] = field(default_factory=list[ValidationRecord])
    events: list[EventRecord] = field(default_factory=list[EventRecord])
    unreadable_lines: int = 0
    """Lines that are not a whole JSON object; a killed run leaves at most one."""


class JsonlTracker:
    """Appends records to ``run_dir/metrics.jsonl``."""

    def __init__(self, run_dir: str | Path, *, resume_step: int = 0, clock: Callable[[], float] = time.time) -> None:
        """Open the file, keeping only what happened up to ``resume_step``.

        Args:
            run_dir: The run's folder; made if missing.
            resume_step: The step training continues from. Lines of later steps are removed, for they will be logged
                again; 0 starts an empty file.
            clock: Unix seconds.

        Raises:
            ValueError: If ``resume_step`` is negative.
        """
        if resume_step < 0:
            raise ValueError(f"resume_step={resume_step} must be >= 0; 0 starts from nothing.")
        path = Path(run_dir) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep_up_to(path, resume_step)
        self._clock = clock
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def log_step(self, record: StepRecord) -> None:
        """Write one step."""
        self._write({"kind": "step", **_values(record), "time": self._now()})

    def log_validation(self, record: ValidationRecord) -> None:
        """Write one validation."""
        self._write({"kind": "validation", **_values(record), "time": self._now()})

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Write one event. ``fields`` must be JSON values.

        Raises:
            ValueError: If a field is not a JSON value, or is named like one of the line's own keys.
        """
        clash = {"kind", "event", "time"} & fields.keys()
        if clash:
            raise ValueError(f"event field {sorted(clash)[0]!r} is a key every line has; give it another name.")
        self._write({"kind": "event", "event": kind, "step": step, **fields, "time": self._now()})

    def close(self) -> None:
        """Bring the file to the disk and close it. Safe to call twice."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def _now(self) -> float:
        return round(self._clock(), 3)

    def _write(self, line: dict[str, object]) -> None:
        if self._file is None:
            raise RuntimeError(f"{FILE_NAME} is closed; nothing can be logged after close().")
        os.write(self._file, encode_line(line))


def read_metrics(run_dir: str | Path) -> RunMetrics:
    """Read ``run_dir/metrics.jsonl``, whatever state a killed or running process left it in.

    Of several lines about the same step (or validation) the last one counts. A missing file gives empty lists.
    """
    metrics = RunMetrics()
    steps: dict[int, StepRecord] = {}
    validations: dict[int, ValidationRecord] = {}
    for line, _ in _lines(Path(run_dir) / FILE_NAME):
        try:
            if line is None:
                metrics.unreadable_lines += 1
            elif line["kind"] == "step":
                record = StepRecord(**_typed(line, StepRecord))
                steps[record.step] = record
            elif line["kind"] == "validation":
                validation = ValidationRecord(**_typed(line, ValidationRecord))
                validations[validation.step] = validation
            elif line["kind"] == "event":
                rest = {k: v for k, v in line.items() if k not in ("kind", "event", "step", "time")}
                metrics.events.append(
                    EventRecord(kind=line["event"], step=line["step"], time=line["time"], fields=rest)
                )
        except (KeyError, TypeError, ValueError):  # a line of another format, or one that somebody edited
            metrics.unreadable_lines += 1
    metrics.steps = [steps[step] for step in sorted(steps)]
    metrics.validations = [validations[step] for step in sorted(validations)]
    return metrics


def encode_line(line: dict[str, object]) -> bytes:
    """One line of JSON, with null for NaN and 1e999 for infinity.

    Raises:
        ValueError: If a value is not a JSON value; the message names its key.
    """
    parts: list[str] = []
    for key, value in line.items():
        if isinstance(value, float) and not math.isfinite(value):
            text = "null" if math.isnan(value) else "1e999" if value > 0 else "-1e999"
        else:
            try:
                text = json.dumps(value, allow_nan=False, separators=(",", ":"))
            except (TypeError, ValueError) as err:
                raise ValueError(
                    f"{key}={value!r} is not a JSON value; log a number, a string or a list of them."
                ) from err
        parts.append(f"{json.dumps(key)}:{text}")
    return ("{" + ",".join(parts) + "}\n").encode()


def _keep_up_to(path: Path, step: int) -> None:
    """Rewrite the file without torn lines and without lines of steps after ``step``; atomic."""
    if not path.exists():
        return
    kept = [raw for line, raw in _lines(path) if step and line is not None and line.get("step", 0) <= step]
    write_atomic(path, b"".join(kept), sync=True)


def _lines(path: Path) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
    """Each line as an object (None if it is torn) and as bytes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                line: object = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                line = None
            yield (cast("dict[str, Any]", line) if isinstance(line, dict) else None), raw


def _values(record: StepRecord | ValidationRecord) -> dict[str, object]:
    # dataclasses.asdict copies deeply, which takes longer than writing the line
    values = {name: getattr(record, name) for name in record.__slots__}
    if not values.get("routing"):  # of a dense model
        values.pop("routing", None)
    return values


def _typed(line: dict[str, Any], record: type) -> dict[str, Any]:
    """The record's own fields out of a line, null read as NaN where the field is a plain float."""
    values: dict[str, Any] = {}
    for spec in fields(record):
        if spec.name not in line and spec.default_factory is not MISSING:
            continue
        value = line[spec.name]
        values[spec.name] = math.nan if value is None and spec.type is float else value
    return values
