"""MLflow: one run of its experiment ``titan`` for each run folder."""

import importlib
import time
from pathlib import Path
from typing import Any

from titan_train.observe.records import StepRecord, ValidationRecord
from titan_train.observe.trackers.registry import check_tracker
from titan_train.observe.trackers.scalars import step_scalars, validation_scalars


class MlflowTracker:
    """Sends metrics to MLflow; a resumed run continues the same MLflow run.

    Where the server is, and which experiment to use, is MLflow's own business (``MLFLOW_TRACKING_URI``,
    ``MLFLOW_EXPERIMENT_NAME``; by default ``titan``). The MLflow run's id lives in ``run_dir/mlflow_run_id``.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        """Start or continue the MLflow run.

        Raises:
            ValueError: If MLflow is not installed.
        """
        check_tracker("mlflow", "MlflowTracker")
        tracking: Any = importlib.import_module("mlflow.tracking")
        environment: Any = importlib.import_module("mlflow.environment_variables")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = tracking.MlflowClient()
        id_file = run_dir / "mlflow_run_id"
        if resume_step and id_file.exists():
            self._run_id: str = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            name = environment.MLFLOW_EXPERIMENT_NAME.get() or "titan"
            known = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if known is None else known.experiment_id
            self._run_id = self._client.create_run(experiment, run_name=run_dir.name).info.run_id
            id_file.write_text(f"{self._run_id}\n", encoding="utf-8")

    def log_step(self, record: StepRecord) -> None:
        """Send the step's scalars in one request."""
        self._send(step_scalars(record), record.step)

    def log_validation(self, record: ValidationRecord) -> None:
        """Send the validation's scalars."""
        self._send(validation_scalars(record), record.step)

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Send the event as a count of one; MLflow has no events, so its fields stay in `metrics.jsonl`."""
        self._send({f"event/{kind}": 1.0}, step)

    def close(self) -> None:
        """Mark the MLflow run as finished. Safe to call twice."""
        self._client.set_terminated(self._run_id)

    def _send(self, scalars: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
