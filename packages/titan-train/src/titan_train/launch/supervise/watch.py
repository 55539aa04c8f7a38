"""Detects hangs and slow ranks from heartbeats. Pure: readings in, findings out."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from titan_train.config import LaunchConfig
from titan_train.launch.rank.heartbeat import Beat, Phase


@dataclass(frozen=True, slots=True)
class Hang:
    """No rank finishes steps."""

    age_s: float
    """Since the stuck step began."""
    limit_s: float
    step: int
    """Steps finished."""


def find_hang(beats: Mapping[int, Beat], launch: LaunchConfig) -> Hang | None:
    """Whether a step takes too long.

    The limit is ``hang_factor`` times the median step, at least ``hang_least_s``. While a rank saves, validates or compiles
    a new shape, and before the first step (which may compile), there is no median to compare with: the limit is three times
    ``timeout_s``, so that a collective's own time-out, which knows more, comes first.
    """
    running = [beat for beat in beats.values() if beat.phase not in (Phase.STOPPED, Phase.FINISHED)]
    if launch.hang_factor == 0 or not running:
        return None
    known = [beat.step_s for beat in running if beat.step_s > 0]
    stepping = known and all(beat.phase is Phase.TRAIN for beat in running)
    limit_s = (
        max(launch.hang_least_s, launch.hang_factor * statistics.median(known)) if stepping else 3 * launch.timeout_s
    )
    oldest = max(running, key=lambda beat: beat.age_s)
    return Hang(oldest.age_s, limit_s, oldest.step) if oldest.age_s > limit_s else None


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that makes the others wait."""

    rank: int
    own_s: float
    """Seconds of a step without waiting for others."""
    median_s: float
    """The same, median of all ranks."""

    @property
    def factor(self) -> float:
        """How many times slower than the median it is."""
        return self.own_s / self.median_s


def find_stragglers(beats: Mapping[int, Beat], factor: float) -> list[Straggler]:
    """The ranks whose own time for a step is at least ``factor`` times the median's.

    Ranks end a step together, however slow one of them is, so their step times are alike. What differs is how long
    each was alone before it met the others. The rank that was alone longest waited for nobody; each other rank's own
    time is shorter than the step by as much as it came earlier.
    """
    running = {rank: beat for rank, beat in beats.items() if beat.phase is Phase.TRAIN and beat.step_s > 0}
    if factor == 0 or len(running) < 2:
        return []
    # the slowest rank's step holds no waiting; medians over different windows of steps differ a little
    slowest = max(running.values(), key=lambda beat: beat.alone_s)
    own = {rank: max(1e-9, slowest.step_s - (slowest.alone_s - beat.alone_s)) for rank, beat in running.items()}
    middle = statistics.median_low(list(own.values()))
    return [Straggler(rank, own_s, middle) for rank, own_s in own.items() if own_s >= factor * middle]
