"""A text file in Prometheus's format, for the text-file collector of its node exporter: no port is opened."""

import importlib
from pathlib import Path
from typing import Any

from titan_train.observe.records import StepRecord, ValidationRecord
from titan_train.observe.trackers.registry import check_tracker
from titan_train.observe.trackers.scalars import step_scalars, validation_scalars


class PrometheusTracker:
    """Writes the newest values to ``run_dir/metrics.prom``, whole each time.

    Gauges are called ``titan_train_loss``, ``titan_speed_tokens_per_s`` and so on, with the label ``run``; events are
    the counter ``titan_events_total`` with the label ``kind``.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        """Make the registry; the file appears with the first step.

        Raises:
            ValueError: If prometheus_client is not installed.
        """
        check_tracker("prometheus", "PrometheusTracker")
        self._client: Any = importlib.import_module("prometheus_client")
        self._registry: Any = self._client.CollectorRegistry()
        self._events: Any = self._client.Counter(
            "titan_events", "Events of the run", ["run", "kind"], registry=self._registry
        )
        self._gauges: dict[str, Any] = {}
        self._run = run_dir.name
        self._file = run_dir / "metrics.prom"

    def log_step(self, record: StepRecord) -> None:
        """Write the step's scalars."""
        self._set(step_scalars(record) | {"train/step": float(record.step)})

    def log_validation(self, record: ValidationRecord) -> None:
        """Write the validation's scalars."""
        self._set(validation_scalars(record))

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Count the event."""
        self._events.labels(self._run, kind).inc()
        self._write()

    def close(self) -> None:
        """Nothing is buffered; the last values stay."""

    def _set(self, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                metric = "titan_" + "".join(c if c.isalnum() else "_" for c in name)
                gauge = self._client.Gauge(metric, name, ["run"], registry=self._registry)
                self._gauges[name] = gauge
            gauge.labels(self._run).set(value)
        self._write()

    def _write(self) -> None:
        self._client.write_to_textfile(str(self._file), self._registry)  # a temporary file, then a rename
