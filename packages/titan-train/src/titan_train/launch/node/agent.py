"""The agent of one machine: its ranks, forked from one server that has imported torch.

Problem: a rank that is started as a fresh interpreter imports torch first; on two cores four ranks spend 36 s on that, and
again after every restart.

Idea: Python's forkserver imports torch once (never CUDA) and each rank is a fork of it, ready in milliseconds. The
server outlives the attempts of a run, so a restart costs no import. The process that owns the agent (the command, or an
actor on a Ray node) never imports torch itself.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from titan_train.child_processes import interrupts_blocked, owned_folder, without_working_directory
from titan_train.config import Config, dump_config
from titan_train.launch.job import Attempt, RankExit, RankJob
from titan_train.launch.rank.heartbeat import Beat, Phase, heartbeat_file, read_beat
from titan_train.launch.rank.info import DeviceType, RankInfo
from titan_train.launch.rank.orders import Order, OrderSender, orders_file
from titan_train.launch.validate import validate_in_child
from titan_train.rank_device import usable_cores

_SERVER_GONE = 255  # what multiprocessing says of a child whose server cannot tell how it ended
KILL_S = 600.0
"""Seconds for ranks to end after SIGKILL: the kernel frees terabytes, or waits for a file system that fails over."""
_SILENT_S = 60.0  # of them, before the person is told


@dataclass(frozen=True, slots=True)
class NodeJob:
    """One node's part of an attempt."""

    attempt: int
    config_toml: str
    run_dir: str
    node: int
    """Its number in this attempt."""
    per_node: int
    world_size: int
    device: DeviceType
    store: str = ""
    """host:port of the store that rank 0 serves; empty for a file, if this is the only node."""
    places: tuple[int, ...] = ()
    """The number of each rank's GPU; by default they count from 0."""

    @classmethod
    def of(cls, attempt: Attempt, node: int, per_node: int, device: DeviceType, **words: Any) -> "NodeJob":
        """A node's part of ``attempt``."""
        text, run_dir = dump_config(attempt.config), str(attempt.run_dir)
        return cls(attempt.number, text, run_dir, node, per_node, attempt.world_size, device, **words)

    def rank_jobs(self, board: Path) -> list[RankJob]:
        """The jobs of this node's ranks, whose heartbeats and orders lie in ``board``."""
        first, store = self.node * self.per_node, self.store or str(board / "store")
        return [
            RankJob(
                self.config_toml, self.run_dir, str(board), self.attempt,
                RankInfo(first + i, place, self.world_size, self.per_node, self.device, store),
            )
            for i, place in enumerate(self.places or range(self.per_node))
        ]  # fmt: skip


class NodeAgent:
    """The server that has imported torch. It warms up in the background from the moment it is made."""

    stuck = ""
    """Says which ranks SIGKILL did not end, if there are any: no more are started here."""

    def __init__(self, threads_per_rank: int) -> None:
        """Start the server.

        Args:
            threads_per_rank: For OMP_NUM_THREADS, unless that is set.
        """
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["titan_train.launch.node.preload"])
        from multiprocessing import forkserver

        with without_working_directory(), interrupts_blocked():
            forkserver.ensure_running()

    @classmethod
    def sharing_cores(cls, ranks: int, device: DeviceType) -> "NodeAgent":
        """For ``ranks`` ranks that have this machine to themselves: more threads than cores make every one of them slower."""
        return cls(max(1, usable_cores() // ranks) if device == "cpu" else 1)

    def fork(self, rank_job: RankJob, listener: socket.socket | None, log: str | None) -> Any:
        """Fork one rank and return its process."""
        from titan_train.launch.rank.worker import forked_worker  # imports no torch itself

        return self._started(forked_worker, (rank_job, listener, log), f"rank-{rank_job.ranks.rank}")

    def validate(self, config: Config, world_size: int) -> None:
        """Validate a configuration in a process that has torch.

        Raises:
            ValueError: It cannot work on this many ranks.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._started(validate_in_child, (dump_config(config), world_size, sender), "validate")
        sender.close()
        with receiver, contextlib.suppress(EOFError, OSError):  # it was killed: the ranks will say why
            problem = receiver.recv()
            process.join()
            if problem:
                raise ValueError(problem)

    def _started(self, target: Any, arguments: tuple[Any, ...], name: str) -> Any:
        process = self._context.Process(target=target, args=arguments, name=name)
        try:
            with _hidden_main(), without_working_directory():
                process.start()
        except (EOFError, BrokenPipeError) as err:  # the machine may have no more processes or memory for it
            raise ConnectionError("the server that ranks are forked from ended") from err
        return process


class NodeRanks:
    """The running ranks of one node in one attempt; implements `titan_train.launch.job.RunningJob`, but for `node_of`."""

    def __init__(
        self, agent: NodeAgent, job: NodeJob, *, log_rank_0: bool = False, listener: socket.socket | None = None
    ) -> None:
        """Start them.

        Args:
            agent: Forks them.
            job: What they do.
            log_rank_0: Rank 0 prints into ``logs/`` like the others, not to this process's terminal.
            listener: The socket on which rank 0 serves the store, if there is one; closed here afterwards.

        Raises:
            OSError: One cannot be started; the others are ended.
            RuntimeError: A rank is stuck on this machine; see `end`.
        """
        self._agent = agent
        self._senders: dict[int, OrderSender] = {}
        self._processes: dict[int, Any] = {}
        self._waiting: dict[int, int] = {}
        with listener or contextlib.nullcontext():
            if agent.stuck:
                raise RuntimeError(agent.stuck)
            self._folder = owned_folder("titan-train-")
            try:
                for rank_job in job.rank_jobs(self._folder):
                    rank = rank_job.ranks.rank
                    log = str(Path(job.run_dir, "logs", f"rank-{rank}.log")) if rank or log_rank_0 else None
                    self._senders[rank] = OrderSender(orders_file(self._folder, rank))
                    self._processes[rank] = agent.fork(rank_job, listener if rank == 0 else None, log)
                    self._waiting[self._processes[rank].sentinel] = rank
            except BaseException:
                self.end()
                raise

    @property
    def running(self) -> bool:
        """Whether any of them has not ended yet."""
        return bool(self._waiting)

    def exits(self, timeout_s: float) -> list[RankExit]:
        """The ranks that ended since the last call; at once if none is left."""
        found: list[RankExit] = []
        for sentinel in (
            multiprocessing.connection.wait(list(self._waiting), timeout=timeout_s) if self._waiting else ()
        ):
            rank = self._waiting.pop(cast("int", sentinel))
            self._processes[rank].join()
            code = self._code(rank)
            if code == _SERVER_GONE:
                found.append(RankExit(rank, None, "the server that ranks are forked from was killed"))
            else:
                found.append(RankExit(rank, code))
        return found

    def beats(self) -> dict[int, Beat]:
        """The last reading of each rank that has one."""
        found = {rank: read_beat(heartbeat_file(self._folder, rank)) for rank in self._senders}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def order(self, order: Order) -> None:
        """Send an order to every rank."""
        for sender in self._senders.values():
            sender.send(order)

    def end(self) -> None:
        """Kill what still runs, reap it, remove the folder.

        Raises:
            RuntimeError: A rank does not end. Its agent starts no more.
        """
        for rank in self._waiting.values():
            self._processes[rank].kill()
        stuck = self._left_after(_SILENT_S)
        if stuck:
            said = f"waiting  for {_named(stuck)} to end after SIGKILL, {KILL_S:g} s at most"
            print(f"{said}: a file system or a device does not answer", file=sys.stderr, flush=True)
            stuck = self._left_after(KILL_S - _SILENT_S)
        self._processes, self._waiting = {}, {}
        for sender in self._senders.values():
            sender.close()
        self._senders = {}
        shutil.rmtree(self._folder, ignore_errors=True)
        if stuck:
            for process in stuck.values():  # or Python waits for it when this process ends
                multiprocessing.process._children.discard(process)  # pyright: ignore[reportAttributeAccessIssue]
            tracker: Any = multiprocessing.resource_tracker  # for which Python 3.12 waits then too: they hold its pipe
            with contextlib.suppress(AttributeError):
                tracker._resource_tracker._pid = None
            self._agent.stuck = (
                f"SIGKILL has not ended {_named(stuck)} in {KILL_S:g} s: stuck in the kernel (a file system or a device does not "
                "answer). Restart the machine"
            )
            raise RuntimeError(self._agent.stuck)

    def _left_after(self, timeout_s: float) -> dict[int, Any]:
        """The processes of killed ranks that have not ended in this time."""
        deadline = time.monotonic() + timeout_s
        for rank in self._waiting.values():
            self._processes[rank].join(max(0.0, deadline - time.monotonic()))
        return {rank: process for rank, process in self._processes.items() if not self._is_gone(rank, deadline)}

    def _is_gone(self, rank: int, deadline: float) -> bool:
        """Whether a rank that was killed has ended."""
        process = self._processes[rank]
        if process.exitcode != _SERVER_GONE:
            return process.exitcode is not None
        return _kill_and_wait(orders_file(self._folder, rank), process.pid, deadline)  # nobody reaps it

    def _code(self, rank: int) -> int:
        code = int(self._processes[rank].exitcode)
        beat = read_beat(heartbeat_file(self._folder, rank))
        done = beat is not None and beat.phase in (Phase.STOPPED, Phase.FINISHED)
        # gloo's and NCCL's threads abort a rank now and then after all its work is done
        return 0 if done and code == -signal.SIGABRT else code


def _named(processes: dict[int, Any]) -> str:
    return ", ".join(f"rank {rank} (process {process.pid})" for rank, process in processes.items())


def _kill_and_wait(orders: Path, pid: int, deadline: float) -> bool:
    """Kill a rank whose parent is gone; its number is still its own if it has its pipe of orders open. Whether it ended."""
    while True:
        try:
            files = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            return True
        if str(orders) not in files:
            return True
        if time.monotonic() >= deadline:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


@contextlib.contextmanager
def _hidden_main() -> Generator[None]:
    """Hide ``__main__`` from multiprocessing, which would otherwise import it in every rank."""
    main = sys.modules["__main__"]
    saved = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    for name in saved:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(main, name, value)
