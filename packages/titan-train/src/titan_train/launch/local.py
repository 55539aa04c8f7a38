"""Ranks on this machine, forked from one server that has imported torch.

Problem: torchrun starts every rank as a fresh interpreter; on two cores four ranks spend 36 s importing torch.

Idea: Python's forkserver imports torch once (never CUDA) and each rank is a fork of it, ready in milliseconds. The
process at the terminal (this one) never imports torch: it prepares the inputs while the server warms up, then only
watches. Ranks meet through a file store, so no port is opened.

What it promises: the first failing rank's error is shown once, with its rank; the others are ended within seconds; a
rank that is killed is noticed at once; SIGTERM and Ctrl-C reach the ranks as a request to save and stop, a second
Ctrl-C ends them; if this process is killed, the ranks notice it by a pipe that closes, save and stop.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from titan_train.config import Config, dump_config
from titan_train.launch.failure import clear_failures, describe_exit, describe_failure, first_failure
from titan_train.launch.ranks import DeviceType, Ranks
from titan_train.run_folder import newest_checkpoint

_GRACE_S = 3.0  # how long the peers of a failed rank may take to tell their own error before they are ended


class LocalLauncher:
    """Starts, watches and ends the ranks of one run on this machine."""

    def __init__(self, world_size: int, device: DeviceType) -> None:
        """Start the server that imports torch; it warms up in the background.

        Args:
            world_size: Ranks to start.
            device: "cpu", or "cuda" with one GPU a rank.
        """
        self.world_size = world_size
        self.device: DeviceType = device
        # Ranks share the cores; more threads than cores make every one of them slower.
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size) if device == "cpu" else 1)
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["titan_train.launch.preload"])
        from multiprocessing import forkserver

        forkserver.ensure_running()

    def run(self, config: Config, run_dir: Path) -> int:
        """Run the job and wait for it.

        Returns:
            0 if every rank finished (or saved and stopped on request), 1 if any failed. The error is on stderr.
        """
        clear_failures(run_dir)
        rendezvous = tempfile.mkdtemp(prefix="titan-train-")
        try:
            processes = self._start(config, run_dir, str(Path(rendezvous, "store")))
            with _forwarded_signals(processes) as stop_requested:
                failed = _watch(processes)
            if failed is None:
                return 0
            rank, code = failed
            print(self._describe(run_dir, rank, code), file=sys.stderr)
            return 130 if len(stop_requested) > 1 else 1
        finally:
            shutil.rmtree(rendezvous, ignore_errors=True)

    def _start(self, config: Config, run_dir: Path, store: str) -> list[Any]:
        from titan_train.launch.worker import forked_worker  # imports no torch itself

        text = dump_config(config)
        processes: list[Any] = []
        # Ranks read from it, only this process holds the writing end: it closes when this process ends, however.
        reader, self._alive = self._context.Pipe(duplex=False)
        with _hidden_main():
            for rank in range(self.world_size):
                ranks = Ranks(rank, rank, self.world_size, self.world_size, self.device, store)
                process = self._context.Process(
                    target=forked_worker, args=(text, ranks, str(run_dir), reader), name=f"rank-{rank}"
                )
                process.start()
                processes.append(process)
        reader.close()
        return processes

    def _describe(self, run_dir: Path, rank: int, code: int) -> str:
        failure = first_failure(run_dir)
        if failure is not None and code in (1, -signal.SIGABRT):
            text = describe_failure(failure, self.world_size)
        else:  # killed: whatever its peers wrote is the consequence
            text = describe_exit(rank, self.world_size, code)
        saved = newest_checkpoint(run_dir)
        after = (
            f"The last finished checkpoint is step {saved}: run the same command to continue from it." if saved else ""
        )
        return f"\nerror: {text}\nLogs of every rank: {run_dir / 'logs'}\n{after}".rstrip()


def _watch(processes: list[Any]) -> tuple[int, int] | None:
    """Wait for all ranks. After the first failure, end the others; return the cause's rank and exit code."""
    waiting = {process.sentinel: rank for rank, process in enumerate(processes)}
    failures: list[tuple[int, int]] = []
    deadline: float | None = None
    while waiting:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), timeout=timeout)
        if not ready:  # the grace is over
            for rank in waiting.values():
                processes[rank].kill()
                processes[rank].join()
            break
        for sentinel in ready:
            rank = waiting.pop(cast("int", sentinel))
            processes[rank].join()
            if processes[rank].exitcode != 0:
                failures.append((rank, processes[rank].exitcode))
                deadline = deadline or time.monotonic() + _GRACE_S
    # A rank ended by a signal is the cause, even where a peer's own error, its consequence, was seen first. An abort
    # is not: gloo and NCCL abort a process whose peer is gone.
    killed = [(rank, code) for rank, code in failures if code < 0 and code != -signal.SIGABRT]
    return next(iter(killed + failures), None)


@contextlib.contextmanager
def _forwarded_signals(processes: list[Any]) -> Generator[list[int]]:
    """Pass SIGTERM, SIGUSR1 and the first Ctrl-C on to the ranks; a second Ctrl-C ends them."""
    stops: list[int] = []

    def forward(number: int, _frame: object) -> None:
        if number != signal.SIGUSR1:
            stops.append(number)
        for process in processes:
            if process.pid is None or not process.is_alive():
                continue
            if len(stops) > 1 and number == signal.SIGINT:
                process.kill()
            else:
                os.kill(process.pid, signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    saved = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield stops
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


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
