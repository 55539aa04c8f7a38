"""The private corners of ``torch.distributed`` that this package needs, in one place.

Checked on torch 2.11 and 2.15 (`tests/test_torch_private.py` names them and fails when one goes away):

- ``distributed_c10d._get_default_store``: the store that `init_process_group` met through. No public accessor exists;
  opening a second one would need a second port.
- ``ProcessGroup._device_types``, ``ProcessGroup._get_backend(device).options._timeout``: a group's time limit, which
  torch lets a caller set and not read.
- ``distributed_c10d._world.group_count``, ``.pg_names``: what names of groups are counted by. Members of a group that only
  they make (``use_local_synchronization``) take its name from one or the other, by version, and meet at that name.
- ``distributed_c10d._hash_ranks_to_str``: what makes that name. torch 2.11 counts the groups that there are, so that a name comes
  back once some were destroyed.
- ``torch.distributed.tensor.debug._clear_sharding_prop_cache``: DTensor caches the layout of results by the layout of
  arguments, and takes two meshes for one if their ranks and names are equal. What it returns holds the first of them.
"""

import hashlib
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
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


def name_groups_once() -> None:
    """Let no two groups that only their own ranks make have one name, in this process and world; further calls do nothing.

    torch 2.11 names such a group by its ranks and by how many groups there are. After some were destroyed the name of one of
    them comes back, and the members of the new group wait at the addresses of the old one until their time limit. Here the
    name has how often these ranks have made a group; torch 2.15 counts by itself.
    """
    if "pg_names" not in cast(Any, c10d)._hash_ranks_to_str.__code__.co_names:
        return
    made: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()

    def named(ranks: Sequence[int]) -> str:
        text = "_".join(map(str, ranks))
        counts = made.setdefault(default_group(), Counter())
        counts[text] += 1
        return hashlib.sha1(f"{text} {counts[text]}".encode(), usedforsecurity=False).hexdigest()

    cast(Any, c10d)._hash_ranks_to_str = named


def forget_meshes() -> None:
    """Drop every DeviceMesh that DTensor's caches hold: their groups are about to end, and equal meshes may follow."""
    if "torch.distributed.tensor" in sys.modules:  # else nothing is cached
        from torch.distributed.tensor import debug

        cast(Any, debug)._clear_sharding_prop_cache()
