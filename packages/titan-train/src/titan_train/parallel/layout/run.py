"""Everything about a run that its configuration and the number of ranks decide, the pipeline's schedule among it."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from titan_mesh import Layout
from titan_pipeline import FAMILIES, Schedule, ScheduleError, build_schedule, find_family, verify

from titan_train.config import Config, PipelineConfig
from titan_train.files import read_text
from titan_train.parallel.layout.batch import BatchPlan, plan_batch
from titan_train.parallel.layout.degrees import Mode, build_layout, resolve_mode
from titan_train.values import did_you_mean


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything about a run that its configuration and the number of ranks decide."""

    layout: Layout
    mode: Mode
    batch: BatchPlan
    schedule: Schedule | None
    """The pipeline's; None without one."""


def plan_run(config: Config, world_size: int, *, device: str = "") -> RunPlan:
    """Decide all of it, and with that check it, before any rank starts.

    Args:
        config: The run's configuration.
        world_size: Ranks.
        device: As for `build_layout`.

    Raises:
        ValueError: As `build_layout`, `resolve_mode`, `plan_batch` and `plan_pipeline`.
    """
    layout = build_layout(config, world_size, device=device)
    mode = resolve_mode(config.parallel, layout, dtype=config.train.dtype)
    batch = plan_batch(config, layout)
    return RunPlan(layout, mode, batch, plan_pipeline(config, layout, batch))


def plan_pipeline(config: Config, layout: Layout, batch: BatchPlan) -> Schedule | None:
    """The pipeline's schedule, after a ramp of the batch if there is one; None without a pipeline.

    Raises:
        ValueError: The schedule cannot serve this many ranks and micro-batches, of every size of the ramp.
    """
    if layout.spec.pp == 1:
        _check_exists(config.pipeline.schedule)
        return None
    if config.parallel.accumulate != "sharded":
        raise ValueError(
            f"parallel.accumulate={config.parallel.accumulate!r} and parallel.pp={layout.spec.pp}: a pipeline always keeps "
            "whole gradients until its schedule ends. Leave it at 'sharded'."
        )
    return [plan_schedule(config.pipeline, pp=layout.spec.pp, microbatches=n) for n in batch.accumulations][-1]


def plan_schedule(config: PipelineConfig, *, pp: int, microbatches: int) -> Schedule:
    """The schedule that ``config`` names. Pure: no torch, no ranks.

    Raises:
        ValueError: The family cannot serve these numbers, or the file holds a schedule for others, or, with
            ``deterministic``, one that sums gradients out of order.
    """
    if find_family(config.schedule) is not None:
        return _of_family(config.schedule, pp, microbatches, config.stages_per_rank or None, config.deterministic)
    _check_exists(config.schedule)
    text = read_text(config.schedule)
    schedule = Schedule.from_text(text) if text.lstrip().startswith("#") else Schedule.from_json(text)
    if (schedule.num_ranks, schedule.num_microbatches) != (pp, microbatches):
        raise ValueError(
            f"pipeline.schedule={config.schedule!r} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} "
            f"microbatches; this run has parallel.pp={pp} and {microbatches} of them a step. Make one for these, or change "
            "train.global_batch or train.microbatch."
        )
    try:
        verify(schedule, in_order=config.deterministic)
    except ScheduleError as err:
        given = f"pipeline.schedule={config.schedule!r} with pipeline.deterministic={config.deterministic}"
        raise ValueError(f"{given}: {err}") from None
    return schedule


def _check_exists(schedule: str) -> None:
    if find_family(schedule) is None and not Path(schedule).is_file():
        raise ValueError(
            f"pipeline.schedule={schedule!r} is neither a family ({', '.join(FAMILIES)}) nor a file here. "
            f"{did_you_mean(schedule, FAMILIES)}Write one with `titan-pipeline solve` or `titan-pipeline gen`."
        )


@cache
def _of_family(name: str, pp: int, microbatches: int, chunks: int | None, in_order: bool) -> Schedule:
    """Building and verifying takes a second at 8 ranks and 128 micro-batches, and a run asks several times."""
    schedule = build_schedule(name, pp, microbatches, num_chunks=chunks)
    verify(schedule, in_order=in_order)
    return schedule


def fit_warmup(config: Config) -> tuple[Config, str]:
    """Shorten a warm-up that is longer than the run, as happens when only ``train.steps`` is lowered for a trial.

    Returns:
        The configuration, and one line that says what was changed; empty if nothing was.
    """
    schedule, steps = config.schedule, config.train.steps
    if schedule.warmup_steps <= steps:
        return config, ""
    warmup = max(1, steps // 5)
    shorter = dataclasses.replace(
        schedule, warmup_steps=warmup, decay_steps=-1 if schedule.decay_steps > 0 else schedule.decay_steps
    )
    note = f"schedule.warmup_steps={schedule.warmup_steps} is more than train.steps={steps}: shortened to {warmup} for this run"
    return dataclasses.replace(config, schedule=shorter), note
