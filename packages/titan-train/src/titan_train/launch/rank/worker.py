"""One rank: join the process group, train, leave cleanly; report an error once.

The same code under a node's agent, which forks it, and under a torchrun of the user's, where nothing watches it.
"""

import contextlib
import datetime
import faulthandler
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from titan_train.config import Config, parse_config
from titan_train.launch.job import RankJob
from titan_train.launch.rank.descriptors import allow_open_files, connect_when_needed, open_files_needed
from titan_train.launch.rank.device import prepare_gpu, set_cuda_defaults
from titan_train.launch.rank.environment import check_environment
from titan_train.launch.rank.failure import describe_failure, first_failure, write_failure
from titan_train.launch.rank.flight_recorder import record_collectives, write_dump
from titan_train.launch.rank.heartbeat import Heartbeat, heartbeat_file
from titan_train.launch.rank.info import RankInfo
from titan_train.launch.rank.orders import obey, orders_file
from titan_train.rank_device import usable_cores
from titan_train.terminal import clean_output

if TYPE_CHECKING:
    import torch.distributed as dist

    from titan_train.train.observer import Observer


def forked_worker(job: RankJob, listener: socket.socket | None, log: str | None) -> None:
    """A rank forked by `titan_train.launch.node.agent`. Ends the process itself.

    Args:
        job: What to do.
        listener: Rank 0 of several machines: the bound socket on which it serves the store that ranks meet at.
        log: A file for what this rank prints; None leaves it on the terminal.
    """
    if log is not None:
        _redirect_output(Path(log))
    _run_and_exit(job, listener)


def torchrun_worker(config: Config, ranks: RankInfo, run_dir: Path) -> int:
    """A rank started by a torchrun of the user's. Prints its error only if no peer failed before it."""
    try:
        train_rank(config, ranks, run_dir)
    except Exception as err:
        mine = write_failure(run_dir, ranks.rank, err)
        first = first_failure(run_dir)
        if first is None or first.rank == mine.rank:
            print(f"\nerror: {describe_failure(mine, ranks.world_size)}", file=sys.stderr)
        return 1
    return 0


def train_rank(
    config: Config,
    ranks: RankInfo,
    run_dir: Path,
    monitor: "Observer | None" = None,
    listener: socket.socket | None = None,
) -> tuple[int, bool]:
    """Join the process group, train, and leave it after a barrier. Returns the step that was reached, and if it is the last."""
    from titan_train.train import Trainer

    faulthandler.enable()
    with (
        clean_output(),
        _process_group(config, ranks, listener),
        Trainer(config, run_dir=run_dir, monitor=monitor) as trainer,
    ):
        trainer.fit()
        for number in (signal.SIGTERM, signal.SIGUSR1):  # all is saved, or being saved: a further request is no failure
            signal.signal(number, signal.SIG_IGN)
    return trainer.step, trainer.finished


def _run_and_exit(job: RankJob, listener: socket.socket | None) -> None:
    run_dir, rank, board = Path(job.run_dir), job.ranks.rank, Path(job.board)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher turns Ctrl-C into an order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the trainer takes it over
    code = 1
    ready = threading.Event()  # set at the first step
    try:
        heartbeat = Heartbeat(heartbeat_file(board, rank))
        dumps = run_dir / "hangs" / f"attempt-{job.attempt}"
        obey(orders_file(board, rank), lambda: write_dump(dumps, rank), ready, heartbeat)
        config = parse_config(tomllib.loads(job.config_toml))

        from titan_train.launch.rank.monitor import RankMonitor

        monitor = RankMonitor(heartbeat, config.launch, rank, run_dir, ready)
        step, finished = train_rank(config, job.ranks, run_dir, monitor, listener)
        monitor.ended(step, finished=finished)
        code = 0
    except BaseException as err:  # of any kind: the supervisor reports it
        write_failure(run_dir, rank, err, trained=ready.is_set())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a terminal that was closed
                stream.flush()
        with contextlib.suppress(
            Exception
        ):  # named semaphores (tqdm's, which torch.compile imports) would be called leaked
            multiprocessing.util._run_finalizers(0)  # pyright: ignore[reportAttributeAccessIssue]
        # Skip the interpreter's teardown: gloo's threads abort it now and then after all work is done.
        os._exit(code)


@contextlib.contextmanager
def _process_group(config: Config, ranks: RankInfo, listener: socket.socket | None) -> Generator[None]:
    set_cuda_defaults(os.environ, pipeline=config.parallel.pp > 1)
    import torch
    import torch.distributed as dist

    check_environment(cuda=ranks.device_type == "cuda")
    record_collectives()
    connect_when_needed()
    allow_open_files(open_files_needed(ranks.rank, ranks.world_size))
    os.environ.update(
        RANK=str(ranks.rank),
        WORLD_SIZE=str(ranks.world_size),
        LOCAL_RANK=str(ranks.local_rank),
        LOCAL_WORLD_SIZE=str(ranks.local_world_size),
    )
    if "OMP_NUM_THREADS" in os.environ and ranks.device_type == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if ranks.device_type == "cuda":
        cores = usable_cores()
        prepare_gpu(ranks.local_rank, bind_numa=config.launch.bind_numa)
        if config.parallel.offload != "none" and int(os.environ.get("OMP_NUM_THREADS", 1)) == 1:
            # clipping and the optimizer run here; one thread is for ranks that compute on their GPU alone
            torch.set_num_threads(max(1, min(usable_cores(), cores // ranks.local_world_size)))
    backend = "cpu:gloo,cuda:nccl" if ranks.device_type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=config.launch.timeout_s)
    if ranks.store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        if ranks.store.startswith("/"):
            for library in ("GLOO", "NCCL"):  # all ranks are here; NCCL takes loopback only where it is named
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
            store: dist.Store = dist.FileStore(ranks.store, ranks.world_size)  # pyright: ignore[reportPrivateImportUsage]
        else:
            store = _tcp_store(ranks, timeout, listener)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
    yield
    # Only after success: a barrier with a dead peer would hide the error behind a time-out.
    dist.barrier()
    dist.destroy_process_group()


def _tcp_store(ranks: RankInfo, timeout: datetime.timedelta, listener: socket.socket | None) -> "dist.TCPStore":  # pyright: ignore[reportPrivateImportUsage]
    """Rank 0 serves on the socket its launcher bound, so the port cannot be lost to another program meanwhile."""
    import torch.distributed as dist

    assert ranks.store is not None
    host, _, port = ranks.store.rpartition(":")
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host.strip("[]"),  # of an IPv6 address
        int(port),
        ranks.world_size,
        ranks.rank == 0,
        timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
