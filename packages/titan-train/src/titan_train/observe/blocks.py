"""`metrics.blocks.jsonl`: the steps of `metrics.jsonl` by blocks of 64, so that a long run is read in a moment.

Problem: a million steps are 400 MB of JSON. Resuming looks for the end of one step in it, the report draws all of it.

Idea: each time 64 steps are logged, one line is appended that covers the bytes of `metrics.jsonl` since the block before:
where they end, the mean and the extremes of each quantity, and everything that is not a step word for word. Blocks
follow each other without gaps, so a reader takes the blocks and then the lines after the last of them; resuming drops the
blocks after its step and reads 64 lines.

The file can be deleted: it is made again on the next resume, and the report then reads every line. A block whose end is
not the end of its last line (somebody edited `metrics.jsonl`) makes all of them void.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from titan_train.files import open_file, parse_json

FILE_NAME = "metrics.blocks.jsonl"
STEPS = 64
QUANTITIES = (
    "loss", "grad_norm", "lr", "tokens_per_s", "tokens_per_s_per_rank", "tflops_per_gpu", "mfu", "peak_mem_gib",
    "data_wait_s", "step_time_s", "load_max", "load_min",
)  # fmt: skip
_FORMAT = 1
_REGULAR = ("step_split", "groups", "activations")


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
    """Step of the last line before that, whatever its kind."""
    most: int = 0
    """Largest step of any line."""
    skipped: int = 0
    tokens: int = 0
    """Tokens trained on, steps that were not logged included."""
    tokens_per_step: int = 0
    """Of the last step."""
    seconds: float = 0.0
    """Seconds of training."""
    elapsed_s: float = 0.0
    """Of the last step."""
    mean: list[float | None] = field(default_factory=list[float | None])
    low: list[float | None] = field(default_factory=list[float | None])
    high: list[float | None] = field(default_factory=list[float | None])
    """Each in the order of `QUANTITIES`."""
    others: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Validations and events, as they were logged."""


class BlockBuilder:
    """Gathers lines of `metrics.jsonl` into blocks.

    Args:
        before: The last block of the lines before, if there is one.
    """

    def __init__(self, before: StepBlock | None = None) -> None:
        self._step, self._elapsed_s = (before.last, before.elapsed_s) if before else (0, 0.0)
        self._reset()

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
        if line.get("event") in _REGULAR:  # one a block: there are many, and each stands for the steps around it
            self._regular[line["event"]] = raw.strip()
            return None
        if line["kind"] != "step":
            self._others.append(raw.strip())
            return None
        self._add_step(line)
        if block.count < STEPS:
            return None
        text = self._encode()
        self._reset()
        return text

    def _add_step(self, line: dict[str, Any]) -> None:
        block, step, elapsed_s = self._block, int(line["step"]), float(line["elapsed_s"])
        block.first, block.last = block.first or step, step
        block.count += 1
        block.skipped += bool(line["skipped"])
        block.tokens_per_step = int(line["tokens"])
        block.tokens += block.tokens_per_step * (step - self._step)
        block.seconds += elapsed_s - self._elapsed_s if elapsed_s >= self._elapsed_s else elapsed_s
        block.elapsed_s = self._elapsed_s = elapsed_s
        self._step = step
        for values, value in zip(self._values, quantities(line), strict=True):
            if math.isfinite(value):
                values.append(value)

    def _encode(self) -> bytes:
        block = self._block
        block.mean = [math.fsum(values) / len(values) if values else None for values in self._values]
        block.low = [min(values, default=None) for values in self._values]
        block.high = [max(values, default=None) for values in self._values]
        values = {name: getattr(block, name) for name in block.__slots__ if name != "others"}
        head = json.dumps(values, separators=(",", ":"))[:-1].encode()
        return head + b',"others":[' + b",".join([*self._others, *self._regular.values()]) + b"]}\n"

    def _reset(self) -> None:
        self._block = StepBlock()
        self._values: list[list[float]] = [[] for _ in QUANTITIES]
        self._others: list[bytes] = []
        self._regular: dict[str, bytes] = {}


def quantities(line: dict[str, Any]) -> list[float]:
    """The quantities of a step's line, in the order of `QUANTITIES`; NaN where there is none.

    Raises:
        KeyError, TypeError, ValueError: The line is not a step's.
    """
    routing = line.get("routing") or {}
    found = (routing.get(name) if name.startswith("load_") else line[name] for name in QUANTITIES)
    return [math.nan if value is None else float(value) for value in found]


def read_blocks(run_dir: Path, metrics: Path) -> Iterator[tuple[StepBlock, int]]:
    """The blocks of a run that are of its `metrics.jsonl`, each with where it ends in the file of blocks."""
    found: list[tuple[StepBlock, int]] = []
    names = {spec.name for spec in fields(StepBlock)}
    position = 0
    try:
        with open_file(run_dir / FILE_NAME) as file:
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


def _is_of(block: StepBlock, metrics: Path) -> bool:
    """Whether a line of the block's last step ends where the block says that it ends."""
    try:
        with open_file(metrics) as file:
            file.seek(max(0, block.end - 2**16))
            last = file.read(block.end - file.tell()).splitlines(keepends=True)[-1]
            return last.endswith(b"\n") and parse_json(last)["step"] == block.at and metrics.stat().st_size >= block.end
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False
