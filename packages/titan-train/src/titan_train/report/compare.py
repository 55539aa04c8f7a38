"""Several runs on one page: their curves over each other, their numbers, and where their configurations differ."""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from titan_train.files import write_atomic
from titan_train.observe import ValidationRecord
from titan_train.report.changes import branched_from, values_over_run
from titan_train.report.chart import Chart, Series, build_chart
from titan_train.report.folder import RunFolder, read_folder
from titan_train.report.page import CURVES, line_of, loss_unit, render, settings_text
from titan_train.report.summary import headlines, setting
from titan_train.report.timeline import aligned

MOST_RUNS = 8  # more colours cannot be distinguished
_NOT_SET = "–"
# different in every run
_OF_ONE_RUN = ("run.name", "run.dir")


def compare_runs(run_dirs: Sequence[str | Path], out: str | Path) -> str:
    """Write the page that compares these runs.

    Args:
        run_dirs: Two to eight folders of runs: finished, going on, or left by a crash.
        out: The file to write.

    Returns:
        The same comparison as text, for a terminal.

    Raises:
        ValueError: Fewer than two runs or more than eight, one given twice, or a folder that is not a run's.
    """
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    if not 2 <= len(paths) <= MOST_RUNS:
        raise ValueError(f"{len(paths)} runs were given; compare takes 2 to {MOST_RUNS}. Give their folders.")
    twice = {path for path in paths if paths.count(path) > 1}
    if twice:
        raise ValueError(f"{min(twice)} was given more than once. Give each run once.")
    folders = [read_folder(path) for path in run_dirs]
    names = _names(folders)
    numbers = _numbers(folders)
    different = _differences(folders)
    html = render(
        "compare.html",
        names=names,
        folders=folders,
        settings=[setting(folder) for folder in folders],
        numbers=numbers,
        different=different,
        charts=_charts(folders, names),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    write_atomic(Path(out), html)
    return _text(names, numbers, different)


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """Folder names, with as much of their paths as makes them different."""
    parts = [folder.path.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder.path) for folder in folders]


def _numbers(folders: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Each headline of any run, and its value in every run."""
    found = [{item.label: item.value for item in headlines(folder)} for folder in folders]
    labels = list(dict.fromkeys(label for values in found for label in values))
    status = ("Status", [folder.status for folder in folders])
    parents = [branched_from(folder) or _NOT_SET for folder in folders]
    branched = [("Branched from", parents)] if set(parents) != {_NOT_SET} else []
    return [status, *branched, *((label, [values.get(label, _NOT_SET) for values in found]) for label in labels)]


def _differences(folders: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Each setting that differs between the runs, and its value in every run."""
    flat = [settings_text(folder.config) | values_over_run(folder) for folder in folders]
    keys = dict.fromkeys(key for values in flat for key in values if key not in _OF_ONE_RUN)
    rows = [(key, [values.get(key, _NOT_SET) for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _charts(folders: Sequence[RunFolder], names: Sequence[str]) -> list[Chart]:
    def steps(quantity: str, smoothed: bool = True, scale: float = 1.0) -> list[Series]:
        return [
            line_of(f.history, name, quantity, f"run{i}", smoothed, scale)
            for i, (name, f) in enumerate(zip(names, folders, strict=True))
        ]

    def validations(value: Callable[[ValidationRecord], float | None]) -> list[Series]:
        return [
            Series(
                name,
                [r.step for r in f.history.validations],
                _finite(map(value, f.history.validations)),
                f"run{i}",
                dots=True,
            )
            for i, (name, f) in enumerate(zip(names, folders, strict=True))
        ]

    losses = ", ".join(dict.fromkeys(loss_unit(folder.config) for folder in folders))
    wanted = (
        build_chart("Training loss", losses, steps("loss")),
        build_chart("Validation loss", losses, validations(lambda r: r.loss)),
        build_chart("Bits per byte", "on the validation text", validations(lambda r: r.bits_per_byte)),
        *(build_chart(title, unit, steps(*line), zero=True) for title, unit, line in CURVES),
        build_chart("Peak memory", "GiB per rank", steps("peak_mem_gib", smoothed=False), zero=True),
    )
    return [chart for chart in wanted if chart is not None]


def _finite(values: "map[float | None]") -> list[float]:
    return [math.nan if value is None else value for value in values]


def _text(
    names: Sequence[str], numbers: Sequence[tuple[str, list[str]]], different: Sequence[tuple[str, list[str]]]
) -> str:
    rows = [("", *names), *((label, *values) for label, values in numbers)]
    settings = [(label, *values) for label, values in different] or [("settings", *["alike"] * len(names))]
    lines = aligned([*rows, *settings]).split("\n")
    return "\n".join([*lines[: len(rows)], "", *lines[len(rows) :]])
