"""The time-out of process groups that exist already: long while a run starts, short once it steps.

torch 2.15 has `torch.distributed.set_timeout`; before it, the same function was private. Checked on 2.11 and 2.15.
"""

import datetime

import torch.distributed as dist
from torch.distributed import distributed_c10d


def set_collective_timeout(seconds: float) -> None:
    """Give every process group of this rank the time-out ``seconds`` from the next collective on. Local, cheap."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # pyright: ignore[reportDeprecated]
    for group in list(distributed_c10d._world.pg_map):
        set_timeout(datetime.timedelta(seconds=seconds), group)
