"""Whether a failed attempt is followed by another. Pure: a history in, a decision out."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from titan_train.config import LaunchConfig

_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended without finishing the run."""

    text: str
    """What happened, in words: which rank, where, why."""
    step: int
    """Steps finished by the run when it ended."""
    progressed: bool
    """Whether this attempt finished a step."""
    error: str = ""
    """The exception's class and message, if a rank raised one by itself."""
    users_mistake: bool = False
    """The exception says what the user should change."""
    in_step: bool = False
    """The exception was raised after a step had begun."""
    from_world: bool = False
    """The exception came from the disk or the network."""
    planned: bool = False
    """A rank was asked from outside to stop and everything was saved: nothing broke."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows."""

    again: bool
    reason: str
    """Why not, or which restart it is."""
    wait_s: float = 0.0
    """Seconds to wait before the next attempt."""


class RestartBudget:
    """Counts the restarts of one run."""

    def __init__(
        self, launch: LaunchConfig, clock: Callable[[], float] = time.monotonic, *, has_trained: bool = False
    ) -> None:
        """No attempt has ended yet; ``has_trained``: the run has made steps with this very configuration."""
        self._most = launch.max_restarts
        self._window_s = launch.restart_window_s
        self._clock = clock
        self._times: list[float] = []
        self._last: Ended | None = None
        self._fruitless = 0
        self._has_trained = has_trained

    def decide(self, ended: Ended) -> Decision:
        """Take note of how an attempt ended and say what follows.

        A program that is wrong fails again in the same way: a mistake of the user's or an exception before the first step
        of all, and the same exception at the same step twice, end the run at once. A rank that was killed or hangs does
        not, and a preempted one does not count. Once a step was made, the configuration is known to work: what fails
        then before a step may be a file that is being replaced, or a network that comes back. Restarts are counted within a
        window, but attempts in a row without a step however long they last.
        """
        self._has_trained = self._has_trained or ended.progressed
        last, self._last = self._last, ended
        self._fruitless = 0 if ended.progressed else self._fruitless + 1
        if self._most == 0:
            return Decision(False, "launch.max_restarts is 0")
        if ended.users_mistake and not self._has_trained:
            return Decision(False, "the same configuration would fail again")
        if ended.error and not self._has_trained:
            return Decision(False, "it failed before its first step and would fail again")
        passing = ended.from_world and not ended.in_step
        if ended.error and not passing and last is not None and (last.error, last.step) == (ended.error, ended.step):
            return Decision(False, f"the same error at the same step, {ended.step}, twice in a row")
        if ended.planned and ended.progressed:
            return Decision(True, "a requested stop is not a failure")
        now = self._clock()
        self._times = [t for t in self._times if now - t < self._window_s]
        if len(self._times) >= self._most:
            return Decision(False, f"launch.max_restarts={self._most} restarts within {self._window_s:g} s are used up")
        if self._fruitless > self._most:
            return Decision(
                False, f"{self._fruitless} attempts in a row made no step (launch.max_restarts={self._most})"
            )
        self._times.append(now)
        wait_s = min(_LONGEST_WAIT_S, 2.0 ** (self._fruitless - 1)) if self._fruitless else 0.0
        return Decision(True, f"restart {len(self._times)} of {self._most}", wait_s)
