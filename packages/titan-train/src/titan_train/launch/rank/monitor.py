"""A rank's side of being watched: heartbeats, injected faults, time-outs that tighten once the run steps.

Compiled runs compile again when a shape is new, often on one rank alone, in the middle of a step, for minutes. Its peers
wait in collectives, whose time-out was set before anybody knew. So where anything was compiled, collectives keep the long
time-out of the start, and the rank that compiles says so in its heartbeat, which the launcher judges hangs by.
"""

import contextlib
import datetime
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from titan_train.config import LaunchConfig
from titan_train.config.faults import parse_faults
from titan_train.launch.rank.heartbeat import Heartbeat, Phase
from titan_train.launch.rank.inject import Injector
from titan_train.train import observer

_WINDOW = 16  # steps that a median is taken over
_WARM_UP = 4


class RankMonitor(observer.Observer):
    """Writes the progress of the trainer into the heartbeat and injects the planned faults."""

    def __init__(
        self, heartbeat: Heartbeat, launch: LaunchConfig, rank: int, run_dir: Path, ready: threading.Event
    ) -> None:
        self._heartbeat = heartbeat
        self._injector = Injector(parse_faults(launch.faults), rank, run_dir)
        self._long_s = launch.timeout_s
        self._short_s = launch.step_timeout_s or launch.timeout_s
        self._compiled = False  # anything, so far
        self._phase = Phase.STARTING
        self._ready = ready  # set at the first step, when the trainer handles signals
        self._step = 0
        self._met: float | None = None  # when this rank last left the others: after a step, a save, a validation
        self._alone: deque[float] = deque(maxlen=_WINDOW)
        self._together: deque[float] = deque(maxlen=_WINDOW)
        heartbeat.write(Phase.STARTING, 0)
        self._callbacks: Any = None

    def on_start(self, run: observer.ObservedRun) -> None:
        """Let a slow link be injected."""
        self.run = run
        self._injector.delays = run.timer.delays

    def on_batch(self, step: int, batches: list[Any]) -> None:
        """Note that a step begins; a fault may strike, or spoil the batches."""
        batches[:] = self._injector.data_loaded(step, batches)
        self._ready.set()
        self._watch_compiler()
        self._step = step - 1
        if self._heartbeat.from_step < 0:
            self._heartbeat.from_step = step - 1
        self._write(Phase.TRAIN if self._together else Phase.STARTING)  # the first step may compile
        self._injector.before_step(step, self.run.model.parts, _median(self._together))
        now = time.monotonic()
        if self._met is not None:
            self._alone.append(now - self._met)
        self._began = now

    def on_step(self, info: observer.StepInfo) -> None:
        """Note that a step is done."""
        self._met = time.monotonic()
        self._together.append(self._met - self._began)
        self._step = info.step
        if len(self._together) == 1:
            self._tighten()
        self._write(Phase.TRAIN)

    @contextlib.contextmanager
    def phase(self, name: observer.Phase, step: int) -> Generator[None]:
        """Allow the longer time-out while validating and saving."""
        if name == "data":
            self._injector.before_data(step)
            yield
            return
        self._step = step
        self._write(Phase.SAVE if name == "checkpoint" else Phase.VALIDATE)
        set_collective_timeout(self._long_s)
        with self._injector.during_save(step) if name == "checkpoint" else contextlib.nullcontext():
            yield
        self._tighten()
        self._met = time.monotonic()
        self._write(Phase.TRAIN)

    def on_end(self) -> None:
        """Allow the longer time-out while files and trackers are closed, which only some ranks have."""
        self._write(Phase.SAVE)
        set_collective_timeout(self._long_s)

    def ended(self, step: int, *, finished: bool) -> None:
        """Note that the trainer returned after ``step``, the last one if ``finished``."""
        self._heartbeat.write(Phase.FINISHED if finished else Phase.STOPPED, step)

    def compiling(self, now: bool) -> None:
        """Note that a compilation begins or ends, in any thread that waits for it."""
        self._compiled = True
        if now and self._phase is Phase.TRAIN:
            self._write(Phase.COMPILE)
        elif not now and self._phase is Phase.COMPILE:
            self._write(Phase.TRAIN)

    def _watch_compiler(self) -> None:
        """Listen for compilations once Dynamo is loaded: nothing compiles before."""
        if self._callbacks is None and "torch._dynamo.callback" in sys.modules:
            self._callbacks = sys.modules["torch._dynamo.callback"].callback_handler
            self._callbacks.register_start_callback(lambda _: self.compiling(True))
            self._callbacks.register_end_callback(lambda _: self.compiling(False))

    def _tighten(self) -> None:
        """The time-out of collectives while the run steps."""
        set_collective_timeout(self._long_s if self._compiled else self._short_s)

    def _write(self, phase: Phase) -> None:
        self._phase = phase
        # the first steps warm up at different speeds, which says nothing about the ranks
        alone = _median(self._alone) if len(self._alone) >= _WARM_UP else 0.0
        together = _median(self._together)
        self._heartbeat.write(phase, self._step, step_s=alone + together, alone_s=alone)


def _median(values: deque[float]) -> float:
    return statistics.median(values) if values else 0.0


def set_collective_timeout(seconds: float) -> None:
    """Give every process group of this rank the time-out ``seconds`` from the next collective on. Local, cheap.

    torch 2.15 has `torch.distributed.set_timeout`; before it, the same function was private. Checked on 2.11 and 2.15.
    """
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # pyright: ignore[reportDeprecated]
    for group in list(distributed_c10d._world.pg_map):
        set_timeout(datetime.timedelta(seconds=seconds), group)
