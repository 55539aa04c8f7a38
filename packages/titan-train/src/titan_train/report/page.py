"""The HTML report: what is on the page. How it looks is in `page/`: a template, a style sheet and a small script.

The file asks nothing of the network, and its content security policy forbids that it could, and that any script but its own
runs; a live page may ask its own server. Every text goes through the template's escaping; drawings are numbers made here.
"""

import bisect
import functools
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import jinja2

from titan_train.files import write_atomic
from titan_train.models.registry import families
from titan_train.observe import EventRecord, History
from titan_train.observe.log import PERIODIC_EVENTS
from titan_train.report.changes import CHANGED, changed_settings, parent_folder, value_text, values_over_run
from titan_train.report.chart import Chart, Scale, Series, build_chart, step_scale
from titan_train.report.drawings import draw_layout, draw_pipeline
from titan_train.report.faults import faults
from titan_train.report.folder import RunFolder, read_folder
from titan_train.report.foresight import predicted_beside_measured
from titan_train.report.samples import newest_samples, sampled_texts
from titan_train.report.summary import headlines, setting, when
from titan_train.report.timeline import memory_timeline, rank_tables, time_split
from titan_train.trust.published import content_policy

REPORT_NAME = "report.html"
_MOST_EVENTS = 200
_EVENT_ROLES = {
    "checkpoint_saved": "saved",
    "checkpoint_restored": "restored",
    "checkpoint_passed_over": "bad",
    "nonfinite": "bad",
    "failed": "bad",
    CHANGED: "adjusted",
    "stopped": "stopped",
    "preempted": "stopped",
}


CURVES: tuple[tuple[str, str, tuple[str, bool, float]], ...] = (
    ("Throughput", "tokens per second", ("tokens_per_s", True, 1.0)),
    ("MFU", "of the device's dense peak, %", ("mfu", True, 100.0)),
    ("Gradient norm", "before clipping", ("grad_norm", True, 1.0)),
    ("Learning rate", "", ("lr", False, 1.0)),
)
"""Charts of one quantity: title, unit, and the quantity, whether it is smoothed, and its factor."""


@dataclass(frozen=True, slots=True)
class EventMarks:
    """All events of one kind, as marks under a chart."""

    role: str
    label: str
    count: int
    d: str


@dataclass(frozen=True, slots=True)
class LossView:
    """The loss over one kind of step axis, with the events below it."""

    key: str
    label: str
    chart: Chart
    marks: list[EventMarks]


def build_report(run: str | Path | RunFolder, out: str | Path | None = None) -> Path:
    """Write the report of a run.

    Args:
        run: Its folder, or what was read of it. The run is finished, going on, or left by a crash.
        out: The file to write; ``report.html`` in the folder by default.

    Returns:
        The file.

    Raises:
        ValueError: If ``run`` is not the folder of a run.
    """
    folder = run if isinstance(run, RunFolder) else read_folder(run)
    target = Path(out) if out is not None else folder.path / REPORT_NAME
    write_atomic(target, report_page(folder))
    return target


def report_page(folder: RunFolder, *, state: str = "") -> str:
    """The report of a run; ``state`` as in `render`."""
    events = _notable(folder.history.events)
    return render(
        "template.html",
        state=state,
        folder=folder,
        status=folder.status,
        setting=setting(folder),
        error=folder.attempts[-1].get("error") if folder.attempts else None,
        headlines=headlines(folder),
        losses=_loss_views(folder),
        charts=_charts(folder),
        split=time_split(folder.path),
        layout=draw_layout(folder),
        pipeline=draw_pipeline(folder),
        faults=faults(folder),
        prediction=predicted_beside_measured(folder),
        samples=newest_samples(folder.path, last_step(folder.history)),
        texts=sampled_texts(folder.path, last_step(folder.history)),
        ranks=rank_tables(folder.history.events),
        events=events[-_MOST_EVENTS:],
        hidden_events=max(0, len(events) - _MOST_EVENTS),
        attempts=folder.attempts,
        changes=changed_settings(folder),
        change_marks=_change_marks(folder),
        changed=_changed(folder),
        config=flat_config(folder.config),
        environment=_environment(folder),
        command=_command(folder.info),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        when=when,
        clock=_clock,
        event_label=event_label,
        event_role=lambda kind: _EVENT_ROLES.get(kind, "other"),
        value_text=value_text,
    )


def render(template: str, *, state: str = "", **values: object) -> str:
    """A page of `template/` with these values, with the style sheet and the script inside it.

    Args:
        template: Its name.
        state: Of a live page, which loads itself again when its server's ``/events`` names another state. Empty: the page asks
            for nothing.
        values: What the template shows.
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    own = {"script": _resource("chart.js"), "live": _resource("live.js") if state else ""}
    policy = content_policy(*filter(None, own.values()), connect=bool(state))
    return environment.get_template(template).render(
        values | own | {"state": state, "style": _resource("style.css"), "policy": policy}
    )


def event_label(kind: str) -> str:
    """``checkpoint_saved`` as ``checkpoint saved``."""
    return kind.replace("_", " ")


def _notable(events: Sequence[EventRecord]) -> list[EventRecord]:
    """The events in which something happened, without the periodic measurements."""
    return [event for event in events if event.kind not in PERIODIC_EVENTS]


def last_step(history: History) -> int:
    """The newest logged step; 0 if nothing was logged."""
    return max([*history.steps[-1:], *(record.step for record in history.validations[-1:])], default=0)


def loss_unit(config: dict[str, Any]) -> str:
    """The unit of the loss: nats for text; for other tasks only that it is a mean."""
    model: dict[str, Any] = config.get("model", {})
    known = next((family for family in families().values() if model.get("name") in family.configs), None)
    task = model.get("task") or ("text" if known is None else known.task)
    return "nats per token" if task == "text" else "mean per element"


def _loss_views(folder: RunFolder) -> list[LossView]:
    """The loss over steps, and over their logarithm where that shows more."""
    validations = folder.history.validations
    series = [
        *_loss_of_parent(folder),
        line_of(folder.history, "training", "loss"),
        Series("validation", [r.step for r in validations], [r.loss for r in validations], "validation", dots=True),
    ]
    series = [s for s in series if len(s.x)]
    every_step = [step for s in series for step in s.x]
    views: list[LossView] = []
    for key, label in (("linear", "steps"), ("log", "log steps")):
        chart = build_chart("Loss", loss_unit(folder.config), series, log_x=key == "log")
        if chart is not None and (key == "linear" or max(every_step) >= 20):
            marks = _marks(_notable(folder.history.events), step_scale(every_step, key == "log"))
            views.append(LossView(key, label, chart, marks))
    return views


def _loss_of_parent(folder: RunFolder) -> list[Series]:
    """What a branch began with, from its first step, and what the parent made of the steps that the branch made."""
    parent = parent_folder(folder) if folder.history.steps else None
    if parent is None:
        return []
    line = line_of(parent.history, f"parent, {parent.name}", "loss", "parent")
    until = bisect.bisect_right(line.x, folder.history.steps[-1])
    cut = {name: list(getattr(line, name))[:until] for name in ("x", "y", "low", "high")}
    return [replace(line, **cut)] if until else []


def _charts(folder: RunFolder) -> list[Chart]:
    if not folder.history.steps:
        return []
    line = functools.partial(line_of, folder.history)
    wanted = (
        *(
            build_chart(title, unit, [line(title, quantity, "train", smoothed, scale)], zero=True)
            for title, unit, (quantity, smoothed, scale) in CURVES
        ),
        build_chart(
            "Step time",
            "seconds",
            [line("step", "step_time_s"), line("waiting for data", "data_wait_s", "validation")],
            zero=True,
        ),
        memory_timeline(folder.path)
        or build_chart("Peak memory", "GiB of rank 0", [line("peak", "peak_mem_gib", "train", False)], zero=True),
        build_chart(
            "Expert load",
            "relative to the layer mean",
            [line("most loaded", "load_max"), line("least loaded", "load_min", "validation")],
            zero=True,
        ),
    )
    return [chart for chart in wanted if chart is not None]


def line_of(
    history: History, name: str, quantity: str, role: str = "train", smoothed: bool = True, scale: float = 1.0
) -> Series:
    """A quantity over the run, to draw."""
    curve = history.curves[quantity]
    mean, low, high = ([scale * value for value in values] for values in (curve.mean, curve.low, curve.high))
    return Series(name, history.steps, mean, role, smoothed=smoothed, low=low, high=high)


def _clock(stamp: object) -> str:
    if not isinstance(stamp, int | float):
        return when(stamp)
    try:
        return datetime.fromtimestamp(stamp, UTC).strftime("%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # no time of a clock
        return "–"


def _marks(events: Sequence[EventRecord], scale: Scale) -> list[EventMarks]:
    found: list[EventMarks] = []
    for kind, count in Counter(event.kind for event in events).items():
        steps = sorted({event.step for event in events if event.kind == kind and scale.low <= event.step <= scale.high})
        d = "".join(f"M{1000 * scale(step):.1f} 0v100" for step in steps)
        found.append(EventMarks(_EVENT_ROLES.get(kind, "other"), event_label(kind), count, d))
    return found


def flat_config(config: dict[str, Any]) -> list[tuple[str, list[tuple[str, object]]]]:
    """Sections of the configuration with their keys; deeper tables get dotted keys, each of a list its own section."""
    sections: list[tuple[str, list[tuple[str, object]]]] = []

    def walk(section: str, prefix: str, table: dict[str, Any], rows: list[tuple[str, object]]) -> None:
        for key, value in table.items():
            if isinstance(value, dict) and not section:
                inner: list[tuple[str, object]] = []
                sections.append((key, inner))
                walk(key, "", cast("dict[str, Any]", value), inner)
            elif isinstance(value, dict):
                walk(section, f"{prefix}{key}.", cast("dict[str, Any]", value), rows)
            elif isinstance(value, list) and value and all(isinstance(item, dict) for item in cast("list[Any]", value)):
                for i, item in enumerate(cast("list[dict[str, Any]]", value)):
                    inner = []
                    sections.append((f"{section}{'.' if section else ''}{prefix}{key}[{i}]", inner))
                    walk(key, "", item, inner)
            else:
                rows.append((prefix + key, cast("object", value)))

    top: list[tuple[str, object]] = []
    walk("", "", config, top)
    return [("", top), *sections] if top else sections


def settings_text(config: dict[str, Any]) -> dict[str, str]:
    """Every setting by its dotted name, as text."""
    return {
        f"{section}.{key}" if section else key: value_text(value)
        for section, rows in flat_config(config)
        for key, value in rows
    }


def _change_marks(folder: RunFolder) -> list[EventMarks]:
    """Where settings changed, to mark under every chart."""
    events = [event for event in folder.history.events if event.kind == CHANGED]
    return _marks(events, step_scale(folder.history.steps, False)) if events and folder.history.steps else []


def _changed(folder: RunFolder) -> list[tuple[str, str, str]]:
    """Settings that are not at their default, or once were not: name, value, default."""
    from titan_train.config import Config
    from titan_train.config.load import dump_config

    default = settings_text(tomllib.loads(dump_config(Config())))
    values = settings_text(folder.config) | values_over_run(folder)
    return [
        (key, value, default.get(key, ""))
        for key, value in values.items()
        if value != default.get(key) and key != "run.name"
    ]


def _environment(folder: RunFolder) -> list[tuple[str, str]]:
    info = folder.info
    rows = [
        ("device", info.get("device")),
        ("ranks", info.get("world_size")),
        ("backend", info.get("backend")),
        ("host", info.get("host")),
        ("platform", info.get("platform")),
        ("CPUs", info.get("cpus")),
        ("commit", info.get("git_commit")),
    ]
    versions = info.get("versions")
    if isinstance(versions, dict):
        rows += list(cast("dict[str, Any]", versions).items())
    return [(name, str(value)) for name, value in rows if value is not None]


def _command(info: dict[str, Any]) -> str:
    command = info.get("command")
    return " ".join(str(word) for word in cast("list[Any]", command)) if isinstance(command, list) else ""


def _resource(name: str) -> str:
    return (files("titan_train.report") / "template" / name).read_text(encoding="utf-8")
