"""Several machines under launcher `torchrun`: machine 0 supervises, the others follow.

The machines share the run's folder anyway, for its checkpoints. Machine 0 writes there, in ``torchrun.json``, which
attempt runs, on which machines, and the orders given; each other machine reads it a few times a second and starts or
ends its own torchrun accordingly. So all machines agree on the attempt without a further service.

An elastic run meets before each attempt: machine 0 calls, every machine that is there ends what it runs and answers in a
file of its own (``torchrun-N.json``), and those that answered take part. The others keep answering while an attempt runs,
which is how machine 0 sees one come back.
"""

import contextlib
import json
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_train.config import Config
from titan_train.files import parse_json, write_atomic
from titan_train.launch.job import Attempt, RunningJob
from titan_train.launch.rank.heartbeat import Phase
from titan_train.launch.rank.orders import Order
from titan_train.launch.supervise.elastic import fit_layout

FILE_NAME = "torchrun.json"
_POLL_S = 0.2
_TOUCH_S = 5.0
_FRESH_S = 15.0  # an answer is renewed every 5 s
_LEADER_GONE_S = 120.0  # network file systems show a change up to a minute late


@dataclass(frozen=True, slots=True)
class Announcement:
    """What machine 0 says."""

    run: str
    """One start of the command on machine 0; attempts of different starts are different."""
    attempt: int
    """-1 while machines are called."""
    call: int = 0
    """Counts the calls; a machine answers with the newest."""
    machines: tuple[int, ...] = ()
    """Who takes part in the attempt, in the order of their ranks."""
    orders: str = ""
    """First letters of the orders of this attempt, in order."""
    exit_code: int | None = None
    """Set when all is over."""


class Leader:
    """Machine 0's side."""

    def __init__(self, run_dir: Path, machines: int) -> None:
        """Prepare.

        Args:
            run_dir: The run's folder.
            machines: How many there are if all are there, this one included.
        """
        self._file = run_dir / FILE_NAME
        self._all = machines
        self._told = Announcement(uuid.uuid4().hex, -1)
        self._touched = 0.0
        self._heard: dict[int, tuple[str, float]] = {}  # machine -> its last answer, when that changed

    def call(self, wait_s: float) -> tuple[int, ...]:
        """Ask which machines are there; waits for all of them, or ``wait_s`` seconds. This one is always there."""
        self._write(replace(self._told, attempt=-1, call=self._told.call + 1, machines=(), orders=""))
        deadline = time.monotonic() + wait_s
        while len(there := self._answered()) < self._all and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return there

    def present(self) -> tuple[int, ...]:
        """Machines that gave a sign of life in the last seconds, without asking."""
        now = time.monotonic()
        there = [0]
        for machine in range(1, self._all):
            text = _text(answer_file(self._file.parent, machine))
            before, since = self._heard.get(machine, ("", 0.0))
            if text and text != before:
                self._heard[machine] = (text, now)
                if before:  # what lay there at the first look may be old
                    there.append(machine)
            elif text and now - since < _FRESH_S and since:
                there.append(machine)
        return tuple(there)

    def attempt(self, number: int, machines: tuple[int, ...]) -> None:
        """Tell that an attempt starts, and on which machines."""
        self._write(Announcement(self._told.run, number, self._told.call, machines))

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

    def _answered(self) -> tuple[int, ...]:
        there = [0]
        for machine in range(1, self._all):
            answer = _json(answer_file(self._file.parent, machine))
            if (answer.get("run"), answer.get("call")) == (self._told.run, self._told.call):
                there.append(machine)
        return tuple(there)

    def _write(self, told: Announcement) -> None:
        self._told = told
        self._touched = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk: what is told is kept here, and written again by `touch`
            write_atomic(self._file, json.dumps(asdict(told) | {"time": time.time()}))


def follow(config: Config, run_dir: Path, per_node: int, start: Callable[[Attempt, int], RunningJob]) -> int:
    """Do what machine 0 says until it says that all is over.

    Args:
        config: The run's configuration; ``launch.node_rank`` is this machine.
        run_dir: The run's folder, the same on all machines.
        per_node: Ranks on each machine.
        start: Starts this machine's ranks of an attempt, at its place among the machines that take part.

    Returns:
        The run's exit code; 1 if machine 0 fell silent.
    """
    # A batch system's warning comes to every machine: the ranks act on it, this process stays to see them end.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    left = _read(run_dir)  # what an earlier start left behind says nothing about this one
    finished_before = left.run if left is not None and left.exit_code is not None else None
    here = _Follower(config, run_dir, per_node, start)
    heard, text = time.monotonic(), ""
    try:
        while True:
            new_text, told = _text(run_dir / FILE_NAME), _read(run_dir)
            if new_text != text:
                heard, text = time.monotonic(), new_text
            if time.monotonic() - heard > _LEADER_GONE_S:
                return 1
            if told is not None and told.run != finished_before:
                if told.exit_code is not None:
                    _let_end(here.job)
                    return told.exit_code
                here.obey(told)
            if here.job is not None:
                here.job.exits(0.0)
            time.sleep(_POLL_S)
    finally:
        here.end()


class _Follower:
    """A machine that does what machine 0 announces."""

    def __init__(
        self, config: Config, run_dir: Path, per_node: int, start: Callable[[Attempt, int], RunningJob]
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._per_node = per_node
        self._start = start
        self._current: Announcement | None = None
        self._answered = 0.0
        self.job: RunningJob | None = None

    def obey(self, told: Announcement) -> None:
        """End or start ranks, answer a call, pass orders on."""
        current = self._current
        if current is None or (told.run, told.call, told.attempt) != (current.run, current.call, current.attempt):
            self.end()
            self._answered = 0.0
            me = self._config.launch.node_rank
            if me in told.machines:
                self.job = self._start(self._attempt(told), told.machines.index(me))
            current = replace(told, orders="")
        for letter in told.orders[len(current.orders) :]:
            if self.job is not None:
                self.job.order(Order(letter.encode()))
        self._current = told
        if self._config.launch.elastic and time.monotonic() - self._answered > _TOUCH_S:
            self._answered = time.monotonic()
            answer = {"run": told.run, "call": told.call, "time": time.time()}
            with contextlib.suppress(OSError):  # a full disk: the next answer may fit
                write_atomic(answer_file(self._run_dir, self._config.launch.node_rank), json.dumps(answer))

    def end(self) -> None:
        """End this machine's ranks."""
        if self.job is not None:
            self.job.end()
            self.job = None

    def _attempt(self, told: Announcement) -> Attempt:
        """The attempt, with the degrees that machine 0 came to for so many ranks."""
        full, size = self._per_node * self._config.launch.nnodes, self._per_node * len(told.machines)
        config, size = fit_layout(self._config, size, full=full, unit=self._per_node)
        return Attempt(told.attempt, config, self._run_dir, size)


def _let_end(job: RunningJob | None) -> None:
    """Ranks of this machine may still be leaving after the last barrier."""
    deadline = time.monotonic() + 10
    while job is not None and time.monotonic() < deadline and not job.exits(_POLL_S):
        if all(beat.phase >= Phase.STOPPED for beat in job.beats().values()):
            time.sleep(_POLL_S)


def answer_file(run_dir: Path, machine: int) -> Path:
    """Where a machine answers a call."""
    return run_dir / f"torchrun-{machine}.json"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):  # not there yet, or replaced this instant on a network file system
        return ""


def _json(file: Path) -> dict[str, Any]:
    """The values in a file; none if it is missing, torn or something else."""
    try:
        values = parse_json(_text(file))
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _read(run_dir: Path) -> Announcement | None:
    values = _json(run_dir / FILE_NAME)
    try:
        return Announcement(
            str(values["run"]),
            int(values["attempt"]),
            int(values["call"]),
            tuple(int(machine) for machine in values["machines"]),
            str(values["orders"]),
            None if values["exit_code"] is None else int(values["exit_code"]),
        )
    except (KeyError, TypeError, ValueError):  # damaged: the next one replaces it
        return None
