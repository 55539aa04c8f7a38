"""What a rank is doing right now, in 72 bytes that its launcher can read at any time.

Problem: a rank that hangs cannot say so, and asking over the network needs the network that may be what hangs.

Idea: each rank maps a small file on its own machine and stores numbers in it as it goes, about a microsecond a step;
whoever started the ranks of that machine reads it. Nothing is sent, nothing listens, and the last word of a killed
rank stays readable.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_LAYOUT = struct.Struct("<qqqqqdddd")  # count, pid, phase, step, from_step, since, step_s, alone_s, count again


def heartbeat_file(board: Path, rank: int) -> Path:
    """Where a rank writes its heartbeat, in the folder that its node's agent made."""
    return board / f"rank-{rank}.beat"


class Phase(IntEnum):
    """What a rank is at. Only in TRAIN are its steps compared with the median."""

    STARTING = 0
    TRAIN = 1
    SAVE = 2
    VALIDATE = 3
    COMPILE = 4
    """Compiling a shape that is new in the middle of the run."""
    STOPPED = 5
    """Ended by request, with everything saved."""
    FINISHED = 6
    """All steps made."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading."""

    pid: int
    phase: Phase
    step: int
    """Steps finished."""
    age_s: float
    """Seconds since the phase, or the step being made, began."""
    step_s: float
    """Median seconds of its last steps; 0 before the first of this attempt."""
    alone_s: float
    """Of those, the seconds spent between steps, before the rank met the others: reading data, logging, a slow host."""
    from_step: int = -1
    """The step that it resumed from; -1 while it has not restored."""


class Heartbeat:
    """The writing side, in the rank."""

    def __init__(self, path: Path) -> None:
        """Map ``path``, made if missing."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, _LAYOUT.size)
        self._map = mmap.mmap(descriptor, _LAYOUT.size)
        os.close(descriptor)
        self._count = 0
        self.from_step = -1
        """The step that the rank resumed from, once it is known; part of every reading."""

    def write(self, phase: Phase, step: int, *, step_s: float = 0.0, alone_s: float = 0.0) -> None:
        """Store a reading, timed now. A reader sees all of it or nothing."""
        self._count += 1
        self._map[:] = _LAYOUT.pack(
            self._count, os.getpid(), phase, step, self.from_step, time.monotonic(), step_s, alone_s, float(self._count)
        )

    def last(self) -> Beat | None:
        """What was stored last; None before the first time."""
        return _beat(self._map[:])


def read_beat(path: Path) -> Beat | None:
    """The rank's last reading; None before its first, or in the instant of a write.

    On the rank's machine only: the clock is that machine's monotonic one, which no adjustment moves.
    """
    try:
        return _beat(path.read_bytes())
    except FileNotFoundError:
        return None


def _beat(raw: bytes) -> Beat | None:
    if len(raw) != _LAYOUT.size:
        return None
    count, pid, phase, step, from_step, since, step_s, alone_s, again = _LAYOUT.unpack(raw)
    if count == 0 or count != again:
        return None
    return Beat(pid, Phase(phase), step, max(0.0, time.monotonic() - since), step_s, alone_s, from_step)
