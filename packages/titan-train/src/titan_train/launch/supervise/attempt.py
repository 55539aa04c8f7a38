"""One attempt, watched from its start to the end of its last rank."""

import contextlib
import math
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_train.config.load import values_set
from titan_train.launch.job import Attempt, RankExit, RunningJob
from titan_train.launch.rank.failure import describe_exit, describe_failure, first_failure
from titan_train.launch.rank.flight_recorder import read_dumps, wait_for_dumps
from titan_train.launch.rank.heartbeat import Beat, Phase
from titan_train.launch.rank.orders import Order
from titan_train.launch.supervise.journal import Journal
from titan_train.launch.supervise.requests import Requests
from titan_train.launch.supervise.restarts import Ended
from titan_train.launch.supervise.watch import Hang, find_hang, find_stragglers
from titan_train.run_folder import newest_checkpoint

_TICK_S = 0.1
_LOOK_S = 1.0  # between looks at heartbeats when nothing is expected
_SOON_S = 0.25  # until the first step after a loss
_GRACE_S = 3.0  # how long the peers of a failed rank may take to report their own error before they are ended
_DUMP_S = 3.0  # until the first dump, and from one to the next: a thousand of them take a shared disk longer
_GROW_S = 2.0  # between looks at whether ranks came back


@dataclass(slots=True)
class Outcome:
    """What became of one attempt."""

    ended: Ended | None = None
    """None: every rank ended with success."""
    finished: bool = False
    """All steps are made."""
    growing: bool = False
    """Stopped in order to start again with more ranks."""
    from_step: int = 0
    """The step that the ranks resumed from."""
    to_step: int = 0
    """Steps finished."""
    recovered_s: float | None = None
    """From the loss before this attempt to its first finished step."""
    lost_at: float = 0.0
    """When the loss happened, by the supervisor's monotonic clock."""


class WatchedAttempt:
    """Takes exits and heartbeats of one attempt, passes orders on, and reports how the attempt ended."""

    def __init__(
        self,
        attempt: Attempt,
        job: RunningJob,
        *,
        requests: Requests,
        journal: Journal,
        lost_at: float | None,
        can_grow: Callable[[], bool],
        still_ours: Callable[[], None] = lambda: None,
    ) -> None:
        """Watch ``job`` from `watch` on.

        Args:
            attempt: What was started.
            job: Its ranks.
            requests: What was asked for by signals.
            journal: Where events are reported.
            lost_at: When the attempt before this one was lost; None if none was.
            can_grow: Whether more ranks could run than this attempt has.
            still_ours: Raises if another run has taken the folder over.
        """
        self._attempt = attempt
        self._job = job
        self._launch = attempt.config.launch
        self._requests = requests
        self._journal = journal
        self._lost_at = lost_at
        self._can_grow = can_grow
        self._still_ours = still_ours
        saved = saved_step(attempt.run_dir) or 0
        self._outcome = Outcome(from_step=saved, to_step=saved)
        self._left = set(range(attempt.world_size))
        self._failures: list[RankExit] = []
        self._deadline = math.inf
        """When the peers of a failed rank have had their time."""
        self._stops_sent = 0
        self._next_look = self._next_grow = 0.0
        self._stragglers: set[int] = set()

    def watch(self) -> Outcome:
        """Watch until all ranks have ended, or the rest must be ended by the caller."""
        outcome = self._outcome
        while self._left:
            self._take_exits()
            self._still_ours()
            now = time.monotonic()
            if self._failures and (now >= self._deadline or self._requests.end_now):
                break
            if self._requests.end_now:
                outcome.ended = Ended("ended by a second Ctrl-C; nothing was saved", outcome.to_step, progressed=True)
                return outcome
            self._pass_on_requests()
            if not self._failures and self._look_is_due(now) and self._look_at_heartbeats():
                return outcome
            self._grow_if_possible(now)
        self._conclude(self._job.beats())
        return outcome

    def _take_exits(self) -> None:
        for exit in self._job.exits(_TICK_S):
            self._left.discard(exit.rank)
            if exit.code != 0:
                self._failures.append(exit)
                self._outcome.lost_at = self._outcome.lost_at or time.monotonic()
                grace_s = 0.0 if _is_cause(exit) else _GRACE_S
                self._deadline = min(self._deadline, self._outcome.lost_at + grace_s)

    def _pass_on_requests(self) -> None:
        """Turn the signals that came since the last time into orders."""
        if self._requests.take_save():
            self._job.order(Order.SAVE)
        if self._requests.stops > self._stops_sent:
            self._job.order(Order.STOP)
        self._stops_sent = self._requests.stops

    def _look_is_due(self, now: float) -> bool:
        if now < self._next_look:
            return False
        recovering = self._lost_at is not None and self._outcome.recovered_s is None
        self._next_look = now + (_SOON_S if recovering else _LOOK_S)
        return True

    def _look_at_heartbeats(self) -> bool:
        """Judge the heartbeats. Returns True if the ranks hang, with the cause in the outcome."""
        beats = self._job.beats()
        self._note_steps(beats)
        self._note_recovery(beats)
        for slow in find_stragglers(beats, self._launch.straggler_factor):
            if slow.rank not in self._stragglers:
                self._stragglers.add(slow.rank)
                self._journal.say(
                    f"slow     rank {slow.rank} ({self._job.node_of(slow.rank)}) takes {slow.own_s:.3f} s of its own per step, "
                    f"{slow.factor:.1f} times the median of all ranks"
                )
        hang = find_hang(beats, self._launch)
        if hang is not None:
            self._explain(hang, progressed=_progressed(beats))
        return hang is not None

    def _explain(self, hang: Hang, *, progressed: bool) -> None:
        """Collect the ranks' dumps and name the rank that the others wait for."""
        folder = self._attempt.run_dir / "hangs" / f"attempt-{self._attempt.number}"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier command, whose attempts had the same numbers
        self._outcome.lost_at = time.monotonic() - hang.age_s
        self._job.order(Order.DUMP)
        with contextlib.suppress(OSError):  # the disk fails: no dumps, and the hang is known still
            wait_for_dumps(folder, self._attempt.world_size, _DUMP_S)
        reading = read_dumps(folder, self._attempt.world_size)
        where = "".join(f" ({self._job.node_of(rank)})" for rank in reading.missing[:1])
        self._outcome.ended = Ended(
            f"no rank finished step {hang.step + 1} in {hang.age_s:.1f} s (limit {hang.limit_s:.1f} s): {reading.text}{where}. "
            f"Stacks and flight recorder: {folder}",
            hang.step,
            progressed=progressed,
        )

    def _grow_if_possible(self, now: float) -> None:
        if now < self._next_grow or self._failures or self._requests.stops or self._outcome.growing:
            return
        self._next_grow = now + _GROW_S
        if _progressed(self._job.beats()) and self._can_grow():
            self._outcome.growing = True
            self._journal.say("elastic  ranks came back: saving, then starting with more")
            self._job.order(Order.STOP)

    def _conclude(self, beats: Mapping[int, Beat]) -> None:
        outcome = self._outcome
        self._note_steps(beats)
        self._note_recovery(beats)  # the ranks may have ended between two looks
        if self._failures:
            outcome.growing = False
            outcome.ended = self._cause(progressed=_progressed(beats))
            return
        outcome.finished = all(beat.phase is Phase.FINISHED for beat in beats.values())
        if not outcome.finished and not self._requests.stops and not outcome.growing:
            text = f"a rank received SIGTERM from outside; step {outcome.to_step} is saved"
            outcome.ended = Ended(text, outcome.to_step, progressed=_progressed(beats), planned=True)
            outcome.lost_at = time.monotonic()

    def _note_steps(self, beats: Mapping[int, Beat]) -> None:
        self._outcome.to_step = max([self._outcome.to_step, *(beat.step for beat in beats.values())])
        resumed = [beat.from_step for beat in beats.values() if beat.from_step >= 0]
        if resumed:
            self._outcome.from_step = min(resumed)

    def _note_recovery(self, beats: Mapping[int, Beat]) -> None:
        if self._lost_at is not None and self._outcome.recovered_s is None and _progressed(beats):
            self._outcome.recovered_s = time.monotonic() - self._lost_at
            self._journal.say(
                f"resumed  step {self._outcome.to_step} is done, {self._outcome.recovered_s:.1f} s after the loss"
            )

    def _cause(self, *, progressed: bool) -> Ended:
        """The first thing that went wrong; the other failures are its consequences."""
        killed = sorted((exit for exit in self._failures if _is_cause(exit)), key=lambda exit: exit.rank)
        reported = first_failure(self._attempt.run_dir)
        size, step = self._attempt.world_size, self._outcome.to_step
        if killed or reported is None:
            first = (killed or self._failures)[0]
            text = first.note or describe_exit(first.rank, size, first.code)
            with_it = (
                len({exit.rank for exit in killed if self._job.node_of(exit.rank) == self._job.node_of(first.rank)}) - 1
            )
            text += f", with {with_it} more of its node" if with_it > 0 and not first.note else ""
            return Ended(f"{text} ({self._job.node_of(first.rank)})", step, progressed=progressed)
        return Ended(
            describe_failure(reported, size),
            step,
            progressed=progressed,
            error=f"{reported.kind}: {reported.message}",
            users_mistake=reported.users_mistake,
            in_step=reported.in_step,
            from_world=reported.from_world,
        )


def saved_step(run_dir: Path, known: int | None = None) -> int | None:
    """The step of the newest finished checkpoint; ``known`` where the disk does not answer."""
    try:
        return newest_checkpoint(run_dir)
    except OSError:
        return known


def record_of(attempt: Attempt, outcome: Outcome) -> dict[str, object]:
    """The attempt as one line of ``attempts.jsonl``."""
    if outcome.finished:
        end = "finished"
    else:  # what happened, without a traceback
        end = (outcome.ended.error or outcome.ended.text) if outcome.ended else "stopped"
    return {
        "attempt": attempt.number,
        "time": round(time.time(), 3),
        "world_size": attempt.world_size,
        "settings": values_set(attempt.config),
        "from_step": outcome.from_step,
        "to_step": outcome.to_step,
        "end": end,
        "recovered_s": outcome.recovered_s and round(outcome.recovered_s, 3),
    }


def _is_cause(exit: RankExit) -> bool:
    """A rank ended by a signal, or lost with its node, is the cause, even where a peer's own error was seen first.

    An abort is not: gloo and NCCL abort a process whose peer is gone.
    """
    return exit.code is None or (exit.code < 0 and exit.code != -signal.SIGABRT)


def _progressed(beats: Mapping[int, Beat]) -> bool:
    """Whether a step was finished in this attempt."""
    return any(beat.step_s > 0 or beat.phase in (Phase.STOPPED, Phase.FINISHED) for beat in beats.values())
