"""Process groups by their ranks: made once, shared by every name that has the same ranks.

Problem: torch makes one communicator for each axis of each mesh, even where two axes have the same ranks (``fsdp`` and
``dp_shard`` without context parallelism); each costs memory and start-up time. It also forgets the time limit: a
subgroup gets torch's default of half an hour (ten minutes for NCCL), whatever `init_process_group` was told.

Idea: a pool keyed by ranks. Every rank walks the same groups in the same order, as ``new_group`` demands. The group of
all ranks is the default group, if its time limit and backend are the wanted ones. With an eagerly connected NCCL
(``init_process_group(device_id=…)``), one ``split_group`` an axis replaces one ``new_group`` a group, as each of those
would be a collective over the whole world.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from titan_mesh.groups.torch_private import default_group, timeout_of


class GroupPool:
    """Makes and keeps the process groups of one mesh."""

    created: list[ProcessGroup]
    """Groups made here that this rank is in, in order; the default group is not among them."""

    def __init__(self, timeout: timedelta | None) -> None:
        self.created = []
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
        missing = [ranks for ranks in partition if keys[ranks] not in self._known]
        if missing and self._is_world(missing[0], backend, options):
            self._known[keys[missing[0]]] = self._world
        elif missing:
            if options is not None:
                options._timeout = self._timeout  # torch warns, and takes the argument, if the two differ
            made = self._make(f"titan_{name}", missing, backend, options)
            self._known |= {keys[ranks]: made if ranks == mine else None for ranks in missing}
            if made is not None:
                self.created.append(made)
        group = self._known[keys[mine]]
        assert group is not None
        return group

    def _is_world(self, ranks: tuple[int, ...], backend: str | None, options: Any) -> bool:
        if len(ranks) != dist.get_world_size() or options is not None:
            return False
        same_backend = backend is None or backend == dist.get_backend(self._world)
        return same_backend and timeout_of(self._world) in (None, self._timeout)

    def _make(
        self, description: str, missing: Sequence[tuple[int, ...]], backend: str | None, options: Any
    ) -> ProcessGroup | None:
        """Make one group for each of ``missing``; this rank's, or None if it is in none of them."""
        if backend is None and getattr(self._world, "bound_device_id", None) is not None:
            split = dist.split_group(
                self._world, [list(ranks) for ranks in missing], self._timeout, options, description
            )
            return split if isinstance(split, ProcessGroup) else None
        mine: ProcessGroup | None = None
        for ranks in missing:
            group = dist.new_group(
                list(ranks), timeout=self._timeout, backend=backend, pg_options=options, group_desc=description
            )
            if dist.get_rank() in ranks:
                mine = cast(ProcessGroup, group)
        return mine
