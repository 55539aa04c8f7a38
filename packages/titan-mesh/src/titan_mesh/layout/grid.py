"""Ranks on a grid with named axes: which coordinates a rank has, and which ranks share all but some of them.

A grid is a list of axes, outer to inner, and the rank that sits at each position in row-major order. A *group* over
some axes is the set of ranks that agree in every other coordinate, always in ascending order of rank: torch sorts the
ranks of a process group, so a rank's place in the list is its rank in the group. Flattening axes is the same
operation on several of them, whatever the order they are named in.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from titan_mesh.nearest import nearest_name


@dataclass(frozen=True)
class Grid:
    """Named axes over ranks; pure integers, no torch.

    Along each axis ranks ascend, so a coordinate on an axis is the rank's place in that axis's group.
    """

    axes: tuple[str, ...]
    """Axis names, outer to inner."""
    sizes: tuple[int, ...]
    """Size of each axis."""
    ranks: Sequence[int]
    """The rank at each position, row-major; ``range(n)`` for a grid laid out in its own order."""

    @cached_property
    def strides(self) -> dict[str, int]:
        """Positions between neighbours on each axis."""
        return {axis: math.prod(self.sizes[i + 1 :]) for i, axis in enumerate(self.axes)}

    @cached_property
    def _position(self) -> Sequence[int]:
        if isinstance(self.ranks, range):
            return self.ranks
        position = [0] * len(self.ranks)
        for i, rank in enumerate(self.ranks):
            position[rank] = i
        return position

    def size(self, *axes: str) -> int:
        """How many ranks a group over ``axes`` has."""
        return math.prod(self.sizes[self._index(axis)] for axis in axes)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Every group over ``axes``: a partition of the ranks, each group ascending, groups by their first rank."""
        inside = self.offsets(axes)
        outside = self.offsets([axis for axis in self.axes if axis not in axes])
        if isinstance(self.ranks, range):
            return [tuple(base + offset for offset in inside) for base in outside]
        return sorted(tuple(sorted(self.ranks[base + offset] for offset in inside)) for base in outside)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group over ``axes`` that holds ``rank``, ascending.

        Raises:
            ValueError: ``rank`` is not on the grid, or an axis is unknown.
        """
        coord = self.coord(rank)
        base = sum(coord[axis] * self.strides[axis] for axis in self.axes if axis not in axes)
        return tuple(sorted(self.ranks[base + offset] for offset in self.offsets(axes)))

    def coord(self, rank: int) -> dict[str, int]:
        """The coordinates of ``rank``, one per axis.

        Raises:
            ValueError: ``rank`` is not on the grid.
        """
        if not 0 <= rank < len(self.ranks):
            nearest = min(max(rank, 0), len(self.ranks) - 1)
            raise ValueError(
                f"rank={rank} is not one of the {len(self.ranks)} ranks 0..{len(self.ranks) - 1}. "
                f"Nearest valid: {nearest}."
            )
        position = self._position[rank]
        return {axis: position // self.strides[axis] % size for axis, size in zip(self.axes, self.sizes, strict=True)}

    def rank(self, **coord: int) -> int:
        """The rank at ``coord``; an axis of size 1 may be left out.

        Raises:
            ValueError: An axis is unknown, left out, or its coordinate is out of range.
        """
        for axis in coord:
            self._index(axis)
        position = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis not in coord and size > 1:
                raise ValueError(
                    f"{axis} is missing from {coord}: it has {size} coordinates. Give {axis}=0..{size - 1}."
                )
            index = coord.get(axis, 0)
            if not 0 <= index < size:
                nearest = min(max(index, 0), size - 1)
                raise ValueError(f"{axis}={index} is out of range 0..{size - 1}. Nearest valid: {axis}={nearest}.")
            position += index * self.strides[axis]
        return self.ranks[position]

    def offsets(self, axes: Sequence[str]) -> list[int]:
        """Ascending position offsets that the coordinates on ``axes`` span."""
        picked = sorted({self._index(axis) for axis in axes})
        steps = [[i * self.strides[self.axes[at]] for i in range(self.sizes[at])] for at in picked]
        return [sum(combination) for combination in itertools.product(*steps)]

    def _index(self, axis: str) -> int:
        if axis not in self.axes:
            hint = nearest_name(axis, self.axes)
            raise ValueError(f"{axis!r} is not an axis of this grid ({', '.join(self.axes)}).{hint}")
        return self.axes.index(axis)
