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
    ends, starts = read_ends(folder.path), folder.attempts
    if ends:  # the one under way, if there is one, is in run.json alone
        pairs = list(zip(ends, [*ends[1:], _started_after(ends[-1], starts)], strict=True))
    else:  # not supervised: what run.json says
        pairs = [
            ({"end": a.get("error") or a.get("status"), "to_step": a.get("to_step"), "time": a.get("ended")}, after)
            for a, after in zip(starts, [*starts[1:], None], strict=False)
            if a.get("status") in ("failed", "killed")
        ]
    running = folder.status == "running"
    found: list[FaultRow] = []
    for end, after in pairs:
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


def _started_after(end: dict[str, Any], attempts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The attempt that followed one that ended then."""
    ended = end.get("time")
    return next((a for a in attempts if isinstance(ended, int | float) and ended < began_at(a) < math.inf), None)
