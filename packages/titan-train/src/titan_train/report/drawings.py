"""The drawings of a run: its ranks as a grid, and its pipeline as planned or, where a step was measured, as it ran."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from titan_mesh import draw_svg
from titan_pipeline import (
    Costs,
    Measurement,
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
_Plan = TypeVar("_Plan")


@dataclass(frozen=True, slots=True)
class Drawing:
    """An SVG document, and what is to be said beside it."""

    svg: str
    note: str = ""


def draw_layout(folder: RunFolder) -> Drawing | None:
    """The grid of ranks; None where it is not known."""
    layout = _planned(folder, build_layout)
    return None if layout is None else Drawing(draw_svg(layout))


def draw_pipeline(folder: RunFolder) -> Drawing | None:
    """The pipeline of one step: what ran below its plan, or the plan alone; None without a pipeline."""
    measured, step = _measured(pipeline_file(folder.path))
    plan = _planned(folder, plan_run) if measured is None else None
    schedule = measured.schedule if measured is not None else plan.schedule if plan is not None else None
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
    simulated = simulate(schedule, fit_costs([measured]))
    which = "one step" if step is None else f"step {step}"
    note = f"{which} as it ran, each rank below its plan with the median times of its stages"
    return Drawing(draw_executed_svg(measured.timeline(), simulated), note)


def _planned(folder: RunFolder, plan: Callable[..., _Plan]) -> _Plan | None:
    """What the run's configuration plans on its ranks; None where they are not known, or do not fit."""
    ranks = folder.info.get("world_size")
    if not isinstance(ranks, int) or not folder.config:
        return None
    try:
        device = "cpu" if folder.info.get("device") == "cpu" else "cuda"
        return plan(read_config(folder.path), ranks, device=device)
    except (ValueError, OSError):  # a configuration of another version, or edited
        return None


def _measured(path: Path) -> tuple[Measurement | None, int | None]:
    """The recorded step and its number, where the file names it."""
    try:
        text = read_text(path)
        step = parse_json(text).get("step")
        return Measurement.from_json(text), step if isinstance(step, int) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ScheduleError):
        return None, None
