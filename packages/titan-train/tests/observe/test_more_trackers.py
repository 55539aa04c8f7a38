"""Every tracker against its real client, offline; and trackers of other packages."""

import http.server
import importlib.metadata
import os
import sqlite3
import subprocess
import sys
import threading

import pytest
from titan_train.config.metrics import MetricsConfig
from titan_train.observe import ValidationRecord, build_trackers, check_trackers
from titan_train.observe import trackers as module

VALIDATION = ValidationRecord(step=2, loss=3.0, bits_per_byte=1.5, tokens=10)


def record(name, run_dir, step_record, steps, resume_step=0):
    """A run's steps, one validation and one event through `build_trackers`, as the trainer does it."""
    trackers = build_trackers(MetricsConfig(trackers=(name,)), run_dir, resume_step=resume_step)
    for tracker in trackers:
        for step in steps:
            tracker.log_step(step_record(step, loss=10.0 * step))
        tracker.log_validation(VALIDATION)
        tracker.log_event("checkpoint_saved", step=2, seconds=1)
        tracker.close()
        tracker.close()


def test_mlflow_continues_its_run(tmp_path, monkeypatch, step_record):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    record("mlflow", run_dir, step_record, [1, 2])
    record("mlflow", run_dir, step_record, [3], resume_step=2)
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("titan").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in losses] == [(1, 10.0), (2, 20.0), (3, 30.0)]
    assert client.get_metric_history(run.info.run_id, "validation/bits_per_byte")[0].value == 1.5


def test_trackio_keeps_each_run_s_steps_in_its_database_by_a_name_of_its_own(tmp_path):
    pytest.importorskip("trackio")
    program = """
import sys
from pathlib import Path
from titan_train.observe import ValidationRecord
from titan_train.observe.trackers import _Trackio

for folder, resume_step, step in ("a", 0, 1), ("b", 0, 1), ("a", 1, 2):
    tracker = _Trackio(Path(sys.argv[1]) / folder / "run", resume_step=resume_step)
    tracker.log_validation(ValidationRecord(step=step, loss=3.0 * step, bits_per_byte=1.5, tokens=10))
    tracker.log_event("checkpoint_saved", step=step, seconds=1)
    tracker.close()
    tracker.close()
"""
    for folder in ("a", "b"):
        (tmp_path / folder / "run").mkdir(parents=True)
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, env=environment, timeout=120)
    with sqlite3.connect(next((tmp_path / "trackio").glob("titan*.db"))) as database:
        rows = database.execute("SELECT run_name, step, CAST(metrics AS TEXT) FROM metrics ORDER BY step").fetchall()
    own, other = ((tmp_path / folder / "run" / "trackio_run_name").read_text().strip() for folder in ("a", "b"))
    assert own.startswith("run-")
    losses = [(name, step) for name, step, metrics in rows if "validation/loss" in metrics]
    assert sorted(losses) == sorted([(own, 1), (own, 2), (other, 1)])


def test_prometheus_reads_the_file(tmp_path, step_record):
    parser = pytest.importorskip("prometheus_client.parser")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    record("prometheus", run_dir, step_record, [1, 2])
    families = parser.text_string_to_metric_families((run_dir / "metrics.prom").read_text())
    found = {(sample.name, sample.labels.get("kind")): sample for family in families for sample in family.samples}
    assert found["titan_train_loss", None].value == 20.0
    assert found["titan_train_loss", None].labels == {"run": "run"}
    assert found["titan_events_total", "checkpoint_saved"].value == 1


def test_opentelemetry_is_sent_to_the_endpoint_of_the_environment(tmp_path, monkeypatch, step_record):
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    bodies = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        record("opentelemetry", run_dir, step_record, [1, 2])
        server.shutdown()
    gauges = {}
    for body in bodies:
        for resource in service.ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                points = metric.gauge.data_points or metric.sum.data_points
                gauges[metric.name] = [point.as_double or point.as_int for point in points]
    assert gauges["titan.train.loss"] == [20.0]
    assert gauges["titan.validation.bits_per_byte"] == [1.5]
    assert gauges["titan.events"] == [1]


class OwnTracker:
    """What another package would bring."""

    calls = []  # noqa: RUF012

    def __init__(self, run_dir, *, resume_step=0):
        self.calls.append(resume_step)

    def log_step(self, record):
        self.calls.append(record.step)

    def log_validation(self, record): ...

    def log_event(self, kind, *, step, **fields): ...

    def close(self): ...


def test_another_package_adds_a_tracker_by_entry_point(tmp_path, monkeypatch, step_record):
    entry = importlib.metadata.EntryPoint("own", "ignored", module.GROUP)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: OwnTracker)
    monkeypatch.setattr(module, "_other_packages", lambda: {"own": entry})
    record("own", tmp_path, step_record, [4], resume_step=3)
    assert OwnTracker.calls == [3, 4]


def test_a_tracker_that_does_not_exist_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"no tracker is called 'mlflw'. Did you mean 'mlflow'"):
        check_trackers(MetricsConfig(trackers=("mlflw",)))


@pytest.mark.parametrize("name", ["mlflow", "trackio", "prometheus", "opentelemetry"])
def test_a_missing_package_is_refused_with_the_extra_that_brings_it(monkeypatch, name):
    monkeypatch.setattr(module, "_is_installed", lambda package: False)
    with pytest.raises(ValueError, match=rf"metrics.trackers=\['{name}'\] .* titan-train\[{name}\]"):
        check_trackers(MetricsConfig(trackers=(name,)))
