"""The one loop that owns the attempts of a run, whichever launcher starts the ranks.

Start all ranks; watch them; when one is lost, hangs or fails, end the others, find the cause, and start all of them
again from the last finished checkpoint, until the run is done or the restarts are used up. The restarts of torchrun and
Ray are off: two restarters that act on the same ranks lose runs, and a restart here is a fork, not an import of torch.

Exit codes, with every launcher: 0 finished, or saved and stopped on request; 1 failed; 130 ended by a second Ctrl-C.
Every attempt is one line of ``attempts.jsonl`` in the run's folder. Every file that the supervisor writes is best
effort: a full disk is reported and waited for.
"""

import contextlib
import errno
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from titan_train.config import Config
from titan_train.config.faults import check_faults, forget_struck, parse_faults
from titan_train.launch.job import Attempt, Launcher, RunningJob
from titan_train.launch.rank.failure import clear_failures
from titan_train.launch.supervise.attempt import Outcome, WatchedAttempt, record_of, saved_step
from titan_train.launch.supervise.elastic import fit_layout
from titan_train.launch.supervise.journal import Journal
from titan_train.launch.supervise.requests import Requests
from titan_train.launch.supervise.restarts import Ended, RestartBudget

Made = TypeVar("Made")
_TICK_S = 0.1
_ROOM_S = 600.0  # how long a full disk is waited for before an attempt
_RANKS_S = 600.0  # how long an elastic run waits for enough ranks after a loss
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


class _StoppedError(Exception):
    """The person asked to stop while the supervisor waited for ranks or for room on the disk."""


@dataclass(frozen=True, slots=True)
class Before:
    """What an earlier supervisor of the same command left behind when it was lost."""

    again: bool = False
    """There was one: faults that struck do not strike again, and ranks that cannot be placed are a loss, not a mistake."""
    adopted: tuple[Attempt, RunningJob] | None = None
    """The attempt that it left running."""


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
        still_ours: Callable[[], None] = lambda: None,
        out: TextIO | None = None,
        before: "Before | None" = None,
    ) -> None:
        """Supervise with ``launcher``; nothing starts before `run`.

        Args:
            launcher: Starts the ranks.
            config: The run's configuration.
            run_dir: The run's folder.
            ranks: Ranks of the whole job.
            unit: Ranks that come and go together: those of a node.
            on_attempt: Called before each attempt.
            still_ours: Called often; raises if another run has taken the folder over, and the ranks are ended at once.
            out: Where the user reads what happens; the default is stderr.
            before: What a supervisor of the same command left behind, if there was one.

        Raises:
            ValueError: A fault names a rank that the run does not have.
        """
        self._launcher = launcher
        self._config = config
        self._run_dir = run_dir
        self._full = ranks
        self._unit = unit
        self._on_attempt = on_attempt
        self._still_ours = still_ours
        self._journal = Journal(run_dir / "attempts.jsonl", out or sys.stderr)
        self._requests = Requests()
        self._lost_at: float | None = None
        self._before = before or Before()
        self._saved_step: int | None = None
        self._stuck = ""
        """Which ranks cannot be killed, if there are any."""
        self._budget = RestartBudget(config.launch, has_trained=self._before.again and bool(self._saved()))
        check_faults(parse_faults(config.launch.faults), ranks)

    def run(self) -> int:
        """Run until the job is done, stopped or given up. Returns the exit code."""
        if not self._before.again:
            forget_struck(self._run_dir)
        code = 1
        try:
            with self._requests.installed():
                code = self._attempts()
        finally:
            self._launcher.close(code)
        return code

    def _attempts(self) -> int:
        number = 0
        while True:
            attempt, outcome = self._adopt() if self._before.adopted is not None else self._next(number)
            number = attempt.number
            self._journal.record(record_of(attempt, outcome))
            number += 1
            if outcome.ended is None and (outcome.finished or not outcome.growing or self._requests.stops):
                return 0  # all steps are made, or the person asked to stop
            if outcome.ended is None:
                continue
            code = self._after(outcome, outcome.ended)
            if code is not None:
                return code

    def _adopt(self) -> tuple[Attempt, Outcome]:
        """Watch the attempt that was left running."""
        assert self._before.adopted is not None
        attempt, job = self._before.adopted
        self._before = Before(again=True)
        self._journal.say(
            f"adopted  attempt {attempt.number}: its {attempt.world_size} ranks went on without a supervisor"
        )
        return attempt, self._watch(attempt, job)

    def _next(self, number: int) -> tuple[Attempt, Outcome]:
        attempt = Attempt(number, self._config, self._run_dir, self._full)
        saved = self._saved() or 0
        first = number == 0 and not self._before.again
        try:
            config, size = self._size(wait_s=0.0 if first else _RANKS_S)
            attempt = Attempt(number, config, self._run_dir, size)
            self._when_there_is_room(lambda: self._prepare(attempt))
            job = self._when_there_is_room(lambda: self._launcher.start(attempt))
        except ValueError as err:
            if first:
                raise
            # Elastic, a node that went away after it was counted is counted again.
            ended = Ended(str(err), saved, progressed=False, users_mistake=not self._config.launch.elastic)
            return attempt, Outcome(ended, from_step=saved, to_step=saved, lost_at=time.monotonic())
        except _StoppedError:
            return attempt, Outcome(from_step=saved, to_step=saved)
        except OSError as err:
            ended = Ended(f"the ranks could not be started: {err}", saved, progressed=False)
            return attempt, Outcome(ended, from_step=saved, to_step=saved, lost_at=time.monotonic())
        return attempt, self._watch(attempt, job)

    def _after(self, outcome: Outcome, ended: Ended) -> int | None:
        """What follows a lost attempt: the exit code, or None to start again."""
        if self._requests.stops or self._stuck:
            why = f"\nNot restarted: {self._stuck}." if self._stuck else ""
            self._journal.say(f"\nerror: {ended.text}\n{self._afterwards(ended)}{why}")
            return 130 if self._requests.end_now else 1
        decision = self._budget.decide(ended)
        if not decision.again:
            self._journal.say(f"\nerror: {ended.text}\n{self._afterwards(ended)}\nNot restarted: {decision.reason}.")
            return 1
        self._lost_at = outcome.lost_at
        saved = self._saved()
        place = f"from step {saved}" if saved else "from the beginning: there is no checkpoint yet"
        self._journal.say(f"lost     {ended.text}\nrestart  {place} ({decision.reason})")
        self._sleep(decision.wait_s)
        return 0 if self._requests.stops else None

    def _size(self, wait_s: float) -> tuple[Config, int]:
        """How many ranks the next attempt has, and its degrees; while too few are there, say so once and count again.

        Raises:
            ValueError: No layout fitted those that were there in ``wait_s`` seconds.
            _StoppedError: A stop was asked for meanwhile.
        """
        if not self._config.launch.elastic:
            return self._config, self._full
        deadline = time.monotonic() + wait_s
        waiting = False
        while True:
            try:
                config, size = fit_layout(self._config, self._launcher.capacity(), full=self._full, unit=self._unit)
            except ValueError as err:
                if time.monotonic() >= deadline:
                    raise
                if self._requests.stops:
                    raise _StoppedError from err
                if not waiting:
                    self._journal.say(f"waiting  {str(err).partition(':')[0]}. Bring more back, or press Ctrl-C")
                waiting = True
                self._sleep(1.0)
            else:
                if size < self._full:
                    self._journal.say(f"elastic  {size} of {self._full} ranks")
                return config, size

    def _watch(self, attempt: Attempt, job: RunningJob) -> Outcome:
        can_grow = attempt.world_size < self._full
        watched = WatchedAttempt(
            attempt,
            job,
            requests=self._requests,
            journal=self._journal,
            lost_at=self._lost_at,
            still_ours=self._still_ours,
            can_grow=lambda: can_grow and self._could_be_larger_than(attempt.world_size),
        )
        try:
            outcome = watched.watch()
        finally:
            try:
                job.end()
            except OSError:  # a full disk does not keep the ranks from being ended
                pass
            except RuntimeError as err:
                self._stuck = str(err)
        if outcome.recovered_s is not None:
            self._lost_at = None
        return outcome

    def _prepare(self, attempt: Attempt) -> None:
        clear_failures(self._run_dir)
        self._on_attempt(attempt)

    def _saved(self) -> int | None:
        self._saved_step = saved_step(self._run_dir, self._saved_step)
        return self._saved_step

    def _when_there_is_room(self, action: Callable[[], Made]) -> Made:
        """Do it; while the disk is full or fails, say so once and try again."""
        deadline = time.monotonic() + _ROOM_S
        waiting = False
        while True:
            try:
                return action()
            except OSError as err:
                if err.errno not in _FULL or time.monotonic() > deadline:
                    raise
                if self._requests.stops:
                    raise _StoppedError from err
                if not waiting:
                    self._journal.say(
                        f"waiting  {err.filename or self._run_dir}: {err.strerror}. Make room, or press Ctrl-C"
                    )
                waiting = True
                self._sleep(1.0)

    def _could_be_larger_than(self, size: int) -> bool:
        with contextlib.suppress(ValueError):
            _, possible = fit_layout(self._config, self._launcher.capacity(), full=self._full, unit=self._unit)
            return possible > size
        return False

    def _afterwards(self, ended: Ended) -> str:
        saved = self._saved()
        resume = (
            f"\nThe last finished checkpoint is step {saved}: run the same command to continue from it."
            if saved and not ended.users_mistake  # whose message says what to change
            else ""
        )
        return f"Logs of every rank: {self._run_dir / 'logs'}{resume}"

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._requests.stops:
            time.sleep(_TICK_S)
