"""Evaluation on several ranks: each holds the whole model and takes every n-th text. Export shares these ranks.

The ranks are those of torchrun: ``torchrun --nproc-per-node 4 -m titan_train eval RUN --tasks ...``. Sums are exchanged with
gloo, a few numbers in all.
"""

import contextlib
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from titan_train.exchange import gather_values


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who shares the work."""

    rank: int = 0
    world_size: int = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each value, the same on every rank."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Their process group; None of one rank."""
        return None if self.world_size == 1 else dist.group.WORLD

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order; plain data only."""
        return [value] if self.world_size == 1 else gather_values(value)


@contextlib.contextmanager
def join_ranks() -> Generator[Ranks]:
    """The ranks of this process's group or torchrun; one rank without either."""
    with cpu_ranks() as group:
        yield Ranks() if group is None else Ranks(dist.get_rank(), dist.get_world_size())


@contextlib.contextmanager
def cpu_ranks() -> "Generator[dist.ProcessGroup | None]":
    """The process's group, or torchrun's ranks over gloo; None without either.

    Ranks wait for each other for hours if need be: a share may take long, and torchrun ends all when one ends.
    """
    if dist.is_initialized():
        yield dist.group.WORLD
    elif int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
    else:
        dist.init_process_group("gloo", timeout=timedelta(hours=24))
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


def local_device() -> str | None:
    """The GPU of this rank; None lets one process choose, and the CPU serve where there is none."""
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        return None
    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
