import importlib.metadata
import importlib.util
import logging
import math
import sys
import threading
import time
import types

import pytest
from titan_train.config import parse_config
from titan_train.config.metrics import MetricsConfig
from titan_train.launch.validate import check_start
from titan_train.observe import (
    JsonlTracker,
    StepRecord,
    TensorBoardTracker,
    ValidationRecord,
    WandbTracker,
    build_trackers,
    check_trackers,
    read_metrics,
)
from titan_train.observe import trackers as module
from titan_train.observe.trackers import TrackerBeside

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


def test_only_a_new_run_is_refused_for_its_trackers(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else find_spec(name))
    settings = {"run": {"dir": str(tmp_path)}, "metrics": {"trackers": ["mlflow"]}, "launch": {"device": "cpu"}}
    config = parse_config(settings)
    with pytest.raises(ValueError, match=r"titan-train\[mlflow\]"):
        check_start(config, 1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").touch()
    check_start(config, 1)


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
        self.metrics: list[str] = []
        self.finished = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append(name)

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
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
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


class Dashboard:
    """A tracker of another package, whose server can be down."""

    def __init__(self) -> None:
        self.down: Exception | None = None
        self.hangs = threading.Event()
        self.hangs.set()
        self.opened: list[int] = []
        self.taken: list[int] = []

    def __call__(self, run_dir: object, *, resume_step: int) -> "Dashboard":
        self.opened.append(resume_step)
        self._answer()
        return self

    def _answer(self) -> None:
        self.hangs.wait(60)
        if self.down is not None:
            raise self.down

    def log_step(self, record: StepRecord) -> None:
        self._answer()
        self.taken.append(record.step)

    def close(self) -> None: ...


@pytest.fixture
def dashboard(monkeypatch):
    made = Dashboard()
    entry = importlib.metadata.EntryPoint("mine", "ignored", module.GROUP)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: made)
    monkeypatch.setattr(module, "_other_packages", lambda: {"mine": entry})
    monkeypatch.setattr(TrackerBeside.__init__, "__kwdefaults__", {"retry_s": (0.01, 0.02)})
    return made


def wait_for(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_dashboard_that_is_down_at_a_restart_does_not_end_the_run_and_gets_its_records_later(
    tmp_path, dashboard, step_record, caplog
):
    dashboard.down = ConnectionError("no route\nto host")
    with caplog.at_level(logging.WARNING):
        jsonl, mine = build_trackers(MetricsConfig(trackers=("mine",)), tmp_path, resume_step=3)
        for step in (4, 5):
            jsonl.log_step(step_record(step))
            mine.log_step(step_record(step))
        wait_for(lambda: len(dashboard.opened) > 2)  # again and again
        dashboard.down = None
        wait_for(lambda: dashboard.taken == [4, 5])
        mine.close()
    jsonl.close()
    assert [record.message for record in caplog.records] == [
        "mine failed and is opened again later; the run goes on without it: no route to host"
    ]
    assert set(dashboard.opened) == {3}
    assert len(read_metrics(tmp_path).steps) == 2


def test_a_dashboard_that_fails_on_the_way_is_opened_again_after_one_warning(tmp_path, dashboard, step_record, caplog):
    _, mine = build_trackers(MetricsConfig(trackers=("mine",)), tmp_path)
    mine.log_step(step_record(1))
    wait_for(lambda: dashboard.taken == [1])
    dashboard.down = ConnectionError()
    with caplog.at_level(logging.WARNING):
        mine.log_step(step_record(2))  # is lost
        wait_for(lambda: len(dashboard.opened) > 3)
        dashboard.down = None
        mine.log_step(step_record(3))
        wait_for(lambda: dashboard.taken == [1, 3])
        mine.close()
        mine.close()
    assert dashboard.opened[:2] == [0, 1]
    assert len(caplog.records) == 1
    assert "ConnectionError" in caplog.records[0].message


def test_training_waits_for_no_dashboard(tmp_path, dashboard, step_record, monkeypatch, caplog):
    monkeypatch.setattr("titan_train.observe.trackers._CLOSE_S", 0.1)
    dashboard.hangs.clear()
    started = time.monotonic()
    _, mine = build_trackers(MetricsConfig(trackers=("mine",)), tmp_path, resume_step=3)
    for step in range(4, 10_010):
        mine.log_step(step_record(step))
    mine.close()
    assert time.monotonic() - started < 30  # a server that is down takes minutes
    dashboard.hangs.set()
    assert [record.message for record in caplog.records] == [
        "mine is 10,000 records behind; it will lack the oldest, which metrics.jsonl has",
        "mine did not end within 0.1 s; it may lack the last records, which metrics.jsonl has",
    ]
    wait_for(lambda: len(dashboard.taken) == 10_000)


def test_wandb_without_a_key_is_refused_before_it_could_ask(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_DISABLED",
        "NETRC",
        "WANDB_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    config = MetricsConfig(trackers=("wandb",))
    for call in (lambda: check_trackers(config), lambda: build_trackers(config, tmp_path)):
        with pytest.raises(ValueError, match=r"finds no key. Run `wandb login`, or set WANDB_API_KEY"):
            call()
    (tmp_path / ".netrc").write_text("machine example.org login user password x\n")
    with pytest.raises(ValueError, match="no key"):
        check_trackers(config)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    check_trackers(config)
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(config)


def test_metrics_jsonl_itself_may_fail_loudly(tmp_path, step_record):
    (tracker,) = build_trackers(MetricsConfig(), tmp_path)
    assert isinstance(tracker, JsonlTracker)
    tracker.close()


@pytest.mark.parametrize("wrong", [{"log_every": 0}, {"progress": "fancy"}, {"wandb": True, "wandb_project": ""}])
def test_metrics_config_rejects_and_names_the_key(wrong):
    with pytest.raises(ValueError, match=r"metrics\.(log_every=0|progress='fancy'|wandb_project is empty)"):
        MetricsConfig(**wrong)


def test_wandb_plots_every_number_over_the_step(tmp_path, wandb_runs, step_record):
    WandbTracker(tmp_path, project="p").close()
    record = step_record(
        1, split={"tp exposed": 0.1}, memory={"active_gib": 1.0}, context={"split": 1.0}, routing={"load_max": 1.0}
    )
    logged = module.step_scalars(record) | module.validation_scalars(VALIDATION) | {"event/stopped": 1}
    assert {f"{name.partition('/')[0]}/*" for name in logged} <= set(wandb_runs[0].metrics)


def test_tensorboard_hides_an_attempt_that_was_lost_before_its_first_checkpoint(tmp_path, step_record):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last, loss in ((3, 1.0), (2, 7.0)):
        tracker = TensorBoardTracker(tmp_path)
        for step in range(1, last + 1):
            tracker.log_step(step_record(step, loss=loss))
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 7.0), (2, 7.0)]
