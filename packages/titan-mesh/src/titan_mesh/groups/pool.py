"""Process groups by their ranks: made once, shared by every name that has the same ranks.

Problem: torch makes one communicator for each axis of each mesh, even where two axes have the same ranks (``fsdp`` and
``dp_shard`` without context parallelism); each costs memory and start-up time. It also forgets the time limit: a
subgroup gets torch's default of half an hour (ten minutes for NCCL), whatever `init_process_group` was told.

Idea: a pool keyed by ranks. The group of all ranks is the default group, if its time limit and backend are the wanted
ones. Each rank makes only the groups that it is in, one an axis (``use_local_synchronization``): 5 to 11 calls, where
walking all groups of 2,048 ranks is thousands, each a barrier of the world under ``TORCH_DIST_INIT_BARRIER=1``. Members
meet at a name that torch counts on each rank, so all must have made equally many groups before. Where they have not
(`build` compares) every rank walks the same groups in the same order. With an
eagerly connected NCCL (``init_process_group(device_id=…)``), one ``split_group`` an axis replaces one ``new_group`` a
group, as each of those would be a collective over the whole world.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from titan_mesh.groups.torch_private import default_group, name_groups_once, timeout_of


class GroupPool:
    """Makes and keeps the process groups of one mesh."""

    created: list[ProcessGroup]
    """Groups made here that this rank is in, in order; the default group is not among them."""

    def __init__(self, timeout: timedelta | None, *, local: bool) -> None:
        """Start empty; ``local``: each rank makes only its own groups. The same on every rank."""
        name_groups_once()
        self.created = []
        self.local = local
        self._world = default_group()
        self._timeout = timeout_of(self._world) if timeout is None else timeout
        # Options are compared by identity: two names with their own options get their own groups.
        self._known: dict[tuple[tuple[int, ...], str | None, int | None], ProcessGroup | None] = {}

    def join(self, name: str, partition: Sequence[tuple[int, ...]], backend: str | None, options: Any) -> ProcessGroup:
        """The group of ``partition`` that holds this rank. Collective over all ranks.

        Args:
            name: For the group's description in logs and flight recorders.
            partition: All groups of one axis, each ascending.
            backend: None for the default group's.
            options: Backend options, or None.
        """
        rank = dist.get_rank()
        mine = next(ranks for ranks in partition if rank in ranks)
        keys = {ranks: (ranks, backend, None if options is None else id(options)) for ranks in partition}
        # If one is missing all are made, so that every rank makes equally many.
        if any(key not in self._known for key in keys.values()):
            if self._is_world(mine, backend, options):
                made = self._world
            else:
                if options is not None:
                    options._timeout = self._timeout  # torch warns, and takes the argument, if the two differ
                made = self._make(f"titan_{name}", mine, partition, backend, options)
                self.created.append(made)
            self._known |= {key: made if ranks == mine else None for ranks, key in keys.items()}
        group = self._known[keys[mine]]
        assert group is not None
        return group

    def _is_world(self, ranks: tuple[int, ...], backend: str | None, options: Any) -> bool:
        if len(ranks) != dist.get_world_size() or options is not None:
            return False
        same_backend = backend is None or backend == dist.get_backend(self._world)
        return same_backend and timeout_of(self._world) in (None, self._timeout)

    def _make(
        self,
        description: str,
        mine: tuple[int, ...],
        partition: Sequence[tuple[int, ...]],
        backend: str | None,
        options: Any,
    ) -> ProcessGroup:
        """Make the group of ``partition`` that holds this rank, and the others where ranks walk all."""
        if backend is None and getattr(self._world, "bound_device_id", None) is not None:
            split = dist.split_group(
                self._world, [list(ranks) for ranks in partition], self._timeout, options, description
            )
            return cast(ProcessGroup, split)
        made = {
            ranks: dist.new_group(
                list(ranks),
                timeout=self._timeout,
                backend=backend,
                pg_options=options,
                use_local_synchronization=self.local,
                group_desc=description,
            )
            for ranks in ([mine] if self.local else partition)
        }
        return cast(ProcessGroup, made[mine])
