"""Trackers beside `metrics.jsonl`, and the choice of them from the configuration.

TensorBoard and W&B are extras. A run must not die because a dashboard's server does: a tracker that fails while the
run is going is dropped with one warning. `metrics.jsonl` has no such grace: a disk that cannot take it cannot take a
checkpoint either.
"""

import importlib.util
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_train.config.metrics import MetricsConfig
from titan_train.observe.jsonl import JsonlTracker
from titan_train.observe.records import StepRecord, Tracker, ValidationRecord

log = logging.getLogger(__name__)

_STEP_SCALARS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/lr": "lr",
    "train/samples": "samples_consumed",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/tokens_per_s_per_rank": "tokens_per_s_per_rank",
    "speed/tflops_per_gpu": "tflops_per_gpu",
    "speed/mfu": "mfu",
    "speed/step_time_s": "step_time_s",
    "speed/data_wait_s": "data_wait_s",
    "memory/peak_mem_gib": "peak_mem_gib",
}
_VALIDATION_SCALARS = {"validation/loss": "loss", "validation/bits_per_byte": "bits_per_byte"}
_EXTRAS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}  # switch in the configuration -> package; extras share the name


def check_trackers(config: MetricsConfig) -> None:
    """Check that the packages of the wanted trackers are installed, without importing them.

    Only one rank opens trackers, but every rank can call this, so that all of them refuse alike.

    Raises:
        ValueError: A tracker is switched on whose package is missing; the message names the extra to install.
    """
    for switch, package in _EXTRAS.items():
        if getattr(config, switch) and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"metrics.{switch}=true needs the package {package}, which is not installed. Install "
                f"titan-train[{switch}] (in a clone: uv sync --extra {switch}), or set metrics.{switch}=false."
            )


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
    trackers: list[Tracker] = [JsonlTracker(run_dir, resume_step=resume_step)]
    if config.tensorboard:
        trackers.append(_UntilItFails(TensorBoardTracker(run_dir, resume_step=resume_step)))
    if config.wandb:
        trackers.append(_UntilItFails(WandbTracker(run_dir, project=config.wandb_project, resume_step=resume_step)))
    return trackers


class TensorBoardTracker:
    """Writes TensorBoard event files to ``run_dir/tensorboard``."""

    def __init__(self, run_dir: str | Path, *, resume_step: int = 0) -> None:
        """Open the writer; steps after ``resume_step`` of an earlier attempt are hidden.

        Raises:
            ValueError: If TensorBoard is not installed.
        """
        check_trackers(MetricsConfig(tensorboard=True))
        from torch.utils.tensorboard import SummaryWriter

        purge = resume_step + 1 if resume_step else None
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge)

    def log_step(self, record: StepRecord) -> None:
        """Write the step's scalars."""
        for tag, value in _step_scalars(record).items():
            self._writer.add_scalar(tag, value, record.step)

    def log_validation(self, record: ValidationRecord) -> None:
        """Write the validation's scalars."""
        for tag, value in _scalars(record, _VALIDATION_SCALARS).items():
            self._writer.add_scalar(tag, value, record.step)

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Write the event as text."""
        self._writer.add_text("events", " ".join([kind, *(f"{k}={v}" for k, v in fields.items())]), step)

    def close(self) -> None:
        """Flush and close. Safe to call twice."""
        self._writer.close()


class WandbTracker:
    """Sends metrics to Weights & Biases; a resumed run continues the same W&B run.

    The W&B run's id lives in ``run_dir/wandb_run_id``. How to log in, or to stay offline, is wandb's own business
    (``wandb login``, ``WANDB_MODE``).
    """

    def __init__(self, run_dir: str | Path, *, project: str, resume_step: int = 0) -> None:
        """Start or continue the W&B run.

        Raises:
            ValueError: If wandb is not installed.
        """
        check_trackers(MetricsConfig(wandb=True))
        wandb: Any = importlib.import_module("wandb")
        run_dir = Path(run_dir)
        id_file = run_dir / "wandb_run_id"
        known = id_file.read_text(encoding="utf-8").strip() if resume_step and id_file.exists() else None
        self._run: Any = wandb.init(
            project=project, name=run_dir.name, dir=str(run_dir), id=known, resume="allow" if known else None
        )
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        # W&B's own step counter cannot go back, but a resumed run can: plot against ours.
        self._run.define_metric("step")
        for prefix in ("train/*", "speed/*", "memory/*", "moe/*", "validation/*"):
            self._run.define_metric(prefix, step_metric="step")

    def log_step(self, record: StepRecord) -> None:
        """Send the step's scalars."""
        self._run.log({**_step_scalars(record), "step": record.step})

    def log_validation(self, record: ValidationRecord) -> None:
        """Send the validation's scalars."""
        self._run.log({**_scalars(record, _VALIDATION_SCALARS), "step": record.step})

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Send the event as a count, with its fields."""
        self._run.log({f"event/{kind}": 1, "step": step, **{f"event/{kind}/{k}": v for k, v in fields.items()}})

    def close(self) -> None:
        """Finish the W&B run. Safe to call twice."""
        if self._run is not None:
            self._run.finish()
            self._run = None


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


def _step_scalars(record: StepRecord) -> dict[str, float]:
    routing = {f"moe/{name}": value for name, value in record.routing.items() if math.isfinite(value)}
    return _scalars(record, _STEP_SCALARS) | routing


def _scalars(record: StepRecord | ValidationRecord, tags: dict[str, str]) -> dict[str, float]:
    """Tags to the record's values; what is unknown or not finite is left out."""
    values = {tag: getattr(record, name) for tag, name in tags.items()}
    return {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}
