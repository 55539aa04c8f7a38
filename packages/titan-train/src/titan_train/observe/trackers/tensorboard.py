"""TensorBoard event files in the run's folder."""

from pathlib import Path

from titan_train.observe.records import StepRecord, ValidationRecord
from titan_train.observe.trackers.registry import check_tracker
from titan_train.observe.trackers.scalars import step_scalars, validation_scalars


class TensorBoardTracker:
    """Writes TensorBoard event files to ``run_dir/tensorboard``."""

    def __init__(self, run_dir: str | Path, *, resume_step: int = 0) -> None:
        """Open the writer; steps after ``resume_step`` of an earlier attempt are hidden.

        Raises:
            ValueError: If TensorBoard is not installed.
        """
        check_tracker("tensorboard", "TensorBoardTracker")
        from torch.utils.tensorboard import SummaryWriter

        purge = resume_step + 1 if resume_step else None
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge)

    def log_step(self, record: StepRecord) -> None:
        """Write the step's scalars."""
        for tag, value in step_scalars(record).items():
            self._writer.add_scalar(tag, value, record.step)

    def log_validation(self, record: ValidationRecord) -> None:
        """Write the validation's scalars."""
        for tag, value in validation_scalars(record).items():
            self._writer.add_scalar(tag, value, record.step)

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Write the event as text."""
        self._writer.add_text("events", " ".join([kind, *(f"{k}={v}" for k, v in fields.items())]), step)

    def close(self) -> None:
        """Flush and close. Safe to call twice."""
        self._writer.close()
