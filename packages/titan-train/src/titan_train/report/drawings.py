"""The drawings of a run: its ranks as a grid, and its pipeline as planned or, where a step was measured, as it ran."""

from dataclasses import dataclass
from pathlib import Path

from titan_mesh import Layout, draw_svg
from titan_pipeline import (
    Costs,
    Measurement,
    Schedule,
    ScheduleError,
    draw_executed_svg,
    fit_costs,
    simulate,
)
from titan_pipeline import draw_svg as draw_schedule

from titan_train.files import parse_json, read_text
from titan_train.parallel.layout.degrees import build_layout
from titan_train.parallel.layout.run import plan_run
from titan_train.report.folder import RunFolder
from titan_train.run_folder import pipeline_file, read_config

# A drawing of more is megabytes, and its actions are narrower than a pixel.
_MOST_ACTIONS = 6000


@dataclass(frozen=True, slots=True)
class Drawing:
    """An SVG document, and what is to be said beside it."""

    svg: str
    note: str = ""


def draw_layout(folder: RunFolder) -> Drawing | None:
    """The grid of ranks; None where configuration and number of ranks are not known, or do not fit."""
    layout = _layout(folder)
    return None if layout is None else Drawing(draw_svg(layout))


def draw_pipeline(folder: RunFolder) -> Drawing | None:
    """The pipeline of one step: what ran below its plan, or the plan alone; None without a pipeline."""
    measured, step = _measured(pipeline_file(folder.path))
    schedule = _schedule(folder) if measured is None else measured.schedule
    if schedule is None:
        return None
    actions = sum(len(program) for program in schedule.ranks)
    if actions > _MOST_ACTIONS:
        return Drawing(
            "", f"{actions:,} actions are too many to draw: `titan-pipeline trace` writes them for Perfetto."
        )
    if measured is None:
        costs = Costs.uniform(schedule.num_stages, num_chunks=schedule.num_chunks)
        note = "planned, with equal stages and instant links; no step of this run was measured"
        return Drawing(draw_schedule(simulate(schedule, costs), unit="forwards of one rank"), note)
    plan = simulate(schedule, fit_costs([measured]))
    which = "one step" if step is None else f"step {step}"
    note = f"{which} as it ran, each rank below its plan with the median times of its stages"
    return Drawing(draw_executed_svg(measured.timeline(), plan), note)


def _layout(folder: RunFolder) -> Layout | None:
    ranks = folder.info.get("world_size")
    if not isinstance(ranks, int) or not folder.config:
        return None
    try:
        return build_layout(read_config(folder.path), ranks, device=_kind(folder))
    except ValueError:  # a configuration of another version, or edited
        return None


def _schedule(folder: RunFolder) -> Schedule | None:
    ranks = folder.info.get("world_size")
    if not isinstance(ranks, int) or not folder.config:
        return None
    try:
        return plan_run(read_config(folder.path), ranks, device=_kind(folder)).schedule
    except (ValueError, OSError):
        return None


def _kind(folder: RunFolder) -> str:
    return "cpu" if folder.info.get("device") == "cpu" else "cuda"


def _measured(path: Path) -> tuple[Measurement | None, int | None]:
    """The recorded step and its number, where the file names it."""
    try:
        text = read_text(path)
        step = parse_json(text).get("step")
        return Measurement.from_json(text), step if isinstance(step, int) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ScheduleError):
        return None, None
