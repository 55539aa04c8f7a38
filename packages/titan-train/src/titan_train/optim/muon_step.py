"""A step of Muon over ranks: pieces of the momentum to the owners of matrices, and pieces of the update back.

`MuonStep` has this rank's tensors of one step: it moves the momentum where it is, computes what this rank owns and applies what
comes back. `MuonBucket` sends the pieces of some matrices: one message from each rank to each on the way up, one on the way down,
laid out once. A message is bytes: the pieces in ``Rule.dtype``, and with NorMuon the means of their rows in float32.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from titan_ckpt import LocalShard
from torch import Tensor, nn

from titan_train.optim.newton_schulz import Rule, update_of, update_scale
from titan_train.optim.ownership import Box, MatrixPiece, OwnedUnit, Stack, alike
from titan_train.optim.update import decay_towards, plain_tensor

_ALIGNED = 16
"""Bytes that each part of a message begins at a multiple of."""


@dataclass(slots=True)
class MuonMatrix:
    """A parameter that Muon takes."""

    name: str
    parameter: nn.Parameter
    stack: Stack
    shard: LocalShard | None
    """Where the parameter is in the whole one, if tensor or expert parallelism cut it."""


class MuonStep:
    """The tensors of one step on this rank."""

    def __init__(
        self,
        matrices: Sequence[MuonMatrix],
        starts: Sequence[Sequence[tuple[Box, tuple[int, int, int]]]],
        states: Sequence[Mapping[str, Tensor]],
        settings: Sequence[Mapping[str, Any]],
        rule: Rule,
        *,
        momentum: float,
        nesterov: bool,
        device: torch.device,
    ) -> None:
        """Decay the weights and move the momentum, both where they are; of matrices with a gradient.

        Args:
            matrices: All of this rank's.
            starts: Of each, its boxes and where each begins in the local tensor.
            states: Of each, its momentum and row means.
            settings: Of each, its ``lr`` and ``weight_decay``.
            rule: How an update is computed.
            momentum: Decay of the running mean.
            nesterov: Whether the update is of gradient and mean.
            device: Where updates are computed.
        """
        self._matrices, self._starts, self._rule, self._settings = matrices, starts, rule, settings
        self.device = device
        self._weights = [stacked(matrix.parameter) for matrix in self._matrices]
        self._row_means = [None if self._rule.beta2 is None else stacked(s["muon_row_mean"]) for s in states]
        self._moves: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        means = [stacked(state["muon_momentum"]) for state in states]
        self._sources = means.copy()
        active = [index for index, matrix in enumerate(matrices) if matrix.parameter.grad is not None]
        gradients = [stacked(matrices[index].parameter.grad) for index in active]
        moved = [means[index] for index in active]
        torch._foreach_lerp_(moved, gradients, 1 - momentum)  # pyright: ignore[reportPrivateImportUsage]
        if nesterov:
            torch._foreach_lerp_(gradients, moved, momentum)  # pyright: ignore[reportPrivateImportUsage]
            for index, gradient in zip(active, gradients, strict=True):
                self._sources[index] = gradient
        plain = [index for index in active if not settings[index].get("cautious", False)]
        kept = [1 - settings[index]["lr"] * settings[index]["weight_decay"] for index in plain]
        if plain:
            torch._foreach_mul_([self._weights[index] for index in plain], kept)  # pyright: ignore[reportPrivateImportUsage]

    def source(self, unit: OwnedUnit, box: Box) -> tuple[Tensor, Tensor | None]:
        """What this rank holds of a box: what is orthogonalized, and the row means."""
        means = self._row_means[unit.matrix]
        where = self._where(unit.matrix, box)
        return self._sources[unit.matrix][where], None if means is None else means[where[:2]]

    def compute(
        self,
        units: Sequence[OwnedUnit],
        arrived: Callable[[MatrixPiece], tuple[Tensor, Tensor | None] | None],
        send: Callable[[MatrixPiece, Tensor, Tensor | None], None],
    ) -> None:
        """Update units that this rank owns, all in one batch.

        Args:
            units: Which; alike in shape and parts.
            arrived: A piece from another rank; None for one that is here.
            send: Called with each piece of the result.
        """
        stack = self._matrices[units[0].matrix].stack
        _, rows, columns = stack.shape
        count = sum(unit.experts for unit in units)
        whole = torch.empty((count, rows, columns), dtype=self._rule.dtype, device=self.device)
        normalizes = self._rule.beta2 is not None
        means = torch.empty((count, rows, 1), device=self.device) if normalizes else None
        places: list[tuple[OwnedUnit, MatrixPiece, tuple[slice, slice, slice]]] = []
        first = 0
        for unit in units:
            places += [(unit, piece, _inside(unit, piece.box, first)) for piece in unit.pieces]
            first += unit.experts
        found = [arrived(piece) or self.source(unit, piece.box) for unit, piece, _ in places]
        torch._foreach_copy_([whole[at] for _, _, at in places], [values for values, _ in found])  # pyright: ignore[reportPrivateImportUsage]
        if means is not None:
            for (_, _, at), (_, row_means) in zip(places, found, strict=True):
                assert row_means is not None
                means[at[:2]].copy_(row_means)
        update = update_of(whole, means, self._rule, stack.parts)
        for unit, piece, at in places:
            part, row_means = update[at], None if means is None else means[at[:2]]
            send(piece, part, row_means)
            if unit.owner in piece.holders:
                self.apply(unit, piece.box, part, row_means)
        self.finish()

    def apply(self, unit: OwnedUnit, box: Box, update: Tensor, row_means: Tensor | None) -> None:
        """Move this rank's part of a weight, by the next `finish`, and keep its row means."""
        where = self._where(unit.matrix, box)
        weight, stack = self._weights[unit.matrix][where], self._matrices[unit.matrix].stack
        settings = self._settings[unit.matrix]
        lr, update = settings["lr"], update.to(weight.device)
        if settings.get("cautious", False):
            decay_towards(weight, update, lr * settings["weight_decay"])
        for first, last, scale in _scales(stack, self._rule, box.row, box.row + box.rows):
            weights, updates = self._moves.setdefault(-lr * scale, ([], []))
            weights.append(weight[:, first:last])
            updates.append(update[:, first:last])
        kept = self._row_means[unit.matrix]
        if kept is not None and row_means is not None:
            kept[where[:2]].copy_(row_means)

    def finish(self) -> None:
        """Make the moves of all `apply` since the last call."""
        for alpha, (weights, updates) in self._moves.items():
            torch._foreach_add_(weights, updates, alpha=alpha)  # pyright: ignore[reportPrivateImportUsage]
        self._moves.clear()

    def _where(self, matrix: int, box: Box) -> tuple[slice, slice, slice]:
        for held, (expert, row, column) in self._starts[matrix]:
            inside = held.expert <= box.expert and box.expert + box.experts <= held.expert + held.experts
            if inside and held[1:3] == box[1:3] and held[4:] == box[4:]:
                first = expert + box.expert - held.expert
                return (
                    slice(first, first + box.experts),
                    slice(row, row + box.rows),
                    slice(column, column + box.columns),
                )
        raise AssertionError(f"{box} of {self._matrices[matrix].name} is not here")


class MuonBucket:
    """Some units whose pieces travel together: one message from each rank to each on the way up, one on the way down."""

    def __init__(
        self,
        units: list[OwnedUnit],
        stacks: Sequence[Stack],
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        rule: Rule,
    ) -> None:
        self._group = group
        self._mine = alike([unit for unit in units if unit.owner == rank], stacks)
        pieces = [(unit, piece) for unit in units for piece in unit.pieces]
        mine = [(unit, piece) for unit, piece in pieces if unit.owner == rank]
        others = [(unit, piece) for unit, piece in pieces if unit.owner != rank]
        self._up_out = _Message([(u.owner, u, p) for u, p in others if p.source == rank], size, rule)
        self._up_in = _Message([(p.source, u, p) for u, p in mine if p.source != rank], size, rule)
        down = [(holder, u, p) for u, p in mine for holder in p.holders if holder != rank]
        self._down_out = _Message(down, size, rule)
        self._down_in = _Message([(u.owner, u, p) for u, p in others if rank in p.holders], size, rule)

    def send_up(self, work: MuonStep) -> Callable[[], Callable[[], None]]:
        """Begin to send pieces to their owners; the result waits, computes and begins to send them back."""
        out, into = self._up_out.buffer(work.device), self._up_in.buffer(work.device)
        for place in self._up_out.places:
            self._up_out.write(out, place, *work.source(place.unit, place.piece.box))
        moving = self._exchange(into, out, self._up_in, self._up_out)
        return functools.partial(self._compute, work, into, out, moving)

    def _compute(self, work: MuonStep, into: Tensor, sent: Tensor, moving: dist.Work) -> Callable[[], None]:
        moving.wait()
        del sent
        out, back = self._down_out.buffer(work.device), self._down_in.buffer(work.device)
        arrived = {id(place.piece): place for place in self._up_in.places}
        leaving: dict[int, list[_Place]] = {}
        for place in self._down_out.places:
            leaving.setdefault(id(place.piece), []).append(place)

        def received(piece: MatrixPiece) -> tuple[Tensor, Tensor | None] | None:
            place = arrived.get(id(piece))
            return None if place is None else self._up_in.read(into, place)

        def send(piece: MatrixPiece, update: Tensor, means: Tensor | None) -> None:
            for place in leaving.get(id(piece), ()):
                self._down_out.write(out, place, update, means)

        for units in self._mine:
            work.compute(units, received, send)
        moving = self._exchange(back, out, self._down_in, self._down_out)
        return functools.partial(self._finish, work, back, out, moving)

    def _finish(self, work: MuonStep, back: Tensor, sent: Tensor, moving: dist.Work) -> None:
        moving.wait()
        del sent
        for place in self._down_in.places:
            work.apply(place.unit, place.piece.box, *self._down_in.read(back, place))
        work.finish()

    def _exchange(self, into: Tensor, out: Tensor, received: "_Message", sent: "_Message") -> dist.Work:
        work = dist.all_to_all_single(into, out, received.sizes, sent.sizes, group=self._group, async_op=True)
        assert work is not None
        return work


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a piece is in a message."""

    unit: OwnedUnit
    piece: MatrixPiece
    at: int
    """Its first byte."""


class _Message:
    """The bytes between this rank and all others, of pieces in the order of units, one rank after the other."""

    def __init__(self, pieces: Sequence[tuple[int, OwnedUnit, MatrixPiece]], size: int, rule: Rule) -> None:
        self._rule = rule
        self.places: list[_Place] = []
        self.sizes = [0] * size
        at = 0
        for peer, unit, piece in sorted(pieces, key=lambda entry: entry[0]):
            self.places.append(_Place(unit, piece, at))
            length = self._values_length(piece.box) + (_padded(4 * _rows(piece.box)) if rule.beta2 is not None else 0)
            self.sizes[peer] += length
            at += length

    def buffer(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(sum(self.sizes), dtype=torch.uint8, device=device)

    def read(self, buffer: Tensor, place: _Place) -> tuple[Tensor, Tensor | None]:
        """The values of a piece ``[experts, rows, columns]``, and the means of its rows ``[experts, rows, 1]``."""
        box = place.piece.box
        size = box.numel * self._rule.dtype.itemsize
        values = buffer[place.at : place.at + size].view(self._rule.dtype).view(box.experts, box.rows, box.columns)
        if self._rule.beta2 is None:
            return values, None
        at = place.at + self._values_length(box)
        return values, buffer[at : at + 4 * _rows(box)].view(torch.float32).view(box.experts, box.rows, 1)

    def write(self, buffer: Tensor, place: _Place, values: Tensor, means: Tensor | None) -> None:
        """Fill in a piece."""
        into, into_means = self.read(buffer, place)
        into.copy_(values)
        if into_means is not None and means is not None:
            into_means.copy_(means)

    def _values_length(self, box: Box) -> int:
        return _padded(box.numel * self._rule.dtype.itemsize)


def _rows(box: Box) -> int:
    return box.experts * box.rows


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _inside(unit: OwnedUnit, box: Box, first: int) -> tuple[slice, slice, slice]:
    """A piece's place in a batch in which the unit begins at ``first``."""
    rows, columns = slice(box.row, box.row + box.rows), slice(box.column, box.column + box.columns)
    at = first + box.expert - unit.expert
    return slice(at, at + box.experts), rows, columns


def _scales(stack: Stack, rule: Rule, first: int, last: int) -> list[tuple[int, int, float]]:
    """Stretches of rows ``first`` to ``last``, counted from ``first``, and the scale of the part that each belongs to."""
    columns = stack.shape[2]
    if len(set(stack.parts)) == 1:
        return [(0, last - first, update_scale(rule.scale, stack.parts[0], columns))]
    found: list[tuple[int, int, float]] = []
    begin = 0
    for part in stack.parts:
        low, high = max(begin, first), min(begin + part, last)
        if low < high:
            found.append((low - first, high - first, update_scale(rule.scale, part, columns)))
        begin += part
    return found


def stacked(tensor: Tensor | None) -> Tensor:
    """The local values, which share memory, as a stack of matrices."""
    local = plain_tensor(tensor)
    return local[None] if local.ndim == 2 else local
