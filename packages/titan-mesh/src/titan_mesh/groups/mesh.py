"""A layout with process groups: what a training program holds.

How `DeviceMesh` is used. A DeviceMesh built over permuted ranks is a trap: torch sorts the ranks of a process group, so
that a rank's mesh coordinate and its rank in the group differ, and DTensor scatters the wrong shards without an error
(``preserve_rank_order`` cures it in torch 2.15 and does not exist in 2.11). Here the groups come first, each ascending,
and meshes are laid over them with the public ``DeviceMesh.from_group``, in a fixed dimension order (pp, dp_replicate,
dp_shard and cp, tp) whatever the layout's order, so that along each mesh dimension ranks ascend too. The layout's order
only decides which ranks are in a group.

Several meshes may be open in one process, and DTensor may hand the tensors of one a DeviceMesh of another that is equal
to it. So groups are destroyed when the last open mesh of the process closes, not before.

Meshes that must combine (FSDP over tensor parallelism: torch concatenates the two) come from tensors with the same
ranks in the same places, which is what torch checks.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from titan_mesh.groups.agree import agree
from titan_mesh.groups.pool import GroupPool
from titan_mesh.groups.torch_private import default_group, default_store, forget_meshes, groups_so_far, timeout_of
from titan_mesh.layout.layout import Layout
from titan_mesh.layout.spec import EXPERT_AXES
from titan_mesh.nearest import nearest_name

_open: "weakref.WeakSet[Mesh]" = weakref.WeakSet()
_closing: list[ProcessGroup] = []  # of closed meshes, while others are open


def build_mesh(
    layout: Layout,
    device_type: str,
    timeout: timedelta | None,
    backend: str | Mapping[str, str] | None,
    pg_options: Mapping[str, Any] | None,
    agree_within: timedelta,
) -> "Mesh":
    """`titan_mesh.build`, which documents the arguments."""
    for name, value in (("timeout", timeout), ("agree_within", agree_within)):
        if value is not None and value <= timedelta(0):
            raise ValueError(
                f"{name}={value!r} is not a positive time. Give a timedelta such as timedelta(minutes=10)."
            )
    backends = backend if isinstance(backend, Mapping) else dict.fromkeys(layout.names, backend)
    options = pg_options or {}
    for argument, given in (("backend", backends), ("pg_options", options)):
        for name in given:
            if name not in layout.names:
                raise ValueError(
                    f"{argument} names {name!r}, which has no groups in this layout. Known: {', '.join(layout.names)}."
                    f"{nearest_name(name, layout.names)}"
                )

    owns_world = not dist.is_initialized()
    if owns_world:
        _init_world(layout, device_type, timeout)
    try:
        alike = True
        if dist.get_backend() != "fake":  # simulated ranks: nobody to compare with
            text = f"{str(layout.spec) or 'one rank'} on {layout.num_ranks} ranks"
            rank, size = dist.get_rank(), dist.get_world_size()
            alike = agree(default_store(), rank, size, layout.digest(), text, agree_within, also=groups_so_far())
        if layout.num_ranks != dist.get_world_size():
            raise ValueError(_world_message(layout, dist.get_world_size()))
        bound = getattr(default_group(), "bound_device_id", None) is not None  # every rank takes part in a split
        pool = GroupPool(timeout, local=alike and not bound)
        groups = {
            name: pool.join(name, layout.groups(name), backends.get(name), options.get(name)) for name in layout.names
        }
    except BaseException:
        if owns_world:
            dist.destroy_process_group()
        raise
    return Mesh(layout, device_type, groups, pool, owns_world=owns_world)


class Mesh:
    """Process groups and DeviceMesh views of a `Layout`, on this rank. Made by `titan_mesh.build`.

    A context manager: leaving it closes the groups.
    """

    layout: Layout
    """Which rank sits where."""
    device_type: str
    """Device type of every DeviceMesh."""
    global_rank: int
    """This rank in the world."""

    def __init__(
        self,
        layout: Layout,
        device_type: str,
        groups: Mapping[str, ProcessGroup],
        pool: GroupPool,
        *,
        owns_world: bool,
    ) -> None:
        self.layout = layout
        self.device_type = device_type
        self.global_rank = dist.get_rank()
        self._groups = dict(groups)
        self._pool = pool
        self._owns_world = owns_world
        self._closed = False
        _open.add(self)
        self._views: dict[tuple[str, ...], DeviceMesh] = {}
        self._check_ranks()
        fsdp = sorted(("dp_shard", "cp"), key=layout.spec.axes.index)
        self._roots = [
            self._root(("pp", "dp_replicate", *fsdp, "tp")),
            self._root(("pp", "dp_replicate", "fsdp", "tp")),
        ]
        if layout.spec.ep * layout.spec.etp > 1:
            self._roots.append(self._root(layout.view("sparse").axes))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """A DeviceMesh over the named axes or flattens, in the order named; ``mesh["tp"]``, ``mesh["cp", "dp_shard"]``.

        Raises:
            ValueError: A name is unknown, or two names overlap.
        """
        key = (names,) if isinstance(names, str) else tuple(names)
        if key not in self._views:
            self._views[key] = self._view(key)
        return self._views[key]

    def get(self, name: str) -> DeviceMesh | None:
        """``mesh[name]``, or None where it has size 1 and there is nothing to do: ``if tp := mesh.get("tp"): …``."""
        return None if self.size(name) == 1 else self[name]

    def group(self, name: str) -> ProcessGroup:
        """The process group of this rank on an axis or a flatten, such as ``"loss"``; size 1 has one too."""
        if name not in self._groups:
            self.layout.size(name)  # an unknown name is an error here
            raise ValueError(f"{name!r} has no groups: this layout has ep=1. Use 'fsdp' or 'dp_shard'.")
        return self._groups[name]

    def rank_in(self, name: str) -> int:
        """The index of this rank on an axis or flatten: its coordinate, and its rank in that group."""
        return dist.get_rank(self.group(name))

    def size(self, name: str) -> int:
        """How many ranks an axis or flatten has."""
        return self.layout.size(name)

    def fsdp_mesh(self, *, experts: bool = False) -> DeviceMesh:
        """The mesh for ``fully_shard``: ``("fsdp",)``, or ``("dp_replicate", "fsdp")`` where there are replicas (HSDP).

        Args:
            experts: The mesh for expert parameters instead: ``efsdp`` in place of ``fsdp``. Needs ``ep`` or ``etp`` above 1.
        """
        shard = "efsdp" if experts else "fsdp"
        return self["dp_replicate", shard] if self.layout.spec.dp_replicate > 1 else self[shard]

    @property
    def process_groups(self) -> list[ProcessGroup]:
        """Each distinct group this rank uses, once; the default group is among them if a name spans the world."""
        return list({id(group): group for group in self._groups.values()}.values())

    @property
    def timeout(self) -> timedelta | None:
        """The time limit of the groups' collectives, for groups of your own beside them; None where the backend has none."""
        return timeout_of(next(iter(self._groups.values())))

    def check(self) -> None:
        """Run one collective on every group and compare who answered with the layout. Collective.

        Raises:
            RuntimeError: A group holds other ranks, or holds them in another order, than the layout says; or a rank
                does not answer within the group's time limit.
        """
        self._check_ranks()
        if dist.get_backend() == "fake":
            return
        done: set[int] = set()
        for name, group in self._groups.items():
            if id(group) in done:
                continue
            done.add(id(group))
            device = torch.device("cpu" if dist.get_backend(group) == "gloo" else self.device_type)
            want = self.layout.group_of(self.global_rank, name)
            mine = torch.tensor([self.global_rank], device=device)
            answers = [torch.empty_like(mine) for _ in range(self.size(name))]
            try:
                dist.all_gather(answers, mine, group=group)
                got = tuple(int(answer) for answer in answers)
            except RuntimeError as err:
                raise RuntimeError(
                    f"rank {self.global_rank}: an all-gather over {name} (ranks {want}) failed: one of them is gone, "
                    "stuck, or unreachable over the network."
                ) from err
            if got != want:
                raise RuntimeError(f"rank {self.global_rank}: {name} should be ranks {want}, but {got} answered.")

    def close(self, *, barrier: bool = True) -> None:
        """Destroy the groups made by `build`, and the default group if `build` made it. Collective; twice is fine.

        While other meshes of this process are open, the groups stay until the last of them closes.

        Args:
            barrier: Wait for all ranks first: gloo aborts a process whose peer leaves in the middle of a collective.
                False after a failure, when not all ranks will come.
        """
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        self._views.clear()
        self._roots.clear()
        self._groups.clear()
        if not dist.is_initialized():  # someone destroyed everything before us
            _closing.clear()
            return
        if barrier:
            dist.barrier()
        _closing.extend(self._pool.created)
        self._pool.created.clear()
        others = list(_open)
        if others:
            others[0]._owns_world |= self._owns_world
            return
        forget_meshes()
        while _closing:
            dist.destroy_process_group(_closing.pop())
        if self._owns_world:
            dist.destroy_process_group()

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(barrier=kind is None)

    def __repr__(self) -> str:
        place = f"rank {self.global_rank} of {self.layout.num_ranks}"
        return f"Mesh({str(self.layout.spec) or 'one rank'}, {place}, {self.device_type!r})"

    def _check_ranks(self) -> None:
        """The invariant of this package: an index on a name is the rank in its group."""
        for name, group in self._groups.items():
            want = self.layout.coord(self.global_rank, name)[name]
            got = dist.get_rank(group)
            if got != want or dist.get_world_size(group) != self.size(name):
                raise RuntimeError(
                    f"rank {self.global_rank} has index {want} of {self.size(name)} on {name}, but rank {got} of "
                    f"{dist.get_world_size(group)} in its process group. torch built another group than asked for."
                )

    def _view(self, key: tuple[str, ...]) -> DeviceMesh:
        _, axes = self.layout._resolve(key)  # names are known and do not overlap
        for name in key:
            self.group(name)
        root = next((root for root in self._roots if _is_subsequence(key, root.mesh_dim_names or ())), None)
        if root is None:
            # Named in another order, or a flatten: lay a mesh with the rest of the axes before the named ones.
            rest = tuple(axis for axis in self._roots[0].mesh_dim_names or () if axis not in axes)
            if any(axis in EXPERT_AXES for axis in axes):
                rest = tuple(axis for axis in self.layout.view("sparse").axes if axis not in axes)
            root = self._root((*rest, *key))
        return root[key]

    def _root(self, names: tuple[str, ...]) -> DeviceMesh:
        """A mesh over the whole world with these dimensions, in this order."""
        return DeviceMesh.from_group(
            [self._groups[name] for name in names],
            self.device_type,
            mesh=_rank_tensor(self.layout, names),
            mesh_dim_names=names,
        )


def _rank_tensor(layout: Layout, names: tuple[str, ...]) -> torch.Tensor:
    """The rank at each coordinate on ``names`` (together all axes of a view): shape = their sizes, int32."""
    grid, _ = layout._resolve(names)
    positions = torch.arange(layout.num_ranks).view(grid.sizes)
    # A flatten's own axes keep the grid's order among themselves, so that ranks ascend along it.
    axes = [axis for name in names for axis in sorted(layout._resolve([name])[1], key=grid.axes.index)]
    positions = positions.permute([grid.axes.index(axis) for axis in axes]).flatten()
    ranks = torch.tensor(list(grid.ranks), dtype=torch.int32)
    # From a flat tensor, so that strides descend at dimensions of size 1 too: torch 2.11 slices by comparing them.
    return ranks[positions].view([layout.size(name) for name in names])


def _is_subsequence(names: Sequence[str], of: Sequence[str]) -> bool:
    rest = iter(of)
    return all(name in rest for name in names)


def _world_message(layout: Layout, started: int) -> str:
    degrees = str(layout.spec) or "one rank"
    why = "some would have no place" if layout.num_ranks < started else "some places would be empty"
    return (
        f"the layout ({degrees}) has world_size={layout.num_ranks}, but {started} ranks were started: {why}. Use "
        f"dp_shard=-1 with world_size={started}, or start {layout.num_ranks} ranks."
    )


def _init_world(layout: Layout, device_type: str, timeout: timedelta | None) -> None:
    """Initialise the default group: from a launcher's environment, or alone."""
    backend = dist.get_default_backend_for_device(device_type)
    if device_type != "cpu":
        backend = f"cpu:gloo,{device_type}:{backend}"  # CPU tensors and objects travel too
    if "WORLD_SIZE" in os.environ:  # the launchers' protocol, which init_process_group reads as a whole
        dist.init_process_group(backend, timeout=timeout)
    elif layout.num_ranks == 1:
        dist.init_process_group(backend, store=cast(Any, dist).HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        raise ValueError(
            f"the layout has world_size={layout.num_ranks}, but this process is alone: torch.distributed is not "
            f"initialised and no launcher set WORLD_SIZE. Start {layout.num_ranks} processes with torchrun, call "
            "init_process_group first, or use a layout of one rank."
        )
