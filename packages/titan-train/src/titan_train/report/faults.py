"""What went wrong in a run, and what was done about it: ended attempts, and events of faults."""

import re
from dataclasses import dataclass
from typing import Any

from titan_train.files import parse_json
from titan_train.report.folder import RunFolder

_JOURNAL = "attempts.jsonl"
# Kinds of events that report a fault
_FAULTY = re.compile(
    r"nonfinite|fault|straggler|slow|imbalance|unbalanced|spike|rerun|verdict|(?<!c)hang|passed_over|failed|lost|retry|oom"
)
_MOST = 100


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One line of the section."""

    step: int | None
    when: float | str | None
    """Unix seconds, or an ISO time."""
    what: str
    cause: str
    then: str


def faults(folder: RunFolder) -> list[FaultRow]:
    """Attempts that did not end as they should, and faulty events, in step order; the last 100."""
    found = [*_attempts(folder), *_events(folder)]
    found.sort(key=lambda fault: fault.step if fault.step is not None else -1)
    return found[-_MOST:]


def _attempts(folder: RunFolder) -> list[FaultRow]:
    ends = _journal(folder)
    if not ends:  # not supervised: what run.json says
        ends = [
            {"end": a.get("error") or a.get("status"), "to_step": a.get("to_step"), "time": a.get("ended")}
            for a in folder.attempts
            if a.get("status") in ("failed", "killed")
        ]
    found: list[FaultRow] = []
    for i, end in enumerate(ends):
        text = str(end.get("end"))
        if text in ("finished", "stopped"):
            continue
        after = ends[i + 1] if i + 1 < len(ends) else None
        then = "the run ended"
        if after is not None:
            then = f"continued from step {after.get('from_step', '?')} on {after.get('world_size', '?')} ranks"
            if isinstance(after.get("recovered_s"), int | float):
                then += f" after {after['recovered_s']:.1f} s"
        step = end.get("to_step")
        found.append(FaultRow(step if isinstance(step, int) else None, end.get("time"), "attempt ended", text, then))
    return found


def _events(folder: RunFolder) -> list[FaultRow]:
    found: list[FaultRow] = []
    for event in folder.history.events:
        if _FAULTY.search(event.kind) is None:
            continue
        said = {name: value for name, value in event.fields.items() if name != "loss" and value is not None}
        cause = str(said["text"]) if "text" in said else ", ".join(f"{name} {value}" for name, value in said.items())
        then = "the update was left out" if event.kind == "nonfinite" else ""
        found.append(FaultRow(event.step, event.time, event.kind.replace("_", " "), cause, then))
    return found


def _journal(folder: RunFolder) -> list[dict[str, Any]]:
    try:
        raw = (folder.path / _JOURNAL).read_bytes()
    except OSError:
        return []
    lines: list[dict[str, Any]] = []
    for text in raw.splitlines():
        try:
            line = parse_json(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and "end" in line:
            lines.append(line)
    return lines
