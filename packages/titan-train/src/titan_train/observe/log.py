"""A run's metrics on disk: `metrics.jsonl`, one JSON object a line, and its index by blocks of 64 steps.

`metrics.jsonl` is the record that every other view is made from. A line is one `write` to a file opened for appending, so
a killed process loses nothing that was logged and leaves at most one torn line, its last, which readers skip. The file is
never rewritten: a resumed run cuts it where the steps begin that will be made again, and appends. NaN is written as null
and infinity as 1e999, so each line is JSON that any reader accepts.

A million steps are 400 MB of JSON; resuming looks for the end of one step in it, and the report draws all of it. So each
time 64 steps are logged, one line is appended to `metrics.blocks.jsonl` that covers the bytes of `metrics.jsonl` since the
block before: where they end, the mean and the extremes of each quantity, and everything that is not a step word for word.
Blocks follow each other without gaps, so a reader takes the blocks and then the lines after the last of them; resuming
drops the blocks after its step and reads 64 lines. The index can be deleted: it is made again on the next resume, and the
report then reads every line. A block whose end is not the end of its last line (`metrics.jsonl` was edited) makes all
of them void.
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
from titan_train.observe.records import StepRecord, ValidationRecord

FILE_NAME = "metrics.jsonl"
BLOCKS_NAME = "metrics.blocks.jsonl"
STEPS = 64
"""Steps in a block."""
QUANTITIES = (
    "loss", "grad_norm", "lr", "tokens_per_s", "tokens_per_s_per_rank", "tflops_per_gpu", "mfu", "peak_mem_gib",
    "data_wait_s", "step_time_s", "load_max", "load_min",
)  # fmt: skip
PERIODIC_EVENTS = ("step_split", "groups", "activations", "attention_logits")
"""Kinds of events that measure every step or every few; the others are something that happened."""
_FORMAT = 1
NOT_OURS = (KeyError, TypeError, ValueError, OverflowError)
"""Raised by reading a line of another format, or one that was edited."""


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


@dataclass(slots=True)
class StepBlock:
    """What up to 64 steps have in common. A quantity is None where no step has a finite value of it."""

    format: int = _FORMAT
    first: int = 0
    last: int = 0
    """First and last step."""
    count: int = 0
    """Steps that were logged."""
    end: int = 0
    """Where the block ends in `metrics.jsonl`, in bytes."""
    at: int = 0
    """Step of the last line before that, of any kind."""
    most: int = 0
    """Largest step of any line."""
    skipped: int = 0
    tokens: int = 0
    """Tokens trained on, steps that were not logged included."""
    tokens_per_step: int = 0
    """In the last step."""
    seconds: float = 0.0
    """Seconds of training."""
    elapsed_s: float = 0.0
    """In the last step."""
    mean: list[float | None] = field(default_factory=list[float | None])
    low: list[float | None] = field(default_factory=list[float | None])
    high: list[float | None] = field(default_factory=list[float | None])
    """Each in the order of `QUANTITIES`."""
    others: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Validations and events, as they were logged."""

    def add_step(self, line: dict[str, Any]) -> list[float]:
        """Count a step of `metrics.jsonl`; before its first one, `last` and `elapsed_s` are those of the block before.

        Returns:
            Its quantities in the order of `QUANTITIES`; NaN where there is none.

        Raises:
            KeyError, TypeError, ValueError: The line is not a step's.
        """
        step, elapsed_s = int(line["step"]), float(line["elapsed_s"])
        if not 0 <= step < 2**63 or not math.isfinite(elapsed_s):
            raise ValueError(f"step {step} at {elapsed_s} s cannot be")
        routing = line.get("routing") or {}
        found = (routing.get(name) if name.startswith("load_") else line[name] for name in QUANTITIES)
        values = [math.nan if value is None else float(value) for value in found]
        self.tokens_per_step = int(line["tokens"])
        self.tokens += self.tokens_per_step * (step - self.last)
        # a resumed attempt's clock goes on, or begins at 0
        self.seconds += elapsed_s - self.elapsed_s if elapsed_s >= self.elapsed_s else elapsed_s
        self.first, self.last, self.elapsed_s = self.first or step, step, elapsed_s
        self.count += 1
        self.skipped += bool(line["skipped"])
        return values


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
        self._blocks: Path | None = path.with_name(BLOCKS_NAME)
        try:
            self._cut(path, resume_step)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def elapsed_s(self) -> float:
        """Seconds of training up to the last step in the file, from which the clock of a resumed run goes on."""
        return self._builder.elapsed_s

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
        except (OSError, *NOT_OURS):
            self._blocks = None

    def _cut(self, path: Path, step: int) -> None:
        """Cut the file where steps after ``step`` begin; lines of earlier steps that came later are appended again."""
        assert self._file is not None and self._blocks is not None  # noqa: PT018
        kept = self._cut_blocks(path, step)
        self._builder = BlockBuilder(kept)
        self._size = kept.end if kept is not None else 0
        late: list[tuple[dict[str, Any], bytes]] = []
        cut = False
        for line, raw, end in lines_of(path, self._size) if step else ():
            cut |= not raw.endswith(b"\n") or (line is not None and _step_of(line) > step)
            if not cut:
                self._size = end
                if line is not None:
                    self._gather(line, raw, end)
            elif line is not None and line.get("kind") != "step" and _step_of(line) <= step:
                late.append((line, raw))  # such as that of an asynchronous save
        os.ftruncate(self._file, self._size)
        for line, raw in late:
            self._append(line, raw)
        os.fsync(self._file)

    def _cut_blocks(self, path: Path, step: int) -> StepBlock | None:
        """Drop the blocks that hold a later step; the last one that stays."""
        assert self._blocks is not None
        kept, size = None, 0
        for block, end in read_blocks(path.parent, path) if step else ():
            if block.most > step:
                break
            kept, size = block, end
        with contextlib.suppress(OSError):
            if size:
                os.truncate(self._blocks, size)
            else:
                self._blocks.unlink(missing_ok=True)
        return kept


class BlockBuilder:
    """Gathers lines of `metrics.jsonl` into blocks.

    Args:
        before: The last block of the lines before, if there is one.
    """

    def __init__(self, before: StepBlock | None = None) -> None:
        self._reset(before or StepBlock())

    @property
    def elapsed_s(self) -> float:
        """That of the last step."""
        return self._block.elapsed_s

    def add(self, line: dict[str, Any], raw: bytes, end: int) -> bytes | None:
        """Take the next line.

        Args:
            line: What it says.
            raw: Its bytes.
            end: Where it ends in the file.

        Returns:
            The line of a block, each time one is full.
        """
        block = self._block
        block.end, block.at = end, int(line["step"])
        block.most = max(block.most, block.at)
        if line.get("event") in PERIODIC_EVENTS:  # there are many, and each stands for the steps around it
            self._regular[line["event"]] = raw.strip()
            return None
        if line["kind"] != "step":
            self._others.append(raw.strip())
            return None
        for values, value in zip(self._values, block.add_step(line), strict=True):
            if math.isfinite(value):
                values.append(value)
        if block.count < STEPS:
            return None
        text = self._encode()
        self._reset(block)
        return text

    def _encode(self) -> bytes:
        block = self._block
        block.mean = [math.fsum(values) / len(values) if values else None for values in self._values]
        block.low = [min(values, default=None) for values in self._values]
        block.high = [max(values, default=None) for values in self._values]
        values = {name: getattr(block, name) for name in block.__slots__ if name != "others"}
        head = json.dumps(values, separators=(",", ":"))[:-1].encode()
        return head + b',"others":[' + b",".join([*self._others, *self._regular.values()]) + b"]}\n"

    def _reset(self, before: StepBlock) -> None:
        self._block = StepBlock(last=before.last, elapsed_s=before.elapsed_s)
        self._values: list[list[float]] = [[] for _ in QUANTITIES]
        self._others: list[bytes] = []
        self._regular: dict[str, bytes] = {}


def read_metrics(run_dir: str | Path) -> RunMetrics:
    """Read ``run_dir/metrics.jsonl``, also one that a killed or running process left incomplete.

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
        except NOT_OURS:
            metrics.unreadable_lines += 1
    metrics.steps = [steps[step] for step in sorted(steps)]
    metrics.validations = [validations[step] for step in sorted(validations)]
    return metrics


def read_blocks(run_dir: Path, metrics: Path) -> Iterator[tuple[StepBlock, int]]:
    """The blocks of a run that are of its `metrics.jsonl`, each with where it ends in the file of blocks."""
    found: list[tuple[StepBlock, int]] = []
    names = {spec.name for spec in fields(StepBlock)}
    position = 0
    try:
        with open_file(run_dir / BLOCKS_NAME) as file:
            for raw in file:
                values = parse_json(raw)
                if not raw.endswith(b"\n") or values.keys() != names or values["format"] != _FORMAT:
                    break
                position += len(raw)
                found.append((StepBlock(**values), position))
    except (OSError, ValueError, AttributeError, RecursionError):
        pass  # what was read so far counts
    if found and _is_of(found[-1][0], metrics):
        yield from found


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


def _is_of(block: StepBlock, metrics: Path) -> bool:
    """Whether a line of the block's last step ends where the block says that it ends."""
    try:
        with open_file(metrics) as file:
            file.seek(max(0, block.end - 2**16))
            last = file.read(block.end - file.tell()).splitlines(keepends=True)[-1]
            return last.endswith(b"\n") and parse_json(last)["step"] == block.at and metrics.stat().st_size >= block.end
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False


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


def _step_of(line: dict[str, Any]) -> int:
    step = line.get("step", 0)
    return step if isinstance(step, int) else 0


def _values(record: StepRecord | ValidationRecord) -> dict[str, object]:
    # dataclasses.asdict copies deeply, which takes longer than writing the line
    values = {name: getattr(record, name) for name in record.__slots__}
    for name in (
        "routing",
        "mtp_losses",
        "context",
        "split",
        "memory",
        "parts",
    ):  # not measured in this step, or not of this model
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
