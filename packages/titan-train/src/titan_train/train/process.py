"""What a rank's process is set to: its device, its seeds, its versions, its run's start, and SIGTERM and SIGUSR1 as requests.

A signal reaches ranks at different moments, and a rank that stopped alone would leave its peers in a collective. So
a handler only sets a flag; the trainer sums the flags of all ranks in the collective it makes every step anyway.
"""

import contextlib
import os
import random
import signal
import threading
import warnings
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from titan_ckpt.comm import ByteComm

from titan_train.config import Config, ScheduleConfig
from titan_train.config.published import RUN
from titan_train.exchange import gather_values
from titan_train.observe.run_info import versions
from titan_train.rank_device import device_index, keep_freed_memory
from titan_train.run_folder import resolve_starts


def set_up_process(config: Config) -> torch.device:
    """Seed Python, numpy and torch, ask torch for deterministic kernels if wanted, select the GPU that ``LOCAL_RANK`` names.

    Returns:
        Where this rank computes: without ``LOCAL_RANK`` the GPU that is selected already.

    Raises:
        ValueError: As `device_index`.
    """
    seed = config.run.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.launch.device == "cpu" or not torch.cuda.is_available():
        keep_freed_memory()
        return torch.device("cpu")
    # The first product of backward runs on a thread of autograd, where CUDA has not been used: torch sees to it, and says so.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    # torch's varlen_attn is looked up once, behind a cache that a compiled block calls too.
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`-wrapped function")
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    index = device_index(int(local_rank), torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def check_same_versions() -> None:
    """Refuse ranks whose machines have other versions of torch or of these packages. Collective.

    Raises:
        ValueError: On every rank, naming the first that differs from rank 0.
    """
    first, *others = gather_values(versions())
    for rank, theirs in enumerate(others, 1):
        for name in sorted({*first, *theirs}):
            mine, other = first.get(name, "not installed"), theirs.get(name, "not installed")
            if mine != other:
                raise ValueError(
                    f"{name} is {other} on rank {rank} and {mine} on rank 0: install the same version on every machine."
                )


def resolve_same_starts(config: Config, run_dir: Path) -> Config:
    """As `resolve_starts`, with what rank 0 finds on every rank: the other run may save between the looks of two. Collective.

    Length and schedule of a decay, which a command on each machine counts from the step that it found, are rank 0's too.
    """
    named = config.checkpoint.start_from or config.model.init.startswith(RUN)
    if not named or not dist.is_initialized() or dist.get_world_size() == 1:
        return resolve_starts(config, run_dir)

    def look() -> list[Any]:
        found = resolve_starts(config, run_dir)
        return [found.checkpoint.start_from, found.model.init, found.train.steps, asdict(found.schedule)]

    start, init, steps, schedule = ByteComm().from_rank0(look, "resolving where the run begins", lambda err: err)
    return replace(
        config,
        checkpoint=replace(config.checkpoint, start_from=start),
        model=replace(config.model, init=init),
        train=replace(config.train, steps=steps),
        schedule=ScheduleConfig(**schedule),
    )


def device_name(device: torch.device) -> str:
    """The vendor's name of a device, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class SaveRequests:
    """What this rank has been asked to do since it last looked."""

    def __init__(self) -> None:
        self.stop = False
        """SIGTERM: save, then end the run with success."""
        self._save = False

    def take_save(self) -> bool:
        """Whether SIGUSR1 came since the last call: save, then go on. A signal that comes later is kept for the next."""
        asked, self._save = self._save, False
        return asked

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Handle the two signals inside the block. Off the main thread, where Python cannot, it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        saved = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._on_stop),
            signal.SIGUSR1: signal.signal(signal.SIGUSR1, self._on_save),
        }
        try:
            yield
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)

    def _on_stop(self, _number: int, _frame: object) -> None:
        self.stop = True

    def _on_save(self, _number: int, _frame: object) -> None:
        self._save = True
