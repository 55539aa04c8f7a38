"""`metrics.jsonl`: one JSON object a line, the record of a run that every other view is made from.

A line is one `write` to a file opened for appending, so a killed process loses nothing that was logged and leaves at
most one torn line, its last. Readers skip such a line. The file is never rewritten: a resumed run cuts it where the
steps begin that will be made again, and appends. Where that is, `titan_train.observe.blocks` tells. NaN is written as
null and infinity as 1e999, so each line is JSON that any reader accepts.
"""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from titan_train.files import open_file, parse_json
from titan_train.observe import blocks
from titan_train.observe.records import StepRecord, ValidationRecord

FILE_NAME = "metrics.jsonl"


PERIODIC_EVENTS = frozenset({"step_split", "groups"})
"""Kinds of events that measure every few steps; the others are something that happened."""


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
        self._clock = clock
        self._file: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._blocks: Path | None = path.with_name(blocks.FILE_NAME)
        try:
            self._cut(path, resume_step)
        except BaseException:
            os.close(self._file)
            raise

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

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError(f"{FILE_NAME} is closed; nothing can be logged after close().")
        self._append(line, encode_line(line))

    def _append(self, line: dict[str, Any], raw: bytes) -> None:
        assert self._file is not None
        written = os.write(self._file, raw)
        if written < len(raw):  # a full disk: leave no torn line for the next one to be appended to
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), FILE_NAME)
        self._size += written
        self._gather(line, raw, self._size)

    def _gather(self, line: dict[str, Any], raw: bytes, end: int) -> None:
        """Append a block when one is full. Best effort: without blocks the report takes longer."""
        if self._blocks is None:
            return
        try:
            block = self._builder.add(line, raw, end)
            if block is not None:
                with self._blocks.open("ab") as file:
                    file.write(block)
        except (OSError, KeyError, TypeError, ValueError, OverflowError):
            self._blocks = None

    def _cut(self, path: Path, step: int) -> None:
        """Cut the file where steps after ``step`` begin; lines of earlier steps that came later are appended again."""
        assert self._file is not None and self._blocks is not None  # noqa: PT018
        kept = self._cut_blocks(path, step)
        self._builder = blocks.BlockBuilder(kept)
        self._size = kept.end if kept is not None else 0
        for line, raw, end in lines_of(path, self._size) if step else ():
            if not raw.endswith(b"\n") or (line is not None and _step_of(line) > step):
                break
            self._size = end
            if line is not None:
                self._gather(line, raw, end)
        late = list(_late_lines(path, self._size, step)) if step else []
        os.ftruncate(self._file, self._size)
        for line, raw in late:
            self._append(line, raw)
        os.fsync(self._file)

    def _cut_blocks(self, path: Path, step: int) -> "blocks.StepBlock | None":
        """Drop the blocks that hold a later step; the last one that stays."""
        assert self._blocks is not None
        kept, size = None, 0
        for block, end in blocks.read_blocks(path.parent, path) if step else ():
            if block.most > step:
                break
            kept, size = block, end
        with contextlib.suppress(OSError):
            if size:
                os.truncate(self._blocks, size)
            else:
                self._blocks.unlink(missing_ok=True)
        return kept


def read_metrics(run_dir: str | Path) -> RunMetrics:
    """Read ``run_dir/metrics.jsonl``, whatever state a killed or running process left it in.

    Of several lines about the same step (or validation) the last one counts. A missing file gives empty lists.
    """
    metrics = RunMetrics()
    steps: dict[int, StepRecord] = {}
    validations: dict[int, ValidationRecord] = {}
    for line, _, _ in lines_of(Path(run_dir) / FILE_NAME):
        try:
            if line is None:
                metrics.unreadable_lines += 1
            elif line["kind"] == "step":
                record = StepRecord(**_typed(line, StepRecord))
                steps[record.step] = record
            elif line["kind"] == "validation":
                validation = as_validation(line)
                validations[validation.step] = validation
            elif line["kind"] == "event":
                metrics.events.append(as_event(line))
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
        ):  # a line of another format, or one that somebody edited
            metrics.unreadable_lines += 1
    metrics.steps = [steps[step] for step in sorted(steps)]
    metrics.validations = [validations[step] for step in sorted(validations)]
    return metrics


def as_validation(line: dict[str, Any]) -> ValidationRecord:
    """The validation that a line records.

    Raises:
        KeyError, TypeError: It is not a validation's.
    """
    return ValidationRecord(**_typed(line, ValidationRecord))


def as_event(line: dict[str, Any]) -> EventRecord:
    """The event that a line records.

    Raises:
        KeyError, TypeError: It is not an event's.
    """
    rest = {k: v for k, v in line.items() if k not in ("kind", "event", "step", "time")}
    step, time = _number(line["step"], int), _number(line["time"], float)
    return EventRecord(kind=str(line["event"]), step=step, time=time, fields=rest)


def lines_of(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any] | None, bytes, int]]:
    """Each line of a file from byte ``start``: as an object (None if it is torn), as bytes, and where it ends."""
    if not path.exists():
        return
    with open_file(path) as file:
        file.seek(start)
        for raw in file:
            start += len(raw)
            try:
                line: object = parse_json(raw) if raw.endswith(b"\n") else None
            except (ValueError, RecursionError):
                line = None
            yield (cast("dict[str, Any]", line) if isinstance(line, dict) else None), raw, start


def encode_line(line: dict[str, object]) -> bytes:
    """One line of JSON, with null for NaN and 1e999 for infinity, in lists and tables too.

    Raises:
        ValueError: If a value is not a JSON value; the message names its key.
    """
    parts: list[str] = []
    for key, value in line.items():
        try:
            parts.append(f"{json.dumps(key)}:{_json(value)}")
        except (TypeError, ValueError) as err:
            raise ValueError(f"{key}={value!r} is not a JSON value; log a number, a string or a list of them.") from err
    return ("{" + ",".join(parts) + "}\n").encode()


def _json(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "null" if math.isnan(value) else "1e999" if value > 0 else "-1e999"
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return "{" + ",".join(f"{json.dumps(str(key))}:{_json(inner)}" for key, inner in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_json, cast("list[object]", value))) + "]"
    return json.dumps(value, allow_nan=False)


def _late_lines(path: Path, start: int, step: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Events and validations up to ``step`` that were logged after later steps, as that of an asynchronous save is."""
    with open_file(path) as file:
        file.seek(start)
        for raw in file:
            if raw.startswith(b'{"kind":"step"') or not raw.endswith(b"\n"):
                continue
            with contextlib.suppress(ValueError, RecursionError):
                line: object = parse_json(raw)
                if isinstance(line, dict) and line.get("kind") != "step" and _step_of(line) <= step:  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
                    yield cast("dict[str, Any]", line), raw


def _step_of(line: dict[str, Any]) -> int:
    step = line.get("step", 0)
    return step if isinstance(step, int) else 0


def _values(record: StepRecord | ValidationRecord) -> dict[str, object]:
    # dataclasses.asdict copies deeply, which takes longer than writing the line
    values = {name: getattr(record, name) for name in record.__slots__}
    for name in ("routing", "split", "memory", "parts"):  # of a dense model, of a step between two measured ones
        if not values.get(name):
            values.pop(name, None)
    return values


def _typed(line: dict[str, Any], record: type) -> dict[str, Any]:
    """The record's own fields out of a line, null read as NaN where the field is a plain float."""
    values: dict[str, Any] = {}
    for spec in fields(record):
        if spec.name not in line and spec.default_factory is not MISSING:
            continue
        value = line[spec.name]
        if value is None and spec.type is float:
            value = math.nan
        values[spec.name] = _number(value, spec.type) if spec.type in (int, float) else value
    return values


def _number(value: Any, kind: Any) -> Any:
    """The value, if it is a number that the field can hold.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(value, (int, float)) or (kind is int and not (isinstance(value, int) and abs(value) < 2**63)):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
