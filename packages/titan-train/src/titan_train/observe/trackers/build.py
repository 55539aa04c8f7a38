"""Open the trackers that a configuration names.

A run must not die because a dashboard's server does: a tracker that fails while the run is going is dropped with one
warning. `metrics.jsonl` has no such grace: a disk that cannot take it cannot take a checkpoint either.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from titan_train.config.metrics import MetricsConfig
from titan_train.observe.jsonl import JsonlTracker
from titan_train.observe.records import StepRecord, Tracker, ValidationRecord
from titan_train.observe.trackers.registry import check_tracker, find_tracker
from titan_train.observe.trackers.wandb import WandbTracker

log = logging.getLogger(__name__)


def check_trackers(config: MetricsConfig) -> None:
    """Check that the wanted trackers exist and that their packages are installed, without importing them.

    Only one rank opens trackers, but every rank can call this, so that all of them refuse alike.

    Raises:
        ValueError: A tracker that does not exist, or whose package is missing; the message names the extra to install.
    """
    for name, setting in _wanted(config).items():
        check_tracker(name, setting)


def build_trackers(config: MetricsConfig, run_dir: str | Path, resume_step: int = 0) -> list[Tracker]:
    """Open the run's trackers. Call it on one rank only; `metrics.jsonl` is always the first.

    Args:
        config: Which trackers.
        run_dir: The run's folder.
        resume_step: The step training continues from; what was logged about later steps is dropped.

    Raises:
        ValueError: The package of a wanted tracker is missing.
    """
    check_trackers(config)
    run_dir = Path(run_dir)
    trackers: list[Tracker] = [JsonlTracker(run_dir, resume_step=resume_step)]
    for name in _wanted(config):
        if name == "wandb":
            made: Tracker = WandbTracker(run_dir, project=config.wandb_project, resume_step=resume_step)
        else:
            made = find_tracker(name)(run_dir, resume_step=resume_step)
        trackers.append(_UntilItFails(made))
    return trackers


def _wanted(config: MetricsConfig) -> dict[str, str]:
    """Each tracker once, and the setting that asks for it."""
    switches = {"tensorboard": config.tensorboard, "wandb": config.wandb}
    wanted = {name: f"metrics.{name}=true" for name, on in switches.items() if on}
    return {name: f"metrics.trackers={list(config.trackers)!r}" for name in config.trackers} | wanted


class _UntilItFails:
    """A tracker that is dropped, with one warning, when it first raises."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker | None = tracker

    def log_step(self, record: StepRecord) -> None:
        self._try(lambda tracker: tracker.log_step(record))

    def log_validation(self, record: ValidationRecord) -> None:
        self._try(lambda tracker: tracker.log_validation(record))

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        self._try(lambda tracker: tracker.log_event(kind, step=step, **fields))

    def close(self) -> None:
        self._try(lambda tracker: tracker.close())

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as err:  # whatever a third party's client raises, the run goes on
            log.warning("%s failed and is off from here on: %s", type(self._tracker).__name__, err)
            self._tracker = None
