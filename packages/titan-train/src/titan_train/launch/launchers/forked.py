"""Ranks on one machine, forked from one server that has imported torch.

Problem: torchrun starts every rank as a fresh interpreter; on two cores four ranks spend 36 s importing torch, and again
after every restart.

Idea: Python's forkserver imports torch once (never CUDA) and each rank is a fork of it, ready in milliseconds. The
server outlives the attempts of a run, so a restart costs no import. Whoever owns it (the command line, or an agent on a
Ray node) never imports torch itself.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

from titan_train.child_processes import interrupts_blocked, without_working_directory
from titan_train.config import Config, dump_config
from titan_train.launch.job import Board, RankExit, RankJob
from titan_train.launch.rank.heartbeat import Beat, Phase
from titan_train.launch.rank.orders import Order
from titan_train.launch.validate import validate_in_child
from titan_train.run_folder.temporary import owned_folder

_SERVER_GONE = 255  # what multiprocessing says of a child whose server cannot tell how it ended
_KILL_S = 10.0


class ForkServer:
    """The process that has imported torch. It warms up in the background from the moment it is made."""

    def __init__(self, threads_per_rank: int) -> None:
        """Start it.

        Args:
            threads_per_rank: For OMP_NUM_THREADS, unless that is set.
        """
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["titan_train.launch.launchers.preload"])
        from multiprocessing import forkserver

        with without_working_directory(), interrupts_blocked():
            forkserver.ensure_running()

    def start(self, rank_job: RankJob, listener: socket.socket | None, log: str | None) -> Any:
        """Fork one rank and return its process."""
        from titan_train.launch.rank.worker import forked_worker  # imports no torch itself

        with _hidden_main(), without_working_directory():
            process = self._context.Process(
                target=forked_worker, args=(rank_job, listener, log), name=f"rank-{rank_job.ranks.rank}"
            )
            process.start()
        return process

    def validate(self, config: Config, world_size: int) -> None:
        """Validate a configuration in a process that has torch.

        Raises:
            ValueError: It cannot work on this many ranks.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        with _hidden_main(), without_working_directory():
            process = self._context.Process(target=validate_in_child, args=(dump_config(config), world_size, sender))
            process.start()
        sender.close()
        with receiver, contextlib.suppress(EOFError, OSError):  # it was killed: the ranks will say why
            problem = receiver.recv()
            process.join()
            if problem:
                raise ValueError(problem)


class ForkedRanks:
    """The running ranks of one machine in one attempt."""

    def __init__(
        self, server: ForkServer, jobs: Sequence[RankJob], *, log_rank_0: bool, listener: socket.socket | None = None
    ) -> None:
        """Start them.

        Args:
            server: Where they are forked from.
            jobs: One a rank; ``board`` is filled in here.
            log_rank_0: Rank 0 prints into ``logs/`` like the others, not to this process's terminal.
            listener: The socket on which rank 0 serves the store, if there is one; closed here afterwards.
        """
        self._folder = owned_folder("titan-train-")
        self._board = Board(self._folder, [job.ranks.rank for job in jobs])
        self._processes: dict[int, Any] = {}
        for job in jobs:
            rank = job.ranks.rank
            log = str(Path(job.run_dir, "logs", f"rank-{rank}.log")) if rank or log_rank_0 else None
            placed = RankJob(job.config_toml, job.run_dir, str(self._folder), job.attempt, job.ranks)
            self._processes[rank] = server.start(placed, listener if rank == 0 else None, log)
        if listener is not None:
            listener.close()
        self._waiting = {process.sentinel: rank for rank, process in self._processes.items()}

    def exits(self, timeout_s: float) -> list[RankExit]:
        """See `titan_train.launch.job.RunningJob.exits`."""
        if not self._waiting:
            return []
        found: list[RankExit] = []
        for sentinel in multiprocessing.connection.wait(list(self._waiting), timeout=timeout_s):
            rank = self._waiting.pop(cast("int", sentinel))
            self._processes[rank].join()
            code = self._code(rank)
            if code == _SERVER_GONE:
                found.append(RankExit(rank, None, "the server that ranks are forked from was killed"))
            else:
                found.append(RankExit(rank, code))
        return found

    def beats(self) -> dict[int, Beat]:
        """See `titan_train.launch.job.RunningJob.beats`."""
        return self._board.beats()

    def order(self, order: Order) -> None:
        """See `titan_train.launch.job.RunningJob.order`."""
        self._board.order(order)

    def end(self) -> None:
        """Kill what still runs, reap it, remove the board."""
        for rank in self._waiting.values():
            self._processes[rank].kill()
        for rank in self._waiting.values():
            self._processes[rank].join()
        self._waiting = {}
        for rank, process in self._processes.items():
            if process.exitcode == _SERVER_GONE:  # nobody reaps it, and it may still run
                _kill_and_wait(self._folder / f"rank-{rank}.orders", process.pid)
        self._board.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _code(self, rank: int) -> int:
        code = int(self._processes[rank].exitcode)
        beat = self._board.beats().get(rank)
        done = beat is not None and beat.phase in (Phase.STOPPED, Phase.FINISHED)
        # gloo's and NCCL's threads abort a rank now and then after all its work is done
        return 0 if done and code == -signal.SIGABRT else code


def _kill_and_wait(orders: Path, pid: int) -> None:
    """Kill a rank whose parent is gone; its number is still its own if it has its pipe of orders open."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        try:
            files = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            return
        if str(orders) not in files:
            return
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
