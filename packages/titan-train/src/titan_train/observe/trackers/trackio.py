"""Trackio: a local dashboard (``trackio show --project titan``)."""

import importlib
from pathlib import Path
from typing import Any

from titan_train.observe.records import StepRecord, ValidationRecord
from titan_train.observe.trackers.registry import check_tracker
from titan_train.observe.trackers.scalars import step_scalars, validation_scalars


class TrackioTracker:
    """Sends metrics to Trackio's project ``titan``; a resumed run continues the run of the same name.

    Where its database is, is Trackio's own business (``TRACKIO_DIR``).
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        """Start or continue the Trackio run.

        Raises:
            ValueError: If Trackio is not installed.
        """
        check_tracker("trackio", "TrackioTracker")
        trackio: Any = importlib.import_module("trackio")
        self._run: Any = trackio.init(
            project="titan",
            name=run_dir.name,
            resume="allow" if resume_step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_step(self, record: StepRecord) -> None:
        """Send the step's scalars."""
        self._run.log(step_scalars(record), step=record.step)

    def log_validation(self, record: ValidationRecord) -> None:
        """Send the validation's scalars."""
        self._run.log(validation_scalars(record), step=record.step)

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Send the event as a count, with its fields."""
        self._run.log({f"event/{kind}": 1, **{f"event/{kind}/{k}": v for k, v in fields.items()}}, step=step)

    def close(self) -> None:
        """Finish the Trackio run. Safe to call twice."""
        if self._run is not None:
            self._run.finish()
            self._run = None
