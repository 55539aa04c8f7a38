"""One rank: join the others, train, leave cleanly; tell the error once if it fails."""

import contextlib
import datetime
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path

from titan_train.config import Config, parse_config
from titan_train.launch.failure import describe_failure, first_failure, write_failure
from titan_train.launch.ranks import Ranks

_ORPHAN_GRACE_S = 60.0  # for a last checkpoint after the launcher is gone


def forked_worker(config_toml: str, ranks: Ranks, run_dir: str, launcher: Connection) -> None:
    """A rank forked by the local launcher. Ends the process itself.

    Args:
        config_toml: The resolved configuration.
        ranks: This rank's place.
        run_dir: The run's folder.
        launcher: Nothing is ever sent through it; it closes when the launcher is gone.
    """
    threading.Thread(target=_stop_without_launcher, args=(launcher,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher turns Ctrl-C into SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the trainer takes it over
    if ranks.rank > 0:
        _redirect_output(Path(run_dir) / "logs" / f"rank-{ranks.rank}.log")
    code = 1
    try:
        import tomllib

        train_rank(parse_config(tomllib.loads(config_toml)), ranks, Path(run_dir))
        code = 0
    except BaseException as err:  # whatever it is, the launcher tells it
        write_failure(Path(run_dir), ranks.rank, err)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip the interpreter's teardown: gloo's threads abort it now and then after all work is done.
        os._exit(code)


def torchrun_worker(config: Config, ranks: Ranks, run_dir: Path) -> int:
    """A rank started by torchrun. Prints its error only if no peer failed before it."""
    try:
        train_rank(config, ranks, run_dir)
    except Exception as err:
        mine = write_failure(run_dir, ranks.rank, err)
        first = first_failure(run_dir)
        if first is None or first.rank == mine.rank:
            print(f"\nerror: {describe_failure(mine, ranks.world_size)}", file=sys.stderr)
        return 1
    return 0


def train_rank(config: Config, ranks: Ranks, run_dir: Path) -> None:
    """Join the process group, train, and leave it after a barrier."""
    from titan_train.train import Trainer

    faulthandler.enable()
    with _process_group(config, ranks), Trainer(config, run_dir=run_dir) as trainer:
        trainer.fit()


@contextlib.contextmanager
def _process_group(config: Config, ranks: Ranks) -> Generator[None]:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(ranks.rank),
        WORLD_SIZE=str(ranks.world_size),
        LOCAL_RANK=str(ranks.local_rank),
        LOCAL_WORLD_SIZE=str(ranks.local_world_size),
    )
    if "OMP_NUM_THREADS" in os.environ and ranks.device_type == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if ranks.device_type == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    backend = "cpu:gloo,cuda:nccl" if ranks.device_type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=config.launch.timeout_s)
    if ranks.store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(ranks.store, ranks.world_size)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
    yield
    # Only after success: a barrier with a dead peer would hide the error behind a time-out.
    dist.barrier()
    dist.destroy_process_group()


def _stop_without_launcher(launcher: Connection) -> None:
    """When the launcher is killed, save and stop; where that cannot be (a peer is gone too), end."""
    with contextlib.suppress(EOFError, OSError):
        launcher.recv_bytes()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(1)


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
