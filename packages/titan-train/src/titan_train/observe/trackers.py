"""Where metrics go besides `metrics.jsonl`: a table of trackers, each an adapter from named numbers to one client.

A tracker of your own is a class with the four methods of `titan_train.observe.Tracker`, made by
``Class(run_dir, resume_step=...)``. Your package names it as an entry point of the group ``titan_train.trackers``; then
``metrics.trackers = ["its-name"]`` opens it. Addresses and logins are the clients' own settings.

Opening a tracker, or one request of it, may take minutes when its server is down. So each runs on a thread of its own
(`TrackerBeside`): the training loop only leaves its records there. What fails is opened again later, after one warning;
the newest records wait for it. `metrics.jsonl` has no such grace: a disk that cannot take it cannot take a checkpoint either.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from titan_train.config.metrics import MetricsConfig
from titan_train.observe.log import FILE_NAME, JsonlTracker
from titan_train.observe.records import StepRecord, Tracker, ValidationRecord, step_scalars, validation_scalars
from titan_train.values import did_you_mean

log = logging.getLogger(__name__)

GROUP = "titan_train.trackers"
_MOST_RECORDS = 10_000  # about 10 MB
_RETRY_S = (30.0, 900.0)  # the first wait, which doubles, and the longest
_CLOSE_S = 30.0


def check_trackers(config: MetricsConfig) -> None:
    """Check that the wanted trackers exist, that their packages are installed, and that wandb finds a key, importing none.

    Only one rank opens trackers, but every rank can call this, so that all of them raise the same error.

    Raises:
        ValueError: A tracker that does not exist, or whose package or key is missing; the message says what to do.
    """
    for name, setting in _wanted(config).items():
        _check_tracker(name, setting)
        if name == "wandb":
            _check_login(setting)


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

    def opened(name: str, setting: str, step: int) -> Tracker:
        _check_tracker(name, setting)
        if name == "wandb":
            _check_login(setting)  # wandb would ask on the terminal
            return WandbTracker(run_dir, project=config.wandb_project, resume_step=step)
        known = _SHIPPED.get(name)
        return (_other_packages()[name].load() if known is None else known.make)(run_dir, resume_step=step)

    record = JsonlTracker(run_dir, resume_step=resume_step)
    return [
        record,
        *(TrackerBeside(named[0], partial(opened, *named), resume_step) for named in _wanted(config).items()),
    ]


def _wanted(config: MetricsConfig) -> dict[str, str]:
    """Each tracker once, and the setting that asks for it."""
    switches = {"tensorboard": config.tensorboard, "wandb": config.wandb}
    wanted = {name: f"metrics.{name}=true" for name, on in switches.items() if on}
    return {name: f"metrics.trackers={list(config.trackers)!r}" for name in config.trackers} | wanted


class TrackerBeside:
    """Hands every record on to a tracker, in order."""

    def __init__(
        self, name: str, open_: Callable[[int], Tracker], resume_step: int, *, retry_s: tuple[float, float] = _RETRY_S
    ) -> None:
        """Start the thread, which opens the tracker.

        Args:
            name: The tracker's, for messages.
            open_: Opens it for a run that continues from the given step.
            resume_step: The run's.
            retry_s: Seconds until the first new try, and the most between two.
        """
        self._name = name
        self._open = open_
        self._step = resume_step  # the last one that the tracker took
        self._retry_s, self._longest_s = retry_s
        self._calls: deque[tuple[int, Callable[[Tracker], None]]] = deque(maxlen=_MOST_RECORDS)
        self._changed = threading.Condition()
        self._closing = False
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log_step(self, record: StepRecord) -> None:
        """Leave a step."""
        self._leave(record.step, lambda tracker: tracker.log_step(record))

    def log_validation(self, record: ValidationRecord) -> None:
        """Leave a validation."""
        self._leave(record.step, lambda tracker: tracker.log_validation(record))

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Leave an event."""
        self._leave(step, lambda tracker: tracker.log_event(kind, step=step, **fields))

    def close(self) -> None:
        """Wait until the tracker has taken what was left and is closed, 30 s at most. Safe to call twice."""
        if self._closing:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(
                "slow", f"did not end within {_CLOSE_S:g} s; it may lack the last records, which {FILE_NAME} has"
            )

    def _leave(self, step: int, call: Callable[[Tracker], None]) -> None:
        with self._changed:
            if len(self._calls) == _MOST_RECORDS:
                self._warn(
                    "full", f"is {_MOST_RECORDS:,} records behind; it will lack the oldest, which {FILE_NAME} has"
                )
            self._calls.append((step, call))
            self._changed.notify()

    def _run(self) -> None:
        wait_s = self._retry_s
        while True:
            tracker: Tracker | None = None
            try:
                tracker = self._open(self._step)
                if "failed" in self._warned:
                    log.info("%s is back", self._name)
                self._hand_on(tracker)
                return
            except BaseException as err:  # a third party's client may raise anything; the run goes on
                reason = " ".join(str(err).split())[:300] or type(err).__name__
                self._warn("failed", f"failed and is opened again later; the run goes on without it: {reason}")
                if tracker is not None:
                    with contextlib.suppress(BaseException):
                        tracker.close()
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, wait_s):
                    return
            wait_s = min(2 * wait_s, self._longest_s)

    def _hand_on(self, tracker: Tracker) -> None:
        """Until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closing)
                if not self._calls:
                    break
                step, call = self._calls.popleft()
            call(tracker)
            self._step = max(self._step, step)
        tracker.close()

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s %s", self._name, what)


class _Adapter:
    """Sends named numbers with their step to one client."""

    def log_step(self, record: StepRecord) -> None:
        """Send the step's numbers."""
        self._send(step_scalars(record), record.step)

    def log_validation(self, record: ValidationRecord) -> None:
        """Send the validation's numbers."""
        self._send(validation_scalars(record), record.step)

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Send the event as a count of one, with its fields if the client takes them."""
        self._send({f"event/{kind}": 1, **{f"event/{kind}/{name}": value for name, value in fields.items()}}, step)

    def close(self) -> None:
        """Send what is buffered. Safe to call twice."""

    def _send(self, values: Mapping[str, Any], step: int) -> None:
        raise NotImplementedError


class TensorBoardTracker(_Adapter):
    """Writes TensorBoard event files to ``run_dir/tensorboard``; events are texts."""

    def __init__(self, run_dir: str | Path, *, resume_step: int = 0) -> None:
        """Open the writer; steps after ``resume_step`` of an earlier attempt are hidden.

        Raises:
            ValueError: If TensorBoard is not installed.
        """
        _check_tracker("tensorboard", "TensorBoardTracker")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=resume_step + 1)

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Write the event as text."""
        self._writer.add_text("events", " ".join([kind, *(f"{k}={v}" for k, v in fields.items())]), step)

    def close(self) -> None:
        """Flush and close. Safe to call twice."""
        self._writer.close()

    def _send(self, values: Mapping[str, Any], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)


class WandbTracker(_Adapter):
    """Sends metrics to Weights & Biases; a resumed run continues the same W&B run, whose id lives in ``wandb_run_id``."""

    def __init__(self, run_dir: str | Path, *, project: str, resume_step: int = 0) -> None:
        """Start or continue the W&B run.

        Raises:
            ValueError: If wandb is not installed.
        """
        _check_tracker("wandb", "WandbTracker")
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
        for prefix in ("train", "speed", "memory", "moe", "context", "time", "validation", "event"):
            self._run.define_metric(f"{prefix}/*", step_metric="step")

    def close(self) -> None:
        """Finish the W&B run. Safe to call twice."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _send(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log({**values, "step": step})


class _Trackio(_Adapter):
    """A local dashboard (``trackio show --project titan``); a resumed run continues its own, whose name lives in
    ``trackio_run_name``: trackio has runs by name, and folders elsewhere may have the same.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        trackio: Any = importlib.import_module("trackio")
        name_file = run_dir / "trackio_run_name"
        known = name_file.read_text(encoding="utf-8").strip() if resume_step and name_file.exists() else None
        name = known or f"{run_dir.name}-{uuid4().hex[:6]}"
        name_file.write_text(f"{name}\n", encoding="utf-8")
        self._run: Any = trackio.init(
            project="titan",
            name=name,
            resume="allow" if known else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _send(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(values), step=step)


class _Mlflow(_Adapter):
    """Sends metrics to MLflow; a resumed run continues the same MLflow run, whose id lives in ``mlflow_run_id``.

    The experiment is ``MLFLOW_EXPERIMENT_NAME``, by default ``titan``. MLflow has no events, so their fields stay in
    `metrics.jsonl`.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
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

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        self._send({f"event/{kind}": 1.0}, step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _send(self, values: Mapping[str, Any], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)


class _Gauges(_Adapter):
    """Keeps the newest value of each number."""

    def __init__(self) -> None:
        self._gauges: dict[str, Callable[[float], None]] = {}

    def log_step(self, record: StepRecord) -> None:
        self._send(step_scalars(record) | {"train/step": float(record.step)}, record.step)

    def _send(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name)
            self._gauges[name](value)

    def _gauge(self, name: str) -> Callable[[float], None]:
        """What sets the value of that name."""
        raise NotImplementedError


class _Prometheus(_Gauges):
    """Writes ``run_dir/metrics.prom``, whole each time, for the text-file collector of the node exporter: no port is opened.

    Gauges are called ``titan_train_loss``, ``titan_speed_tokens_per_s`` and so on, with the label ``run``; events are
    the counter ``titan_events_total`` with the label ``kind``.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        super().__init__()
        self._client: Any = importlib.import_module("prometheus_client")
        self._registry: Any = self._client.CollectorRegistry()
        labels = ["run", "kind"]
        self._events: Any = self._client.Counter("titan_events", "Events of the run", labels, registry=self._registry)
        self._run = run_dir.name
        self._file = run_dir / "metrics.prom"

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        self._events.labels(self._run, kind).inc()
        self._send({}, step)

    def _send(self, values: Mapping[str, Any], step: int) -> None:
        super()._send(values, step)
        self._client.write_to_textfile(str(self._file), self._registry)  # a temporary file, then a rename

    def _gauge(self, name: str) -> Callable[[float], None]:
        metric = "titan_" + "".join(c if c.isalnum() else "_" for c in name)
        return self._client.Gauge(metric, name, ["run"], registry=self._registry).labels(self._run).set


class _OpenTelemetry(_Gauges):
    """Records gauges ``titan.train.loss``, ``titan.speed.tokens_per_s`` and so on, with the attribute ``run``.

    The meter provider is the process's own if one is set. Otherwise one is made that sends over OTLP to
    ``OTEL_EXPORTER_OTLP_ENDPOINT``.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        super().__init__()
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
        self._run = run_dir.name

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        self._events.add(1, {"run": self._run, "kind": kind})

    def close(self) -> None:
        if self._own is not None:
            self._own.shutdown()
            self._own = None

    def _gauge(self, name: str) -> Callable[[float], None]:
        return partial(self._meter.create_gauge("titan." + name.replace("/", ".")).set, attributes={"run": self._run})


class _Shipped(NamedTuple):
    make: Callable[..., Tracker]
    package: str
    """What it imports; the extra of titan-train has the tracker's name."""


_SHIPPED: Mapping[str, _Shipped] = {
    "tensorboard": _Shipped(TensorBoardTracker, "tensorboard"),
    "wandb": _Shipped(WandbTracker, "wandb"),
    "mlflow": _Shipped(_Mlflow, "mlflow"),
    "trackio": _Shipped(_Trackio, "trackio"),
    "prometheus": _Shipped(_Prometheus, "prometheus_client"),
    "opentelemetry": _Shipped(_OpenTelemetry, "opentelemetry.sdk"),
}


def _check_tracker(name: str, setting: str) -> None:
    """Refuse a tracker that does not exist, or whose package is not installed, without importing it."""
    shipped = _SHIPPED.get(name)
    if shipped is not None:
        if not _is_installed(shipped.package):
            raise ValueError(
                f"{setting} needs the package {shipped.package}, which is not installed. Install titan-train[{name}] "
                f"(in a clone: uv sync --extra {name}), or leave the tracker out."
            )
        return
    others = _other_packages()
    if name not in others:
        known = [*_SHIPPED, *sorted(others)]
        raise ValueError(
            f"{setting}: no tracker is called {name!r}. {did_you_mean(name, known)}The trackers are {', '.join(known)}; a "
            f"package adds one by an entry point of the group {GROUP}."
        )


@cache
def _other_packages() -> dict[str, Any]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a dotted name whose first part is missing
        return False


def _check_login(setting: str) -> None:
    """Refuse an online run of wandb without a key where wandb looks for one: it would ask for it, or raise."""
    if os.environ.get("WANDB_MODE", "online") != "online" or os.environ.get("WANDB_DISABLED"):
        return
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    # a key that was logged in with, or settings that may hold one, a mode or another server
    places = [os.environ.get("NETRC") or "~/.netrc", "~/_netrc", folder / "settings", Path("wandb") / "settings"]
    if not any(_mentions_wandb(Path(place).expanduser()) for place in places):
        raise ValueError(
            f"{setting}: Weights & Biases finds no key. Run `wandb login`, or set WANDB_API_KEY; with WANDB_MODE=offline it "
            "needs none and `wandb sync` sends the run later."
        )


def _mentions_wandb(file: Path) -> bool:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    if file.name == "settings":
        return any(word in text for word in ("mode", "base_url", "api_key"))
    server = (
        os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0].partition(":")[0]
    )
    return any(word.partition(":")[0] in (server, "default") for word in text.split())
