"""The one loop that owns the attempts of a run, whoever starts the ranks.

Start all ranks; watch them; when one is lost, hangs or fails, end the others, find the cause, and start all of them
again from the last finished checkpoint, until the run is done or the restarts are used up. torchrun's own restarts are
off and Ray's too: two restarters over each other's ranks is how runs are lost, and a restart here is a fork, not an
import of torch.

Exit codes, with every launcher: 0 finished, or saved and stopped on request; 1 failed; 130 ended by a second Ctrl-C.
Every attempt is one line of ``attempts.jsonl`` in the run's folder.
"""

import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from titan_train.config import Config
from titan_train.config.faults import check_faults, forget_struck, parse_faults
from titan_train.launch.job import Attempt, Launcher, RankExit, RunningJob
from titan_train.launch.rank.failure import clear_failures, describe_exit, describe_failure, first_failure
from titan_train.launch.rank.flight_recorder import read_dumps, wait_for_dumps
from titan_train.launch.rank.heartbeat import Beat, Phase
from titan_train.launch.rank.orders import Order
from titan_train.launch.supervise.elastic import fit_layout
from titan_train.launch.supervise.restarts import Ended, RestartBudget
from titan_train.launch.supervise.watch import find_hang, find_stragglers
from titan_train.run_folder import newest_checkpoint

_TICK_S = 0.1
_LOOK_S = 1.0  # between looks at heartbeats when nothing is expected
_GRACE_S = 3.0  # how long the peers of a failed rank may take to tell their own error before they are ended
_DUMP_S = 3.0
_GROW_S = 2.0  # between looks at whether ranks came back


@dataclass(slots=True)
class _Watched:
    """What became of one attempt."""

    ended: Ended | None = None
    """None: every rank ended with success."""
    finished: bool = False
    growing: bool = False
    recovered_s: float | None = None
    """From the loss before this attempt to its first finished step."""
    lost_at: float = 0.0
    """When the loss happened, by the supervisor's monotonic clock."""
    to_step: int = 0


class Supervisor:
    """Runs a job to its end through losses."""

    def __init__(
        self,
        launcher: Launcher,
        config: Config,
        run_dir: Path,
        *,
        ranks: int,
        unit: int = 1,
        on_attempt: Callable[[Attempt], None] = lambda _: None,
        out: TextIO | None = None,
    ) -> None:
        """Prepare.

        Args:
            launcher: Starts the ranks.
            config: The run's configuration.
            run_dir: The run's folder.
            ranks: Ranks of the whole job.
            unit: Ranks that come and go together: those of a node.
            on_attempt: Called before each attempt.
            out: Where to tell the user; the default is stderr.

        Raises:
            ValueError: A fault is for a rank there is none of.
        """
        self._launcher = launcher
        self._config = config
        self._run_dir = run_dir
        self._full = ranks
        self._unit = unit
        self._on_attempt = on_attempt
        self._out = out or sys.stderr
        self._budget = RestartBudget(config.launch)
        self._stops = 0  # requests to stop, from SIGTERM and Ctrl-C
        self._interrupts = 0
        self._save_asked = False
        self._lost_at: float | None = None
        self._stragglers: set[int] = set()
        check_faults(parse_faults(config.launch.faults), ranks)

    def run(self) -> int:
        """Run until the job is done, stopped or given up. Returns the exit code."""
        forget_struck(self._run_dir)
        code = 1
        try:
            with self._signals():
                code = self._attempts()
        finally:
            self._launcher.close(code)
        return code

    def _attempts(self) -> int:
        number = 0
        while True:
            config, size = self._size()
            attempt = Attempt(number, config, self._run_dir, size)
            clear_failures(self._run_dir)
            self._on_attempt(attempt)
            from_step = newest_checkpoint(self._run_dir) or 0
            watched = self._one(attempt)
            self._note(attempt, from_step, watched)
            number += 1
            if watched.ended is None and (watched.finished or (self._stops and not watched.growing)):
                return 0
            if watched.growing:
                continue
            assert watched.ended is not None
            if self._stops:
                self._say(f"\nerror: {watched.ended.text}\n{self._afterwards()}")
                return 130 if self._interrupts > 1 else 1
            decision = self._budget.decide(watched.ended)
            if not decision.again:
                self._say(f"\nerror: {watched.ended.text}\n{self._afterwards()}\nNot started again: {decision.reason}.")
                return 1
            self._lost_at = watched.lost_at
            saved = newest_checkpoint(self._run_dir)
            place = f"from step {saved}" if saved else "from the beginning, there is no checkpoint yet"
            self._say(f"lost     {watched.ended.text}\nrestart  {place} ({decision.reason})")
            self._sleep(decision.wait_s)
            if self._stops:
                return 0

    def _size(self) -> tuple[Config, int]:
        """How many ranks the next attempt has, and its degrees."""
        if not self._config.launch.elastic:
            return self._config, self._full
        config, size = fit_layout(self._config, self._launcher.capacity(), full=self._full, unit=self._unit)
        if size < self._full:
            self._say(f"elastic  {size} of {self._full} ranks")
        return config, size

    def _one(self, attempt: Attempt) -> _Watched:
        self._stragglers = set()
        try:
            job = self._launcher.start(attempt)
        except ValueError as err:
            if attempt.number == 0:
                raise
            # Elastic, a node that went away after it was counted is counted again, not waited for.
            ended = Ended(str(err), 0, progressed=False, users_mistake=not self._config.launch.elastic)
            return _Watched(ended, lost_at=time.monotonic())
        try:
            return self._watch(attempt, job)
        finally:
            job.end()

    def _watch(self, attempt: Attempt, job: RunningJob) -> _Watched:
        watched = _Watched(to_step=newest_checkpoint(self._run_dir) or 0)
        left = set(range(attempt.world_size))
        stops_sent, failures = 0, list[RankExit]()
        next_look = next_grow = 0.0
        deadline: float | None = None
        while left:
            for exit in job.exits(_TICK_S):
                left.discard(exit.rank)
                if exit.code != 0:
                    failures.append(exit)
                    watched.lost_at = watched.lost_at or time.monotonic()
                    grace_s = 0.0 if _is_cause(exit) else _GRACE_S
                    deadline = min(deadline or math.inf, watched.lost_at + grace_s)
            now = time.monotonic()
            if deadline is not None and (now >= deadline or self._interrupts > 1):
                break
            if self._interrupts > 1:
                watched.ended = Ended("ended by a second Ctrl-C; nothing was saved", watched.to_step, progressed=True)
                return watched
            stops_sent = self._pass_on(job, stops_sent)
            if deadline is None and (now >= next_look or (self._lost_at is not None and watched.recovered_s is None)):
                next_look = now + _LOOK_S
                if self._look(attempt, job, watched):
                    return watched
            if attempt.world_size < self._full and not self._stops and not watched.growing and now >= next_grow:
                next_grow = now + _GROW_S
                if _progressed(job.beats()) and self._can_grow(attempt):
                    watched.growing = True
                    self._say("elastic  ranks came back: saving, then starting with more")
                    job.order(Order.STOP)
        beats = job.beats()
        watched.to_step = max([watched.to_step, *(beat.step for beat in beats.values())])
        if failures:
            watched.growing = False
            watched.ended = self._cause(attempt, job, failures, watched)
        else:
            watched.finished = all(beat.phase is Phase.FINISHED for beat in beats.values())
            if not watched.finished and not self._stops and not watched.growing:
                text = f"a rank was told to stop from outside (SIGTERM); step {watched.to_step} is saved"
                watched.ended = Ended(text, watched.to_step, progressed=_progressed(beats), planned=True)
                watched.lost_at = time.monotonic()
        return watched

    def _pass_on(self, job: RunningJob, stops_sent: int) -> int:
        """Turn the signals that came since the last time into orders."""
        if self._save_asked:
            self._save_asked = False
            job.order(Order.SAVE)
        if self._stops > stops_sent:
            job.order(Order.STOP)
        return self._stops

    def _look(self, attempt: Attempt, job: RunningJob, watched: _Watched) -> bool:
        """Judge the heartbeats. Returns True if the ranks hang, with the cause in ``watched``."""
        beats = job.beats()
        watched.to_step = max([watched.to_step, *(beat.step for beat in beats.values())])
        if self._lost_at is not None and watched.recovered_s is None and _progressed(beats):
            watched.recovered_s = time.monotonic() - self._lost_at
            self._say(f"resumed  step {watched.to_step} is done, {watched.recovered_s:.1f} s after the loss")
            self._lost_at = None
        for slow in find_stragglers(beats, self._config.launch.straggler_factor):
            if slow.rank not in self._stragglers:
                self._stragglers.add(slow.rank)
                self._say(
                    f"slow     rank {slow.rank} ({job.node_of(slow.rank)}) needs {slow.own_s:.3f} s for its part of a step, "
                    f"{slow.factor:.1f} times the median of all ranks"
                )
        hang = find_hang(beats, self._config.launch)
        if hang is None:
            return False
        folder = self._run_dir / "hangs" / f"attempt-{attempt.number}"
        job.order(Order.DUMP)
        wait_for_dumps(folder, attempt.world_size, _DUMP_S)
        reading = read_dumps(folder, attempt.world_size)
        where = "".join(f" ({job.node_of(rank)})" for rank in reading.missing[:1])
        watched.lost_at = time.monotonic() - hang.age_s
        watched.ended = Ended(
            f"no rank finished step {hang.step + 1} in {hang.age_s:.1f} s (limit {hang.limit_s:.1f} s): {reading.text}{where}. "
            f"Stacks and flight recorder: {folder}",
            hang.step,
            progressed=_progressed(beats),
        )
        return True

    def _can_grow(self, attempt: Attempt) -> bool:
        with contextlib.suppress(ValueError):
            _, size = fit_layout(self._config, self._launcher.capacity(), full=self._full, unit=self._unit)
            return size > attempt.world_size
        return False

    def _cause(self, attempt: Attempt, job: RunningJob, failures: list[RankExit], watched: _Watched) -> Ended:
        """The first thing that went wrong; what the others died of is its consequence."""
        killed = [exit for exit in failures if _is_cause(exit)]
        told = first_failure(self._run_dir)
        progressed = _progressed(job.beats())
        step = watched.to_step
        if killed or told is None:
            first = (killed or failures)[0]
            text = first.note or describe_exit(first.rank, attempt.world_size, first.code)
            return Ended(f"{text} ({job.node_of(first.rank)})", step, progressed=progressed)
        return Ended(
            describe_failure(told, attempt.world_size),
            step,
            progressed=progressed,
            error=f"{told.kind}: {told.message}",
            users_mistake=told.users_mistake,
        )

    def _note(self, attempt: Attempt, from_step: int, watched: _Watched) -> None:
        """One line of ``attempts.jsonl``."""
        line = {
            "attempt": attempt.number,
            "time": round(time.time(), 3),
            "world_size": attempt.world_size,
            "from_step": from_step,
            "to_step": watched.to_step,
            "end": "finished" if watched.finished else _shorter(watched.ended) if watched.ended else "stopped",
            "recovered_s": watched.recovered_s and round(watched.recovered_s, 3),
        }
        with (self._run_dir / "attempts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _afterwards(self) -> str:
        saved = newest_checkpoint(self._run_dir)
        resume = (
            f"\nThe last finished checkpoint is step {saved}: run the same command to continue from it."
            if saved
            else ""
        )
        return f"Logs of every rank: {self._run_dir / 'logs'}{resume}"

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stops:
            time.sleep(_TICK_S)

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        """SIGTERM and Ctrl-C: save and stop; a second Ctrl-C: end at once; SIGUSR1: save and go on."""

        def stop(number: int, _frame: object) -> None:
            self._stops += 1
            self._interrupts += number == signal.SIGINT

        def save(_number: int, _frame: object) -> None:
            self._save_asked = True

        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGUSR1: save}
        saved = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)


def _is_cause(exit: RankExit) -> bool:
    """A rank ended by a signal, or lost with its node, is the cause, even where a peer's own error was seen first.

    An abort is not: gloo and NCCL abort a process whose peer is gone.
    """
    return exit.code is None or (exit.code < 0 and exit.code != -signal.SIGABRT)


def _progressed(beats: dict[int, Beat]) -> bool:
    """Whether a step was finished in this attempt."""
    return any(beat.step_s > 0 or beat.phase in (Phase.STOPPED, Phase.FINISHED) for beat in beats.values())


def _shorter(ended: Ended) -> str:
    """What happened, without a traceback."""
    return ended.error or ended.text
