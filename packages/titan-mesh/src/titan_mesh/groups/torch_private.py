"""The private corners of ``torch.distributed`` that this package needs, in one place.

Checked on torch 2.11 and 2.15 (`tests/test_torch_private.py` names them and fails when one goes away):

- ``distributed_c10d._get_default_store``: the store that `init_process_group` met through. No public accessor exists;
  opening a second one would need a second port.
- ``ProcessGroup._device_types``, ``ProcessGroup._get_backend(device).options._timeout``: a group's time limit, which
  torch lets a caller set and not read.
- ``distributed_c10d._world.group_count``, ``.pg_names``: what names of groups are counted by. Members of a group that only
  they make (``use_local_synchronization``) take its name from one or the other, by version, and meet at that name.
- ``torch.distributed.tensor.debug._clear_sharding_prop_cache``: DTensor caches the layout of results by the layout of
  arguments, and takes two meshes for one if their ranks and names are equal. What it returns holds the first of them.
"""

import sys
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore as PrefixStore  # pyright: ignore[reportPrivateImportUsage] - documented
from torch.distributed import ProcessGroup
from torch.distributed import Store as Store  # pyright: ignore[reportPrivateImportUsage] - documented
from torch.distributed import distributed_c10d as c10d


def default_group() -> ProcessGroup:
    """The group of all ranks; ``torch.distributed`` must be initialised."""
    group = dist.group.WORLD
    assert group is not None
    return group


def default_store() -> Store:
    """The key-value store that all ranks share."""
    return cast(Any, c10d)._get_default_store()


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """The time limit of ``group``'s collectives; None where the backend has none (``fake``)."""
    opened = cast(Any, group)
    for device in opened._device_types:
        options = opened._get_backend(device).options
        if options is not None:
            return options._timeout
    return None


def groups_so_far() -> str:
    """The counters that this rank's next group is named by."""
    world = cast(Any, c10d)._world
    return f"{world.group_count} {len(world.pg_names)}"


def forget_meshes() -> None:
    """Drop every DeviceMesh that DTensor's caches hold: their groups are about to end, and equal meshes may follow."""
    if "torch.distributed.tensor" in sys.modules:  # else nothing is cached
        from torch.distributed.tensor import debug

        cast(Any, debug)._clear_sharding_prop_cache()
