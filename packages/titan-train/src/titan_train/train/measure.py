"""Where the time of this run's steps goes: measured on every rank, gathered every few steps, recorded by rank 0.

`StepMeasure.timer` has the phases of the loop and of the step; collectives are counted while `StepMeasure.running`. Every
``metrics.split_every`` steps the ranks gather one row of numbers each. Rank 0 logs the event ``step_split`` and, for what
holds the run up in two windows in a row, the event ``straggler``. The last step of each window of a pipeline is recorded
action by action too (`PipelineTimes`).
"""

import contextlib
import json
import logging
import statistics
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from titan_mesh import Layout, Mesh
from titan_pipeline import Measurement, Schedule, ScheduleError
from titan_pipeline.runtime import Executor
from torch import nn

from titan_train.config import Config
from titan_train.files import parse_json, read_text, write_atomic
from titan_train.observe.timing import Cause, Place, StepSplit, StepTimer, combine, find_causes
from titan_train.observe.timing.causes import shortest_calls
from titan_train.observe.timing.clocks import clock_offset
from titan_train.observe.timing.collectives import CollectiveMeter, axes_of
from titan_train.observe.timing.device import CudaStreams, DeviceTimeline
from titan_train.run_folder import pipeline_file
from titan_train.train.observer import ObservedRun, Observer, Phase, StepInfo, is_due

log = logging.getLogger(__name__)

_SHARE = 0.2  # of a step that something must cost to be named: less is within what ranks of a busy machine differ by


class StepMeasure(Observer):
    """Measures the steps of one rank."""

    def __init__(self, config: Config, mesh: Mesh | None, device: torch.device, parts: Sequence[nn.Module]) -> None:
        """Nothing is measured before `running`.

        Args:
            config: ``metrics.split_every``, the steps of a window; 0 measures nothing but what is traced.
            mesh: All ranks; None for a run of one rank.
            device: Where the ranks' rows are gathered.
            parts: What this rank computes.
        """
        every = config.metrics.split_every
        on_gpu = device.type == "cuda"
        self.timer = StepTimer(device=DeviceTimeline(CudaStreams(), every) if on_gpu else None)
        self.rank = 0 if mesh is None else mesh.global_rank
        layout = None if mesh is None else mesh.layout
        self.meter = CollectiveMeter(self.timer, layout, self.rank)
        self.place = place_of(layout)
        self.work = _work(parts)
        self._device = device
        self._every, self._last, self._traced = every, config.train.steps, config.profile.range is not None
        self._fast: dict[tuple[str, int], tuple[float, float]] = {}
        """Seconds of the shortest call of each group so far, and of a step's compute then."""
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._named: set[tuple[str, tuple[int, ...]]] = set()
        self._windows = 0
        self.found: tuple[StepSplit, list[Cause]] | None = None
        """On rank 0, after the last step of each window but the first, which holds the first step, and that may compile: the
        window, and the causes to name for the first time."""
        self.paused = False
        """Whether no window ends now: a trace is being made, whose steps are a window of their own."""

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        if not self._every and not self._traced:
            yield
            return
        with self.meter.installed():
            if self._every:  # else the trace starts it
                self.timer.start()
            try:
                yield
            finally:
                self.timer.stop()

    def phase(self, name: Phase, step: int) -> AbstractContextManager[object]:
        return self.timer.phase(name)

    def on_step(self, info: StepInfo) -> None:
        """Count the step; at the end of a window gather the ranks' rows, which is collective."""
        self.timer.step_made()
        self.found = None
        if not is_due(info.step, self._every, self._last) or self.paused:
            return
        rows = self._gather(self.place.row(self.timer.take(), self.work))
        self._windows += 1
        if self.rank == 0 and (self._windows > 1 or info.step == self._last):
            split = combine(info.step, self.place, rows)
            self.found = split, self._new(split)

    def _gather(self, row: list[float]) -> list[list[float]]:
        mine = torch.tensor(row, dtype=torch.float64, device=self._device)
        if self.place.world_size == 1:
            return [mine.tolist()]
        rows = mine.new_empty(self.place.world_size * len(row))
        # not part of a step: counted by no window
        running, self.timer.running = self.timer.running, False
        dist.all_gather_into_tensor(rows, mine)
        self.timer.running = running
        return rows.view(self.place.world_size, len(row)).tolist()

    def _new(self, split: StepSplit) -> list[Cause]:
        """The causes that the window before had too, and that were not named yet or had passed meanwhile."""
        # where the machine has become busier, all takes longer: calls as much as compute
        compute_s = statistics.median(row["forward"] + row["backward"] for row in split.low)
        quickest = {key: s * max(1.0, compute_s / then_s) for key, (s, then_s) in self._fast.items()}
        causes = find_causes(split, self.place, share=_SHARE, quickest=quickest)
        for key, seconds in shortest_calls(split, self.place).items():
            if key not in self._fast or seconds < self._fast[key][0]:
                self._fast[key] = seconds, max(compute_s, 1e-9)
        keys = {(cause.kind, cause.ranks) for cause in causes}
        lasting = [cause for cause in causes if (cause.kind, cause.ranks) in self._seen]
        new = [cause for cause in lasting if (cause.kind, cause.ranks) not in self._named]
        self._named = (self._named & keys) | {(cause.kind, cause.ranks) for cause in new}
        self._seen = keys
        return new


class PipelineTimes(Observer):
    """The last step of each window as the pipeline of rank 0 ran it: each action of each of its ranks, on one clock.

    The newest is kept in ``pipeline.json`` of the run's folder, a `titan_pipeline.Measurement` with its step. An accelerator's
    times are those of events on its stream, read after the step.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._compiled = False  # this process has made its first step

    def on_start(self, run: ObservedRun) -> None:
        self.run = run
        assert run.mesh is not None
        self._group = run.mesh.group("pp") if 0 in run.mesh.layout.group_of(run.rank, "pp") else None

    def on_batch(self, step: int, batches: list[Any]) -> None:
        due = self._compiled and is_due(step, self.run.config.metrics.split_every, self.run.config.train.steps)
        self._executor.trace = due and self._group is not None

    def on_step(self, info: StepInfo) -> None:
        """Gather what was recorded, if it was. Collective over the pipeline of rank 0 then."""
        self._compiled = True
        if not self._executor.trace:
            return
        self._executor.trace = False
        measured = self._executor.measured(clock_offset(self.run.device, self._group))
        if self.run.rank != 0:
            return
        text = json.dumps({"step": info.step, **json.loads(measured.to_json())}) + "\n"
        try:
            write_atomic(pipeline_file(self.run.run_dir), text)
        except OSError as err:  # the run does not need it
            log.warning("step %d of the pipeline was not recorded: %s", info.step, err)


def drop_outdated(run_dir: Path, schedule: Schedule | None, step: int) -> None:
    """Remove what `PipelineTimes` of an earlier attempt recorded with another schedule, or after ``step``."""
    file = pipeline_file(run_dir)
    try:
        text = read_text(file)
        measured = Measurement.from_json(text)
        keep = schedule is not None and measured.schedule.digest == schedule.compute_only().digest
        keep &= int(parse_json(text)["step"]) <= step
    except (OSError, ValueError, KeyError, TypeError, ScheduleError):
        keep = False
    if not keep:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def place_of(layout: Layout | None) -> Place:
    """Which ranks meet on which axis."""
    if layout is None:
        return Place(1)
    stages: list[int] = []
    if layout.spec.pp > 1:
        index = {rank: i for group in layout.groups("pp") for i, rank in enumerate(group)}
        stages = [index[rank] for rank in range(layout.num_ranks)]
    groups = {name: tuple(map(tuple, layout.groups(name))) for name in axes_of(layout)}
    return Place(layout.num_ranks, groups, stages)


def _work(parts: Sequence[nn.Module]) -> float:
    """The parameters that this rank multiplies with: a stage's other costs depend little on what it holds."""
    named = (pair for part in parts for pair in part.named_parameters())
    return float(sum(parameter.numel() for name, parameter in named if "embeddings" not in name))
