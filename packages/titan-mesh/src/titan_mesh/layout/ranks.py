"""Which rank sits where: coordinates and groups.

A layout is a `MeshSpec` laid over the ranks of a world. Two grids share those ranks:

- *dense*: the five axes in the spec's order, ``rank = sum(coordinate * stride)``;
- *sparse*: ``(pp, dp_replicate, efsdp, ep, etp)``, the same ranks as the experts see them. The ranks that ``dp_shard``,
  ``cp`` and ``tp`` span, in ascending order, are laid on a grid of ``efsdp``, ``ep`` and ``etp`` in the spec's
  ``expert_order``, so that ``efsdp * ep * etp = dp_shard * cp * tp``. The axis ``etp`` is there only above 1.

Several axes together are a *flatten*, registered under a name. Every layout has three: ``dp`` (ranks that read
different samples), ``fsdp`` (ranks that shard one model copy's parameters) and ``loss`` (ranks whose losses are
summed).
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

from titan_mesh.layout.grid import Grid
from titan_mesh.layout.spec import AXES, EXPERT_AXES, EXPERT_REGION, MeshSpec
from titan_mesh.layout.topology import Topology
from titan_mesh.nearest import nearest_name

_FLATTENS = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}


@dataclass(frozen=True)
class RankLayout:
    """Every rank's coordinates and groups. `Layout` adds explanation, validation and comparison."""

    spec: MeshSpec
    """Degrees and order; resolved: no degree is -1 after construction."""
    world_size: int | None = None
    """Number of ranks; None means the product of the degrees."""
    topology: Topology = field(default_factory=Topology)
    """Which ranks share a node and NVLink."""
    flattens: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(_FLATTENS))
    """Names for several axes together; add one with `flatten`."""

    def __post_init__(self) -> None:
        world_size = self.world_size
        if world_size is None:
            if -1 in self.spec.degrees.values():
                raise ValueError(f"{self.spec} has a degree to infer: give Layout a world_size.")
            world_size = math.prod(self.spec.degrees.values())
        object.__setattr__(self, "spec", self.spec.resolve(world_size))
        object.__setattr__(self, "world_size", world_size)

    # --- names ---------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that has groups: the axes in order, the flattens, and the expert axes if ``ep * etp`` is above 1."""
        experts = self.spec.expert_axes if self.spec.ep * self.spec.etp > 1 else ()
        return (*self.spec.axes, *self.flattens, *experts)

    def flatten(self, name: str, axes: Sequence[str]) -> Self:
        """A layout that also knows ``axes`` together as ``name``.

        The order of ``axes`` does not matter: a group ascends by rank, so that a rank's index in it is its group rank.

        Raises:
            ValueError: ``name`` is taken by other axes, or an axis is unknown or named twice.
        """
        for axis in axes:
            if axis not in AXES:
                raise ValueError(
                    f"flatten {name!r} of {tuple(axes)}: {axis!r} is not an axis of this layout ({', '.join(AXES)})."
                    f"{nearest_name(axis, AXES)}"
                )
        if len(set(axes)) != len(axes) or not axes:
            raise ValueError(f"flatten {name!r} of {tuple(axes)}: name at least one axis, and each once.")
        taken = (*AXES, *EXPERT_AXES, "world")
        if name in taken or set(self.flattens.get(name, axes)) != set(axes):
            raise ValueError(
                f"flatten {name!r} of {tuple(axes)}: the name is taken"
                + (f" by {' x '.join(self.flattens[name])}" if name in self.flattens else "")
                + f". Choose another, such as {'_'.join(axes)!r}."
            )
        ordered = tuple(axis for axis in AXES if axis in axes)
        return replace(self, flattens={**self.flattens, name: ordered})

    # --- ranks ---------------------------------------------------------------------------------------------------

    def size(self, *names: str) -> int:
        """How many ranks a group over ``names`` has."""
        grid, axes = self._resolve(names)
        return grid.size(*axes)

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """Every group over ``names`` (axes or flattens), each ascending: ``groups("tp")[0] == (0, 1, …)``."""
        grid, axes = self._resolve(names)
        return grid.groups(*axes)

    def group_of(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that ``rank`` meets in its group over ``names``, itself included, ascending."""
        grid, axes = self._resolve(names)
        return grid.group_of(rank, *axes)

    def coord(self, rank: int, *names: str) -> dict[str, int]:
        """The index of ``rank`` on each of ``names``; without names, on the five axes in order.

        ``coord(37, "pp", "dp", "tp")`` counts flattens too. The index on a name is the rank in that name's group.
        """
        if not names:
            return self._dense.coord(rank)
        return {name: self.group_of(rank, name).index(rank) for name in names}

    def rank(self, **coord: int) -> int:
        """The rank at ``coord``: indices on axes, or on flattens; names of size 1 may be left out.

        Raises:
            ValueError: A name is unknown, out of range, given twice (by itself and in a flatten), or missing.
        """
        axes: dict[str, int] = {}
        for name, index in coord.items():
            for axis, value in self._split(name, index).items():
                if axis in axes:
                    raise ValueError(f"{axis} is given twice in {coord}: once by itself and once within a flatten.")
                axes[axis] = value
        return self._dense.rank(**axes)

    def view(self, name: Literal["dense", "sparse"]) -> Grid:
        """A grid over the same ranks: ``"dense"`` (the five axes) or ``"sparse"`` (as experts see them)."""
        if name == "dense":
            return self._dense
        if name == "sparse":
            return self._sparse
        raise ValueError(f"view {name!r} is unknown. The views are 'dense' and 'sparse'.")

    def digest(self) -> str:
        """A fingerprint of everything that decides groups: equal digests, equal groups."""
        text = f"{self.world_size} {self.spec.degrees} ep={self.spec.ep} {sorted(self.flattens.items())}"
        if self.spec.etp > 1 or self.spec.expert_axes != ("efsdp", "ep"):
            text += f" etp={self.spec.etp} {self.spec.expert_axes}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.digest())

    # --- internals -----------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """The world size, as an int for type checkers."""
        assert self.world_size is not None  # set at construction
        return self.world_size

    @cached_property
    def _dense(self) -> Grid:
        degrees = self.spec.degrees
        return Grid(tuple(degrees), tuple(degrees.values()), range(self.num_ranks))

    @cached_property
    def _sparse(self) -> Grid:
        spec, dense = self.spec, self._dense
        region = dense.size(*EXPERT_REGION)
        degrees = {"efsdp": region // (spec.ep * spec.etp), "ep": spec.ep, "etp": spec.etp}
        sizes = (spec.pp, spec.dp_replicate, *(degrees[axis] for axis in spec.expert_axes))
        offsets = dense.offsets(EXPERT_REGION)
        ranks = [
            pp * dense.strides["pp"] + replica * dense.strides["dp_replicate"] + offset
            for pp in range(spec.pp)
            for replica in range(spec.dp_replicate)
            for offset in offsets
        ]
        return Grid(("pp", "dp_replicate", *spec.expert_axes), sizes, ranks)

    def _resolve(self, names: Sequence[str]) -> tuple[Grid, tuple[str, ...]]:
        """The grid that ``names`` live on, and its axes that they stand for."""
        if not names:
            raise ValueError(f"name at least one axis: {', '.join(self.names)}.")
        axes: list[str] = []
        for name in names:
            if name not in (*AXES, *self.flattens, *self.spec.expert_axes):
                raise ValueError(
                    f"{name!r} is neither an axis nor a registered flatten. Known: {', '.join(self.names)}."
                    f"{nearest_name(name, self.names)}"
                )
            for axis in self.flattens.get(name, (name,)):
                if axis in axes:
                    raise ValueError(f"{axis} is named twice in {tuple(names)}: flattens and axes must not overlap.")
                axes.append(axis)
        sparse = any(axis in EXPERT_AXES for axis in axes)
        grid = self._sparse if sparse else self._dense
        for axis in axes:
            if axis not in grid.axes:
                raise ValueError(
                    f"{tuple(names)} mixes the expert view with {axis}: efsdp, ep and etp are made of dp_shard, cp and tp. "
                    "Combine them with pp and dp_replicate only."
                )
        return grid, tuple(axes)

    def _split(self, name: str, index: int) -> dict[str, int]:
        """The coordinates on a flatten's own axes that its ``index`` stands for."""
        grid, axes = self._resolve([name])
        if grid is not self._dense:
            raise ValueError(f"{name} is an axis of the expert view: use view('sparse').rank({name}={index}, …).")
        size = grid.size(*axes)
        if not 0 <= index < size:
            nearest = min(max(index, 0), size - 1)
            raise ValueError(f"{name}={index} is out of range 0..{size - 1}. Nearest valid: {name}={nearest}.")
        rank = grid.group_of(0, *axes)[index]
        coord = grid.coord(rank)
        return {axis: coord[axis] for axis in axes}
