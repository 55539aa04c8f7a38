"""What is appended to a run's `metrics.jsonl`, line by line, as it appears."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from titan_train.files import parse_json
from titan_train.observe.jsonl import FILE_NAME


class Follower:
    """Reads the file from where it last stopped. A line that is not whole yet waits; a file that shrank is read anew."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE_NAME
        self._at = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines since the last call; empty while there are none."""
        try:
            if self.path.stat().st_size < self._at:  # a resumed run cut it
                self._at = 0
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        lines: list[dict[str, Any]] = []
        for raw in whole.splitlines():
            try:
                line: object = parse_json(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and _is_record(cast("dict[str, Any]", line)):
                lines.append(cast("dict[str, Any]", line))
        return lines


_KINDS = ("step", "validation", "event")
_NUMBERS = (
    "step",
    "time",
    "loss",
    "bits_per_byte",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "mfu",
    "peak_mem_gib",
    "step_time_s",
)


def _is_record(line: Mapping[str, Any]) -> bool:
    """Whether a line is one that this package writes: the file may be anyone's."""
    kind = line.get("kind")
    step = line.get("step", 0 if kind == "event" else None)
    if kind not in _KINDS or not _is_number(step) or not abs(step) < 2**63:
        return False
    if not all(line.get(name) is None or _is_number(line[name]) for name in _NUMBERS):
        return False
    split = line.get("split")
    if split and not (isinstance(split, dict) and all(map(_is_number, cast("dict[str, Any]", split).values()))):
        return False
    return line.get("event") != "step_split" or _is_step_split(line)


def _is_step_split(line: Mapping[str, Any]) -> bool:
    try:
        shown = [line["wall_ms"], *line["phases_ms"].values(), *(axis["exposed_ms"] for axis in line["axes"].values())]
        return _is_number(line["step"]) and all(_is_number(ms[1]) for ms in shown)
    except (KeyError, IndexError, TypeError, AttributeError):
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))  # a loss may be infinite, or none
