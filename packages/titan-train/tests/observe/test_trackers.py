import importlib.util
import logging
import math
import sys
import types

import pytest
from titan_train.config.metrics import MetricsConfig
from titan_train.observe import (
    JsonlTracker,
    TensorBoardTracker,
    ValidationRecord,
    WandbTracker,
    build_trackers,
    check_trackers,
    read_metrics,
)
from titan_train.observe.trackers.build import _UntilItFails

VALIDATION = ValidationRecord(step=2, loss=3.0, bits_per_byte=1.5, tokens=10)


def test_metrics_jsonl_is_written_whatever_the_configuration(tmp_path, step_record):
    (tracker,) = build_trackers(MetricsConfig(), tmp_path)
    tracker.log_step(step_record(1))
    tracker.close()
    assert len(read_metrics(tmp_path).steps) == 1


@pytest.mark.parametrize("switch", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_with_the_extra_that_brings_it(tmp_path, monkeypatch, switch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == switch else find_spec(name))
    config = MetricsConfig(**{switch: True})
    with pytest.raises(ValueError, match=rf"metrics.{switch}=true .* titan-train\[{switch}\]"):
        check_trackers(config)
    with pytest.raises(ValueError, match=rf"titan-train\[{switch}\]"):
        build_trackers(config, tmp_path)
    check_trackers(MetricsConfig())


def test_tensorboard_holds_every_finite_scalar_and_hides_steps_that_are_made_again(tmp_path, step_record):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log_step(step_record(step, loss=math.nan if step == 2 else 1.0 * step))
    tracker.log_validation(VALIDATION)
    tracker.log_event("checkpoint_saved", step=2, seconds=1)
    tracker.close()
    tracker.close()
    resumed = TensorBoardTracker(tmp_path, resume_step=1)
    resumed.log_step(step_record(2, loss=7.0, routing={"load_max": 1.5}))
    resumed.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 7.0)]
    assert [(event.step, event.value) for event in events.Scalars("moe/load_max")] == [(2, 1.5)]
    assert "speed/mfu" not in events.Tags()["scalars"]


class FakeRun:
    def __init__(self, **options: object) -> None:
        self.options = options
        self.id = options["id"] or "abc123"
        self.logged: list[dict[str, object]] = []
        self.finished = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, values: dict[str, object]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb_runs(monkeypatch):
    """A stand-in for the wandb package (it cannot run without an account); gives the runs it started."""
    runs: list[FakeRun] = []

    def init(**options: object) -> FakeRun:
        runs.append(FakeRun(**options))
        return runs[-1]

    module = types.ModuleType("wandb")
    module.__spec__ = importlib.util.spec_from_loader("wandb", loader=None)
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_wandb_continues_the_same_run_after_a_resume(tmp_path, wandb_runs, step_record):
    first = WandbTracker(tmp_path, project="p")
    first.log_step(step_record(1, mfu=None))
    first.log_validation(VALIDATION)
    first.log_event("stopped", step=2, reason="SIGTERM")
    first.close()
    first.close()
    WandbTracker(tmp_path, project="p", resume_step=2).close()

    assert wandb_runs[0].options["id"] is None
    assert wandb_runs[1].options == {
        "project": "p",
        "name": tmp_path.name,
        "dir": str(tmp_path),
        "id": "abc123",
        "resume": "allow",
    }
    step, validation, event = wandb_runs[0].logged
    assert step["step"] == 1
    assert step["train/loss"] == 10.0
    assert "speed/mfu" not in step
    assert validation == {"validation/loss": 3.0, "validation/bits_per_byte": 1.5, "step": 2}
    assert event == {"event/stopped": 1, "event/stopped/reason": "SIGTERM", "step": 2}
    assert wandb_runs[0].finished == 1


def test_a_dashboard_that_fails_is_dropped_with_one_warning(tmp_path, wandb_runs, step_record, caplog):
    jsonl, wandb = build_trackers(MetricsConfig(wandb=True), tmp_path)

    def fail(values: object) -> None:
        raise ConnectionError("no route to host")

    wandb_runs[0].log = fail
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            for tracker in (jsonl, wandb):
                tracker.log_step(step_record(step))
        wandb.close()
    jsonl.close()
    assert [record.message for record in caplog.records] == [
        "WandbTracker failed and is off from here on: no route to host"
    ]
    assert len(read_metrics(tmp_path).steps) == 3


def test_metrics_jsonl_itself_may_fail_loudly(tmp_path, step_record):
    (tracker,) = build_trackers(MetricsConfig(), tmp_path)
    assert isinstance(tracker, JsonlTracker)
    assert not isinstance(tracker, _UntilItFails)
    tracker.close()


@pytest.mark.parametrize("wrong", [{"log_every": 0}, {"progress": "fancy"}, {"wandb": True, "wandb_project": ""}])
def test_metrics_config_rejects_and_names_the_key(wrong):
    with pytest.raises(ValueError, match=r"metrics\.(log_every=0|progress='fancy'|wandb_project is empty)"):
        MetricsConfig(**wrong)
