"""Which rank computes the update of which matrix, and what is sent for it: a pure function of shapes and places.

Problem: Newton-Schulz needs a whole matrix, and under FSDP and tensor parallelism a rank holds a piece of each. To gather every
matrix everywhere repeats the work on every rank; torch's Muon on DTensors does, with some fifteen collectives a matrix.

Idea: each matrix has one *owner* among the ranks that hold pieces of it. The pieces of the momentum go to the owner, the owner
computes, and the pieces of the update come back: two all-to-alls for a bucket of matrices. The momentum itself stays where
the weight is, in the weight's layout: memory is balanced as the weights are, and a checkpoint is as of any other optimizer.

Balance: the most expensive matrix first, each to the least loaded of its holders (LPT: at most 4/3 of the best). A bucket is a
stretch of that order, so that its owners are balanced too.

Cost: of m x n elements each rank sends and receives its own share twice, in bf16 4 bytes an element over the ranks. Tensor
parallelism takes the same way. The other one, all-reducing the m x m product X X^T in each of the five steps, sends about
20 m^2 bytes from each of t ranks; owning sends 4 m n / t. It is cheaper as long as n < 5 t m, which holds for every matrix of a
transformer, so it is the only way here.

Limits: fewer matrices than ranks leave ranks without work. Stacks of experts are divided by experts, a matrix never.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titan_train.optim.newton_schulz import flops

BUCKET_ELEMENTS = 1 << 25
"""Elements that a rank has under way at a time, about."""


class Box(NamedTuple):
    """A part of a stack of matrices ``[E, m, n]``; a plain matrix is a stack of one."""

    expert: int
    row: int
    column: int
    experts: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.experts * self.rows * self.columns


class MatrixPiece(NamedTuple):
    """A part of a unit, and who holds it."""

    box: Box
    holders: tuple[int, ...]
    source: int
    """The holder that sends it to the owner; the owner itself where it can."""


@dataclass(frozen=True, slots=True)
class OwnedUnit:
    """Matrices whose update one rank computes at once."""

    matrix: int
    """Index of the parameter."""
    expert: int
    """First of its matrices."""
    experts: int
    """How many."""
    pieces: tuple[MatrixPiece, ...]
    owner: int

    @property
    def is_local(self) -> bool:
        """The owner alone holds it all: nothing is sent."""
        return all(piece.holders == (self.owner,) for piece in self.pieces)


@dataclass(slots=True)
class OwnershipPlan:
    """Who computes what."""

    local: list[OwnedUnit]
    """Units that no other rank than the owner holds."""
    buckets: list[list[OwnedUnit]]
    """The others; two collectives a bucket."""
    loads: list[float] = field(default_factory=list[float])
    """FLOPs of each rank."""


class Stack(NamedTuple):
    """A parameter as a stack of matrices."""

    shape: tuple[int, int, int]
    """Of the whole: matrices, rows, columns."""
    parts: tuple[int, ...]
    """Rows of each part that is orthogonalized by itself."""


def plan_ownership(
    stacks: Sequence[Stack], held: Sequence[Sequence[Sequence[Box]]], *, bucket_elements: int = BUCKET_ELEMENTS
) -> OwnershipPlan:
    """Give each matrix an owner. The same on every rank that is given the same.

    Args:
        stacks: The parameters.
        held: By rank and parameter, the boxes that are there.
        bucket_elements: Elements of a bucket for each rank.
    """
    units = [unit for matrix, stack in enumerate(stacks) for unit in _units(matrix, stack, [h[matrix] for h in held])]
    costs = {id(unit): unit.experts * sum(map(flops, *_shapes(stacks[unit.matrix]))) for unit in units}
    loads = [0.0] * len(held)
    plan = OwnershipPlan([], [], loads)
    filled = 0
    for unit in sorted(units, key=lambda unit: -costs[id(unit)]):
        holders = sorted({rank for piece in unit.pieces for rank in piece.holders})
        owner = min(holders, key=lambda rank: loads[rank])
        loads[owner] += costs[id(unit)]
        pieces = tuple(p._replace(source=owner if owner in p.holders else p.holders[0]) for p in unit.pieces)
        unit = OwnedUnit(unit.matrix, unit.expert, unit.experts, pieces, owner)
        if unit.is_local:
            plan.local.append(unit)
            continue
        if not plan.buckets or filled >= bucket_elements * len(held):
            plan.buckets.append([])
            filled = 0
        plan.buckets[-1].append(unit)
        filled += sum(piece.box.numel for piece in pieces)
    return plan


def alike(units: Sequence[OwnedUnit], stacks: Sequence[Stack], *, most: int = BUCKET_ELEMENTS) -> list[list[OwnedUnit]]:
    """Units of one shape together, to be computed as one batch of at most about ``most`` elements; largest costs first."""
    batches: list[list[OwnedUnit]] = []
    open_: dict[tuple[object, ...], tuple[int, list[OwnedUnit]]] = {}
    for unit in units:
        stack = stacks[unit.matrix]
        key = stack.shape[1:], stack.parts
        size = unit.experts * stack.shape[1] * stack.shape[2]
        filled, batch = open_.get(key, (most, []))
        if filled + size > most:
            filled, batch = 0, []
            batches.append(batch)
        batch.append(unit)
        open_[key] = filled + size, batch
    return batches


def _shapes(stack: Stack) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return stack.parts, (stack.shape[2],) * len(stack.parts)


def _units(matrix: int, stack: Stack, held: Sequence[Sequence[Box]]) -> Iterator[OwnedUnit]:
    """The matrices of a parameter, apart where different ranks hold them; owners are not chosen yet."""
    count, rows, columns = stack.shape
    ends = {end for boxes in held for box in boxes for end in (box.expert, box.expert + box.experts)}
    for start, stop in itertools.pairwise(sorted({0, count} | ends)):
        there = {
            rank: [box for box in boxes if box.expert <= start and stop <= box.expert + box.experts]
            for rank, boxes in enumerate(held)
        }
        there = {rank: boxes for rank, boxes in there.items() if boxes}
        if not there:  # it has no gradient
            continue
        every = min(len(there), stop - start)  # of a stack that several ranks share, each can own some
        borders = [start + (stop - start) * i // every for i in range(every + 1)]
        for first, last in itertools.pairwise(borders):
            holders: dict[Box, list[int]] = {}
            for rank, boxes in there.items():
                for box in boxes:
                    holders.setdefault(box._replace(expert=first, experts=last - first), []).append(rank)
            area = sum(box.rows * box.columns for box in holders)
            assert area == rows * columns, f"pieces of {area} elements make up {rows} x {columns}"
            pieces = tuple(MatrixPiece(box, tuple(ranks), ranks[0]) for box, ranks in holders.items())
            yield OwnedUnit(matrix, first, last - first, pieces, -1)
