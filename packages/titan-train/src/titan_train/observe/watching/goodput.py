"""Goodput: the share of a run's wall time that made progress, and what took the rest.

Progress is the time of the steps that count, each once: a step that a restart made again counts its last time. Beside it
stand waiting for checkpoints, the time between attempts, and the rest: starting up, validating, steps that were lost.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from titan_train.observe.history import History


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the wall time of a run went, in seconds."""

    wall_s: float
    progress_s: float
    checkpoint_s: float
    """Steps waited for checkpoints."""
    between_s: float
    """Between the end of an attempt and the start of the next."""
    restarts: tuple[str, ...]
    """Why each attempt before the last one ended."""

    @property
    def share(self) -> float:
        """Of the wall time, what made progress; in [0, 1]."""
        return min(1.0, self.progress_s / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def rest_s(self) -> float:
        """Starting up, validating, and steps that were lost."""
        return max(0.0, self.wall_s - self.progress_s - self.checkpoint_s - self.between_s)


def find_goodput(
    history: History, attempts: Sequence[Mapping[str, Any]], now: datetime | None = None
) -> Goodput | None:
    """The goodput of a run so far; None if it has no attempts.

    Args:
        history: From `read_history`.
        attempts: Of `run.json`.
        now: The end of an attempt that goes on; default the present.
    """
    times = [(_time(a.get("started")), _time(a.get("ended"))) for a in attempts]
    started = [start for start, _ in times if start is not None]
    if not started:
        return None
    end = times[-1][1] or now or datetime.now(UTC)
    if attempts[-1].get("status") == "killed":  # it could not say when: at the last it wrote
        end = times[-1][1] or started[-1]
    known = [
        (s, n) for s, n in zip(history.curves["step_time_s"].mean, history.counts, strict=True) if math.isfinite(s)
    ]
    logged = sum(n for _, n in known)
    # steps between two logged ones took as long as those
    progress_s = math.fsum(s * n for s, n in known) / logged * history.steps[-1] if logged else 0.0
    saves = [event.fields.get("seconds", 0.0) for event in history.events if event.kind == "checkpoint_saved"]
    between = [
        (after[0] - before[1]).total_seconds()
        for before, after in pairwise(times)
        if before[1] is not None and after[0] is not None
    ]
    return Goodput(
        wall_s=max((end - started[0]).total_seconds(), progress_s),
        progress_s=progress_s,
        checkpoint_s=math.fsum(float(s) for s in saves if isinstance(s, (int, float))),
        between_s=math.fsum(max(0.0, s) for s in between),
        restarts=tuple(str(a.get("error") or a.get("status")) for a in attempts[:-1]),
    )


def _time(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
