"""What went wrong in a run, and what was done about it: ended attempts, and events of faults."""

import math
import re
from dataclasses import dataclass
from typing import Any

from titan_train.observe.run_info import began_at, read_ends
from titan_train.report.folder import RunFolder

# Kinds of events that report a fault
_FAULTY = re.compile(
    r"nonfinite|fault|straggler|slow|imbalance|unbalanced|spike|rerun|verdict|(?<!c)hang|passed_over|failed|lost|retry|oom"
)
_MOST = 100
_ENDED = ("finished", "stopped", "failed", "killed")


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
    starts, ended = folder.attempts, _ended(folder)
    afters: list[dict[str, Any] | None] = [end for _, end in ended[1:]]
    if ended:  # the one under way, if there is one, has no end
        afters.append(next((a for a in starts if ended[-1][0] < began_at(a) < math.inf), None))
    running = folder.status == "running"
    found: list[FaultRow] = []
    for (_, end), after in zip(ended, afters, strict=True):
        text = str(end.get("end"))
        if text in ("finished", "stopped"):
            continue
        then = "" if running else "the run ended"
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
        left_out = event.kind in ("nonfinite", "spike") or said.get("verdict") == "persistent hardware"
        then = "the update was left out" if left_out else ""
        found.append(FaultRow(event.step, event.time, event.kind.replace("_", " "), cause, then))
    return found


def _ended(folder: RunFolder) -> list[tuple[float, dict[str, Any]]]:
    """Ends of attempts, in order of the times beside them: the supervisor's lines, and those of run.json that it did not see."""
    lines = [(_seconds(end.get("time")), end) for end in read_ends(folder.path)]
    found, began = list(lines), [began_at(attempt) for attempt in folder.attempts]
    for attempt, since, until in zip(folder.attempts, began, [*began[1:], math.inf], strict=False):
        status = attempt.get("status")
        if status not in _ENDED or any(since <= time < until for time, _ in lines):
            continue
        end = attempt.get("error") if status in ("failed", "killed") else None
        found.append((since, {**attempt, "end": end or status, "time": attempt.get("ended")}))
    return sorted(found, key=lambda entry: entry[0])


def _seconds(time: Any) -> float:
    return float(time) if isinstance(time, int | float) else math.inf
