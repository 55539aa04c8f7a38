"""Launcher `machines`: the same command on several machines, one node agent in each; they agree through the run's folder.

The machines share the run's folder anyway, for its checkpoints, so no further service is needed. Machine 0 supervises. It
writes to ``machines.json`` which attempt runs, on which machines, and the orders given. Each other machine follows: it reads
that file a few times a second, starts or ends its ranks accordingly, and reports in a file of its own
(``machine-N.json``) how they ended. Ranks meet at ``launch.endpoint``, at a new store for each attempt. One command at a time
is machine N: it holds a lease of its own.

Machine 0 judges progress by its own ranks, since all ranks make a step together. When its ranks have ended with success so
have all others, which met them at a last barrier. A machine that is lost with its power shows as its peers' broken
connections or as a hang.

An elastic run meets before each attempt: machine 0 calls, every machine that is there ends what it runs and answers, and those
that answered take part. The others keep answering while an attempt runs, which is how machine 0 sees one come back.
"""

import contextlib
import errno
import json
import math
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_train.config import Config, LaunchConfig
from titan_train.files import parse_json, write_atomic
from titan_train.launch.job import Attempt, Launcher, RankExit
from titan_train.launch.node.agent import KILL_S, NodeAgent, NodeJob, NodeRanks
from titan_train.launch.rank.info import DeviceType
from titan_train.launch.rank.orders import Order
from titan_train.launch.supervise.elastic import fit_layout
from titan_train.run_folder import LEASE, Lease, is_held

FILE_NAME = "machines.json"
_POLL_S = 0.2
_TOUCH_S = 5.0
_FRESH_S = 15.0  # an answer is renewed every 5 s, a lease every 10 s
_LEADER_GONE_S = 900.0  # without a touch of its lease either: a file system that fails is waited for ten minutes
_FIRST_CALL_S = 120.0  # machines of a job start at different times
_CALL_S = 15.0  # they are there already; one that neither answers nor touches its lease takes no part
_LONG_CALL_S = KILL_S + _CALL_S
_BACKLOG = 1024
_LEAVE_S = 10.0  # for ranks that have passed the last barrier


@dataclass(frozen=True, slots=True)
class Announcement:
    """What machine 0 writes."""

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
    time: float = 0.0
    """When it was written, in seconds since the epoch."""


class Leader:
    """Machine 0's side of the run's folder."""

    def __init__(self, run_dir: Path, machines: int) -> None:
        """Write nothing yet.

        Args:
            run_dir: The run's folder.
            machines: How many there are if all are there, this one included.
        """
        self._file = run_dir / FILE_NAME
        self._all = machines
        self._announced = Announcement(uuid.uuid4().hex, -1)
        self._touched = 0.0
        self._spoken = False
        self._answers = _Changes()

    def call(self, wait_s: float) -> tuple[int, ...]:
        """Ask which machines are there; this one always is.

        Waits for all of them, or ``wait_s`` seconds, and longer for those whose commands live: their ranks may be ending.
        """
        self._write(replace(self._announced, attempt=-1, call=self._announced.call + 1, machines=(), orders=""))
        wanted = (self._announced.run, self._announced.call)
        began, leases = time.monotonic(), _Changes()
        while True:
            answers = {machine: _values(self._answer(machine)) for machine in range(1, self._all)}
            there = (0, *(m for m, answer in answers.items() if (answer.get("run"), answer.get("call")) == wanted))
            living = [leases.fresh(self._lease(machine)) for machine in answers if machine not in there]
            if not living or time.monotonic() - began >= (max(wait_s, _LONG_CALL_S) if any(living) else wait_s):
                return there
            self.touch()
            time.sleep(_POLL_S)

    def present(self) -> tuple[int, ...]:
        """Machines that gave a sign of life in the last seconds, without asking."""
        return (0, *(m for m in range(1, self._all) if self._answers.fresh(self._answer(m))))

    def attempt(self, number: int, machines: tuple[int, ...]) -> None:
        """Announce that an attempt starts, and on which machines."""
        self._write(Announcement(self._announced.run, number, self._announced.call, machines))

    def exits(self, machine: int) -> list[RankExit]:
        """The ranks of another machine that have ended in this attempt, as far as it has reported them."""
        answer = _values(self._answer(machine))
        if (answer.get("run"), answer.get("attempt")) != (self._announced.run, self._announced.attempt):
            return []
        with contextlib.suppress(TypeError, ValueError, KeyError):
            return [RankExit(int(e["rank"]), e["code"] and int(e["code"]), str(e["note"])) for e in answer["exits"]]
        return []

    def order(self, order: Order) -> None:
        """Announce an order of this attempt."""
        self._write(replace(self._announced, orders=self._announced.orders + order.value.decode()))

    def finish(self, exit_code: int) -> None:
        """Announce that all is over."""
        self._write(replace(self._announced, exit_code=exit_code))

    def touch(self) -> None:
        """Show that this machine lives; cheap to call often."""
        if time.monotonic() - self._touched > _TOUCH_S:
            self._write(self._announced)

    def _answer(self, machine: int) -> Path:
        return answer_file(self._file.parent, machine)

    def _lease(self, machine: int) -> Path:
        return self._file.with_name(f"machine-{machine}.{LEASE}")

    def _write(self, announced: Announcement) -> None:
        if self._is_anothers(ending=announced.exit_code is not None):
            return
        self._announced = announced
        self._touched = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk: it is kept here, and written again by `touch`
            write_atomic(self._file, json.dumps(asdict(replace(announced, time=time.time()))))
            self._spoken = True

    def _is_anothers(self, *, ending: bool) -> bool:
        """Whether another start has taken the folder over, or lives there still and this one was refused."""
        there = _announcement(self._file.parent)
        if there is not None and there.run == self._announced.run:
            return False
        if ending and not self._spoken:
            return is_held(self._file.parent)  # which may have nothing to announce yet
        return self._spoken and there is not None


class _Changes:
    """Which files changed in the last seconds. What lies there at the first look may be old."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[str, float]] = {}

    def fresh(self, file: Path) -> bool:
        now, mark = time.monotonic(), _mark(file)
        before, since = self._seen.get(file, (mark, -math.inf))
        self._seen[file] = (mark, since if mark == before else now)
        return bool(mark) and now - self._seen[file][1] < _FRESH_S


class MachinesLauncher(Launcher):
    """Machine 0: starts its own ranks and has the other machines start theirs."""

    def __init__(self, launch: LaunchConfig, per_node: int, device: DeviceType, run_dir: Path) -> None:
        """Start this machine's agent.

        Args:
            launch: Machines and where they meet.
            per_node: Ranks on each machine.
            device: What each rank computes on.
            run_dir: The run's folder, where the machines agree.
        """
        self.device: DeviceType = device
        self._launch = launch
        self._per_node = per_node
        self._agent = NodeAgent.sharing_cores(per_node, device)
        self._leader = Leader(run_dir, launch.nnodes)
        self._machines = tuple(range(launch.nnodes))
        self._job: MachinesJob | None = None

    def capacity(self) -> int:
        """Ranks of the machines that are there: between attempts they are called, during one they show it themselves."""
        if not self._launch.elastic:
            return self._per_node * self._launch.nnodes
        if self._job is not None and self._job.running:
            return self._per_node * len({*self._machines, *self._leader.present()})
        self._machines = self._leader.call(_FIRST_CALL_S if self._job is None else _CALL_S)
        return self._per_node * len(self._machines)

    def validate(self, config: Config, world_size: int) -> None:
        """See `titan_train.launch.job.Launcher`."""
        self._agent.validate(config, world_size)

    def start(self, attempt: Attempt) -> "MachinesJob":
        """Start all ranks of an attempt.

        Raises:
            ValueError: The address at which the ranks would meet cannot be used here.
        """
        machines = self._machines[: attempt.world_size // self._per_node]
        listener = listen_at(self._launch.endpoint)
        self._leader.attempt(attempt.number, machines)
        job = NodeJob.of(attempt, 0, self._per_node, self.device, store=self._launch.endpoint)
        self._job = MachinesJob(self._agent, job, listener, self._leader, machines)
        return self._job

    def close(self, exit_code: int = 1) -> None:
        """Tell the other machines that all is over."""
        self._leader.finish(exit_code)


class MachinesJob(NodeRanks):
    """The ranks of one attempt, as machine 0 sees them: its own, and those that other machines report as ended."""

    def __init__(
        self, agent: NodeAgent, job: NodeJob, listener: socket.socket, leader: Leader, machines: tuple[int, ...]
    ) -> None:
        super().__init__(agent, job, listener=listener)
        self._leader = leader
        self._machines = machines
        self._per_node = job.per_node
        self._left = set(range(job.world_size))
        self._failed = False
        self._next_read = 0.0

    def exits(self, timeout_s: float) -> list[RankExit]:
        """See `titan_train.launch.job.RunningJob`."""
        self._leader.touch()
        if not self.running:
            time.sleep(min(timeout_s, _POLL_S))
        found = super().exits(timeout_s)
        self._failed = self._failed or any(exit.code != 0 for exit in found)
        if not self.running and not self._failed:
            found += [RankExit(rank, 0) for rank in self._left]
        elif time.monotonic() >= self._next_read:
            self._next_read = time.monotonic() + _POLL_S
            found += [exit for machine in self._machines[1:] for exit in self._leader.exits(machine)]
        fresh = {exit.rank: exit for exit in reversed(found) if exit.rank in self._left}
        self._left -= fresh.keys()
        return list(fresh.values())

    def order(self, order: Order) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        super().order(order)
        self._leader.order(order)

    def node_of(self, rank: int) -> str:
        """On which machine."""
        machine = self._machines[rank // self._per_node]
        return f"machine {machine}" if machine else "this machine"


def follow(
    config: Config,
    run_dir: Path,
    per_node: int,
    device: DeviceType,
    start: Callable[[NodeJob], NodeRanks],
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Do what machine 0 announces until it says that all is over.

    Args:
        config: The run's configuration; ``launch.node_rank`` is this machine.
        run_dir: The run's folder, the same on all machines.
        per_node: Ranks on each machine.
        device: What each rank computes on.
        start: Starts this machine's ranks.
        prepare: Makes what they need; called once, before any start.

    Returns:
        The run's exit code; 1 if machine 0 fell silent, 130 if this machine was asked to end while no rank ran, or by a second
        Ctrl-C.

    Raises:
        ValueError: Another command is this machine already; the message names its process.
        LeaseLostError: Another command has taken this machine's place.
        RuntimeError: A rank of this machine cannot be killed or ranks cannot be started, and an elastic run goes on without it.
    """
    left = _announcement(run_dir)  # what an earlier start left behind says nothing about this one
    finished_before = left.run if left is not None and left.exit_code is not None else None
    with Lease(run_dir, machine=config.launch.node_rank) as lease:
        prepare()  # may take long: machine 0 can begin and end meanwhile
        here = _Follower(config, run_dir, per_node, device, start)
        try:
            return _obey_to_the_end(here, run_dir, finished_before, lease)
        finally:
            here.end()


def _obey_to_the_end(here: "_Follower", run_dir: Path, finished_before: str | None, lease: Lease) -> int:
    heard, text, leave_at = time.monotonic(), "", math.inf

    def stop(number: int, _frame: object) -> None:
        nonlocal leave_at
        here.interrupts += number == signal.SIGINT
        if not here.running:
            leave_at = time.monotonic() + _LEAVE_S  # machine 0 may have heard it too, and say how the run ends

    # A batch system's warning comes to every machine: the ranks act on it, this process stays to see them end.
    for number, handler in {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGUSR1: signal.SIG_IGN}.items():
        signal.signal(number, handler)
    while time.monotonic() - heard <= _LEADER_GONE_S:
        lease.check()
        # machine 0 touches its lease also while it waits for room on a full disk
        new_text, announced = _mark(run_dir / FILE_NAME) + _mark(run_dir / LEASE), _announcement(run_dir)
        if new_text != text:
            heard, text = time.monotonic(), new_text
        if announced is not None and announced.run != finished_before:
            if announced.exit_code is not None:
                here.let_end()
                return announced.exit_code
            here.obey(announced)
        here.report()
        if here.running and here.interrupts > 1:
            return 130
        if here.running:
            leave_at = math.inf
        elif time.monotonic() > leave_at:
            return 130
        time.sleep(_POLL_S)
    print(
        f"error: machine 0 wrote nothing to {run_dir / FILE_NAME} for {_LEADER_GONE_S:g} s: it has not started, is gone, or "
        "its disk is full. Start the command there, then here again.",
        file=sys.stderr,
    )
    return 1


class _Follower:
    """A machine that does what machine 0 announces."""

    def __init__(
        self, config: Config, run_dir: Path, per_node: int, device: DeviceType, start: Callable[[NodeJob], NodeRanks]
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._per_node = per_node
        self._device: DeviceType = device
        self._start = start
        self._current: Announcement | None = None
        self._ranks: NodeRanks | None = None
        self._exits: list[RankExit] = []
        self._reported = 0
        """How many of them machine 0 can know of."""
        self._next_report = 0.0
        self._failed_starts: list[str] = []
        """Why those failed that were the last in a row."""
        self.interrupts = 0
        """How often Ctrl-C was pressed in this attempt."""

    @property
    def running(self) -> bool:
        """Whether any rank of this machine has not ended yet."""
        return self._ranks is not None and self._ranks.running

    def obey(self, announced: Announcement) -> None:
        """End or start ranks, pass orders on. Ranks that cannot be started are reported as lost: the next attempt may work.

        Raises:
            RuntimeError: A rank cannot be killed, or two starts in a row have failed, and the next attempt need not have this
                machine: it is left out if it does not answer.
        """
        current, machine = self._current, self._config.launch.node_rank
        if current is None or (announced.run, announced.call, announced.attempt) != (
            current.run, current.call, current.attempt,
        ):  # fmt: skip
            self._exits, self._reported, self._next_report, self.interrupts = [], 0, 0.0, 0
            try:
                self.end()
                if machine in announced.machines:
                    self._ranks, self._failed_starts = self._start(self._job(announced)), []
                elif len(self._failed_starts) > 1:
                    raise RuntimeError(
                        f"{self._failed_starts[-1]}, twice in a row: the run goes on without it. Start the command here again "
                        "when the cause is gone."
                    )
            except (OSError, RuntimeError) as err:
                if machine not in announced.machines:
                    raise
                note, first = f"machine {machine} could not start its ranks: {err}", announced.machines.index(machine)
                self._failed_starts.append(note)
                self._exits = [RankExit(first * self._per_node + i, None, note) for i in range(self._per_node)]
            current = replace(announced, orders="")
        for letter in announced.orders[len(current.orders) :]:
            if self._ranks is not None:
                self._ranks.order(Order(letter.encode()))
        self._current = announced

    def report(self) -> None:
        """Write how ranks have ended; in an elastic run also, now and then, that this machine is there."""
        self._exits += self._ranks.exits(0.0) if self._ranks is not None else []
        due = self._config.launch.elastic and time.monotonic() >= self._next_report
        if self._current is not None and (len(self._exits) > self._reported or due):
            self._next_report = time.monotonic() + _TOUCH_S
            known = {"run": self._current.run, "call": self._current.call, "attempt": self._current.attempt}
            answer = known | {"exits": [asdict(exit) for exit in self._exits], "time": time.time()}
            with contextlib.suppress(OSError):  # a full disk: the next report may fit
                write_atomic(answer_file(self._run_dir, self._config.launch.node_rank), json.dumps(answer))
                self._reported = len(self._exits)

    def let_end(self) -> None:
        """Ranks of this machine may still be leaving after the last barrier."""
        deadline = time.monotonic() + _LEAVE_S
        while self._ranks is not None and self.running and time.monotonic() < deadline:
            self._ranks.exits(_POLL_S)

    def end(self) -> None:
        """End this machine's ranks."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.end()

    def _job(self, announced: Announcement) -> NodeJob:
        """The part of this machine, with the degrees that machine 0 came to for so many ranks."""
        launch = self._config.launch
        full, size = self._per_node * launch.nnodes, self._per_node * len(announced.machines)
        config, size = fit_layout(self._config, size, full=full, unit=self._per_node)
        attempt = Attempt(announced.attempt, config, self._run_dir, size)
        place = announced.machines.index(launch.node_rank)
        return NodeJob.of(attempt, place, self._per_node, self._device, store=launch.endpoint)


def is_led(run_dir: Path) -> bool:
    """Whether machine 0 is at work on the run."""
    there = _announcement(run_dir)
    return there is not None and there.exit_code is None and is_held(run_dir)


def answer_file(run_dir: Path, machine: int) -> Path:
    """Where a machine answers calls and reports."""
    return run_dir / f"machine-{machine}.json"


def listen_at(endpoint: str) -> socket.socket:
    """Listen where the machines meet: on the endpoint's address, or on all where others reach this machine by another one.

    Raises:
        ValueError: The port is taken, or the host unknown.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        if str(address).startswith("127.") and host not in ("localhost", address):
            address = ""  # a machine's own name may lead to 127.0.1.1
        try:
            return socket.create_server((str(address), int(port)), family=family, backlog=_BACKLOG)
        except OSError as err:
            if err.errno != errno.EADDRNOTAVAIL:
                raise
            return socket.create_server(("", int(port)), family=family, backlog=_BACKLOG)  # a router's address
    except OSError as err:
        raise ValueError(
            f"launch.endpoint={endpoint!r} cannot be used on this machine: {err.strerror}. Stop what listens there (an "
            "earlier run?), or give all machines another host or port."
        ) from err


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):  # not there yet, or replaced this instant on a network file system
        return ""


def _mark(file: Path) -> str:
    """What changes when a file is written or touched; empty without one. A network file system asks its server on opening."""
    text = _text(file)
    try:
        return f"{file.stat().st_mtime_ns} {text}"
    except OSError:
        return ""


def _values(file: Path) -> dict[str, Any]:
    """The values in a file; none if it is missing, torn or something else."""
    try:
        values = parse_json(_text(file))
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _announcement(run_dir: Path) -> Announcement | None:
    values = _values(run_dir / FILE_NAME)
    try:
        return Announcement(
            str(values["run"]),
            int(values["attempt"]),
            int(values["call"]),
            tuple(int(machine) for machine in values["machines"]),
            str(values["orders"]),
            None if values["exit_code"] is None else int(values["exit_code"]),
            float(values["time"]),
        )
    except (KeyError, TypeError, ValueError):  # damaged: the next one replaces it
        return None
