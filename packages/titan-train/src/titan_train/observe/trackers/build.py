"""Open the trackers that a configuration names."""

from functools import partial
from pathlib import Path

from titan_train.config.metrics import MetricsConfig
from titan_train.observe.jsonl import JsonlTracker
from titan_train.observe.records import Tracker
from titan_train.observe.trackers.beside import TrackerBeside
from titan_train.observe.trackers.registry import check_tracker, find_tracker
from titan_train.observe.trackers.wandb import WandbTracker, check_login


def check_trackers(config: MetricsConfig) -> None:
    """Check that the wanted trackers exist, that their packages are installed, and that wandb finds a key, importing none.

    Only one rank opens trackers, but every rank can call this, so that all of them refuse alike.

    Raises:
        ValueError: A tracker that does not exist, or whose package or key is missing; the message says what to do.
    """
    for name, setting in _wanted(config).items():
        check_tracker(name, setting)
        if name == "wandb":
            check_login(setting)


def build_trackers(config: MetricsConfig, run_dir: str | Path, resume_step: int = 0) -> list[Tracker]:
    """Open the run's trackers, each on a thread of its own; `metrics.jsonl` is always the first. Call it on one rank only.

    Args:
        config: Which trackers.
        run_dir: The run's folder.
        resume_step: The step training continues from; what was logged about later steps is dropped.

    Raises:
        ValueError: A new run's trackers cannot work, as `check_trackers` finds. A run that continues goes on without them.
    """
    if resume_step == 0:
        check_trackers(config)
    run_dir = Path(run_dir)

    def opened(name: str, step: int) -> Tracker:
        if name == "wandb":
            return WandbTracker(run_dir, project=config.wandb_project, resume_step=step)
        return find_tracker(name)(run_dir, resume_step=step)

    record = JsonlTracker(run_dir, resume_step=resume_step)
    return [record, *(TrackerBeside(name, partial(opened, name), resume_step) for name in _wanted(config))]


def _wanted(config: MetricsConfig) -> dict[str, str]:
    """Each tracker once, and the setting that asks for it."""
    switches = {"tensorboard": config.tensorboard, "wandb": config.wandb}
    wanted = {name: f"metrics.{name}=true" for name, on in switches.items() if on}
    return {name: f"metrics.trackers={list(config.trackers)!r}" for name in config.trackers} | wanted
