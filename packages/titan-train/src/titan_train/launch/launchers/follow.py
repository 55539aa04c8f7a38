"""Several machines under launcher `torchrun`: machine 0 supervises, the others follow.

The machines share the run's folder anyway, for its checkpoints. Machine 0 writes there, in ``torchrun.json``, which
attempt runs, its number of ranks and the orders given; each other machine reads it a few times a second and starts or
ends its own torchrun accordingly. So all machines agree on the attempt without a further service, and a machine that
comes back joins the attempt that runs.
"""

import json
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan_train.config import Config
from titan_train.files import write_atomic
from titan_train.launch.job import Attempt, RunningJob
from titan_train.launch.rank.heartbeat import Phase
from titan_train.launch.rank.orders import Order

FILE_NAME = "torchrun.json"
_POLL_S = 0.2
_TOUCH_S = 5.0
_LEADER_GONE_S = 120.0  # network file systems show a change up to a minute late


@dataclass(frozen=True, slots=True)
class Announcement:
    """What machine 0 says."""

    run: str
    """One start of the command on machine 0; attempts of different starts are different."""
    attempt: int
    orders: str = ""
    """First letters of the orders of this attempt, in order."""
    exit_code: int | None = None
    """Set when all is over."""


class Leader:
    """Machine 0's side."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE_NAME
        self._told = Announcement(uuid.uuid4().hex, -1)
        self._touched = 0.0

    def attempt(self, number: int) -> None:
        """Tell that an attempt starts."""
        self._write(Announcement(self._told.run, number))

    def order(self, order: Order) -> None:
        """Tell an order of this attempt."""
        self._write(replace(self._told, orders=self._told.orders + order.value.decode()))

    def finish(self, exit_code: int) -> None:
        """Tell that all is over."""
        self._write(replace(self._told, exit_code=exit_code))

    def touch(self) -> None:
        """Show that this machine lives; cheap to call often."""
        if time.monotonic() - self._touched > _TOUCH_S:
            self._write(self._told)

    def _write(self, told: Announcement) -> None:
        self._told = told
        self._touched = time.monotonic()
        write_atomic(self._file, json.dumps(asdict(told) | {"time": time.time()}))


def follow(config: Config, run_dir: Path, world_size: int, start: Callable[[Attempt], RunningJob]) -> int:
    """Do what machine 0 says until it says that all is over.

    Args:
        config: The run's configuration; ``launch.node_rank`` is this machine.
        run_dir: The run's folder, the same on all machines.
        world_size: Ranks on all machines.
        start: Starts this machine's ranks of an attempt.

    Returns:
        The run's exit code; 1 if machine 0 fell silent.
    """
    # A batch system's warning comes to every machine: the ranks act on it, this process stays to see them end.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    left = _read(run_dir)  # what an earlier start left behind says nothing about this one
    finished_before = left.run if left is not None and left.exit_code is not None else None
    job: RunningJob | None = None
    current: Announcement | None = None
    heard, text = time.monotonic(), ""
    try:
        while True:
            new_text, told = _text(run_dir), _read(run_dir)
            if new_text != text:
                heard, text = time.monotonic(), new_text
            if time.monotonic() - heard > _LEADER_GONE_S:
                return 1
            if told is not None and told.run != finished_before:
                if told.exit_code is not None:
                    _let_end(job)
                    return told.exit_code
                if current is None or (told.run, told.attempt) != (current.run, current.attempt):
                    if job is not None:
                        job.end()
                    job = start(Attempt(told.attempt, config, run_dir, world_size))
                    current = replace(told, orders="")
                for letter in told.orders[len(current.orders) :]:
                    assert job is not None
                    job.order(Order(letter.encode()))
                current = told
            if job is not None:
                job.exits(0.0)
            time.sleep(_POLL_S)
    finally:
        if job is not None:
            job.end()


def _let_end(job: RunningJob | None) -> None:
    """Ranks of this machine may still be leaving after the last barrier."""
    deadline = time.monotonic() + 10
    while job is not None and time.monotonic() < deadline and not job.exits(_POLL_S):
        if all(beat.phase >= Phase.STOPPED for beat in job.beats().values()):
            time.sleep(_POLL_S)


def _text(run_dir: Path) -> str:
    try:
        return (run_dir / FILE_NAME).read_text(encoding="utf-8")
    except OSError:  # not there yet, or replaced this instant on a network file system
        return ""


def _read(run_dir: Path) -> Announcement | None:
    try:
        values = json.loads(_text(run_dir))
    except ValueError:
        return None
    return Announcement(values["run"], values["attempt"], values["orders"], values["exit_code"])
