"""OpenTelemetry gauges, sent by the exporter that its environment variables name."""

import importlib
from pathlib import Path
from typing import Any

from titan_train.observe.records import StepRecord, ValidationRecord
from titan_train.observe.trackers.registry import check_tracker
from titan_train.observe.trackers.scalars import step_scalars, validation_scalars


class OpenTelemetryTracker:
    """Records gauges ``titan.train.loss``, ``titan.speed.tokens_per_s`` and so on, with the attribute ``run``.

    The meter provider is the process's own if one is set. Otherwise one is made that sends over OTLP, whose endpoint is
    OpenTelemetry's own business (``OTEL_EXPORTER_OTLP_ENDPOINT``).
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        """Make the meter.

        Raises:
            ValueError: If opentelemetry-sdk is not installed.
        """
        check_tracker("opentelemetry", "OpenTelemetryTracker")
        metrics: Any = importlib.import_module("opentelemetry.metrics")
        sdk: Any = importlib.import_module("opentelemetry.sdk.metrics")
        provider = metrics.get_meter_provider()
        self._own: Any = None
        if not isinstance(provider, sdk.MeterProvider):
            export: Any = importlib.import_module("opentelemetry.sdk.metrics.export")
            otlp: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
            provider = self._own = sdk.MeterProvider([export.PeriodicExportingMetricReader(otlp.OTLPMetricExporter())])
        self._meter: Any = provider.get_meter("titan_train")
        self._events: Any = self._meter.create_counter("titan.events")
        self._gauges: dict[str, Any] = {}
        self._run = run_dir.name

    def log_step(self, record: StepRecord) -> None:
        """Record the step's scalars."""
        self._set(step_scalars(record) | {"train/step": float(record.step)})

    def log_validation(self, record: ValidationRecord) -> None:
        """Record the validation's scalars."""
        self._set(validation_scalars(record))

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Count the event."""
        self._events.add(1, {"run": self._run, "kind": kind})

    def close(self) -> None:
        """Send what is buffered. Safe to call twice."""
        if self._own is not None:
            self._own.shutdown()
            self._own = None

    def _set(self, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = self._meter.create_gauge("titan." + name.replace("/", "."))
            gauge.set(value, {"run": self._run})
