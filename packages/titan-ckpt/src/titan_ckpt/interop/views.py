"""Tensors that are not there yet: read from files a box at a time, through stacking, cutting, turning and scaling.

A Hugging Face folder and a model cut the same numbers in different ways: experts one by one or stacked, gate and up
projection apart or in one matrix, rotary pairs as neighbours or as halves, weights plain or as float8 with scales. Each
difference is one view here. A view has a dtype and a shape and can fill any box of itself, reading only the bytes that
box needs; so every conversion works for any sharding, and streams.

Boxes are ``(offsets, sizes)``, one number per dimension.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from titan_ckpt.errors import Damage
from titan_ckpt.format.boxes import Box
from titan_ckpt.format.index import StoredTensor
from titan_ckpt.format.names import ITEM_BYTES
from titan_ckpt.load.copies import box_copies, check_copies, run_copies
from titan_ckpt.load.reader import FolderReader
from titan_ckpt.state.dtypes import DTYPES

# A tensor is put together this many bytes at a time.
_PIECE_BYTES = 8 << 20


class View(Protocol):
    """A tensor that can be read a box at a time."""

    @property
    def dtype(self) -> str:
        """Safetensors dtype name."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        ...

    def check(self, box: Box) -> list[Damage]:
        """Damage among the bytes that ``box`` needs; nothing is found where files carry no digests.

        Raises:
            ValueError: If the tensor cannot be read at all.
        """
        ...

    def fill(self, box: Box, into: Tensor) -> None:
        """Write ``box`` to ``into``, a tensor of the box's shape in any dtype."""
        ...


@dataclass(frozen=True, slots=True)
class StoredView:
    """A tensor as files hold it."""

    reader: FolderReader
    stored: StoredTensor

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def check(self, box: Box) -> list[Damage]:
        return check_copies(self.reader, {"": box_copies(self.stored, box, _blank(box))})

    def fill(self, box: Box, into: Tensor) -> None:
        run_copies(self.reader, {"": box_copies(self.stored, box, into)})


@dataclass(frozen=True, slots=True)
class PartView:
    """``size`` indices of dimension ``dim`` of another view, from ``start``."""

    base: View
    dim: int
    start: int
    size: int

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.base.shape
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def check(self, box: Box) -> list[Damage]:
        return self.base.check(self._moved(box))

    def fill(self, box: Box, into: Tensor) -> None:
        self.base.fill(self._moved(box), into)

    def _moved(self, box: Box) -> Box:
        return _replaced(box[0], self.dim, box[0][self.dim] + self.start), box[1]


@dataclass(frozen=True)
class GrownView:
    """More rows than another view has: the new ones are the mean of its own, taken in float32."""

    base: View
    rows: int

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.base.shape[1:])

    def check(self, box: Box) -> list[Damage]:
        inner, new = self._split(box)
        return self.base.check(whole_box(self.base.shape) if new else inner)

    def fill(self, box: Box, into: Tensor) -> None:
        inner, new = self._split(box)
        old = inner[1][0]
        if old:
            self.base.fill(inner, into.narrow(0, 0, old))
        if new:
            columns = tuple(slice(o, o + n) for o, n in zip(box[0][1:], box[1][1:], strict=True))
            into.narrow(0, old, new).copy_(self._mean[columns].expand(new, *box[1][1:]))

    @functools.cached_property
    def _mean(self) -> Tensor:
        total = torch.zeros(self.base.shape[1:])
        for piece in row_pieces(self.base):
            rows = torch.empty(piece[1], dtype=DTYPES[self.dtype])
            self.base.fill(piece, rows)
            columns = tuple(slice(o, o + n) for o, n in zip(piece[0][1:], piece[1][1:], strict=True))
            total[columns] += rows.float().sum(0)
        return total / self.base.shape[0]

    def _split(self, box: Box) -> tuple[Box, int]:
        """The part of a box that lies in the base, and how many of its rows are new."""
        start, count = box[0][0], box[1][0]
        old = max(0, min(start + count, self.base.shape[0]) - start)
        return (box[0], (old, *box[1][1:])), count - old


@dataclass(frozen=True, slots=True)
class TransposedView:
    """A matrix with its two dimensions exchanged."""

    base: View

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape[::-1]

    def check(self, box: Box) -> list[Damage]:
        return self.base.check((box[0][::-1], box[1][::-1]))

    def fill(self, box: Box, into: Tensor) -> None:
        values = torch.empty(box[1][::-1], dtype=DTYPES[self.dtype])
        self.base.fill((box[0][::-1], box[1][::-1]), values)
        into.copy_(values.t())


@dataclass(frozen=True, slots=True)
class ItemView:
    """``base[index]``: one expert of a stack."""

    base: View
    index: int

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape[1:]

    def check(self, box: Box) -> list[Damage]:
        return self.base.check(((self.index, *box[0]), (1, *box[1])))

    def fill(self, box: Box, into: Tensor) -> None:
        self.base.fill(((self.index, *box[0]), (1, *box[1])), into.unsqueeze(0))


@dataclass(frozen=True, slots=True)
class StackView:
    """Views of one shape and dtype along a new first dimension."""

    items: tuple[View, ...]

    @property
    def dtype(self) -> str:
        return self.items[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.items), *self.items[0].shape)

    def check(self, box: Box) -> list[Damage]:
        (first, *offsets), (count, *sizes) = box
        inner = (tuple(offsets), tuple(sizes))
        return [damage for item in self.items[first : first + count] for damage in item.check(inner)]

    def fill(self, box: Box, into: Tensor) -> None:
        (first, *offsets), (count, *sizes) = box
        for place, item in enumerate(self.items[first : first + count]):
            item.fill((tuple(offsets), tuple(sizes)), into[place])


@dataclass(frozen=True, slots=True)
class JoinView:
    """Views one after the other along dimension ``dim``: gate and up projection in one matrix."""

    parts: tuple[View, ...]
    dim: int

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return _replaced(self.parts[0].shape, self.dim, sum(part.shape[self.dim] for part in self.parts))

    def check(self, box: Box) -> list[Damage]:
        return [damage for part, inner, _ in self._overlaps(box) for damage in part.check(inner)]

    def fill(self, box: Box, into: Tensor) -> None:
        for part, inner, at in self._overlaps(box):
            part.fill(inner, into.narrow(self.dim, at, inner[1][self.dim]))

    def _overlaps(self, box: Box) -> Iterator[tuple[View, Box, int]]:
        """Each part that the box touches, the box in its coordinates, and where that lies in the box."""
        low, high = box[0][self.dim], box[0][self.dim] + box[1][self.dim]
        start = 0
        for part in self.parts:
            end = start + part.shape[self.dim]
            begin, stop = max(low, start), min(high, end)
            if begin < stop:
                offsets = _replaced(box[0], self.dim, begin - start)
                yield part, (offsets, _replaced(box[1], self.dim, stop - begin)), begin - low
            start = end


@dataclass(frozen=True, slots=True)
class RotaryView:
    """Rows of a query or key projection with the channels of each head in the other rotary order.

    Hugging Face pairs channel ``d`` of a head with channel ``d + head_dim / 2`` (halves), Meta's code channel ``2 d``
    with ``2 d + 1`` (neighbours). The same weights in either order are the same model under the matching rotation.
    """

    base: View
    head_dim: int
    to_halves: bool
    """True reads neighbours as halves; False the reverse."""

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def check(self, box: Box) -> list[Damage]:
        return self.base.check(self._whole_heads(box))

    def fill(self, box: Box, into: Tensor) -> None:
        heads = self._whole_heads(box)
        rows = torch.empty(heads[1], dtype=DTYPES[self.dtype])
        self.base.fill(heads, rows)
        inner = (self.head_dim // 2, 2) if self.to_halves else (2, self.head_dim // 2)
        turned = rows.unflatten(0, (-1, *inner)).transpose(1, 2).flatten(0, 2)
        into.copy_(turned.narrow(0, box[0][0] - heads[0][0], box[1][0]))

    def _whole_heads(self, box: Box) -> Box:
        begin = box[0][0] // self.head_dim * self.head_dim
        end = -(-(box[0][0] + box[1][0]) // self.head_dim) * self.head_dim
        return (begin, *box[0][1:]), (end - begin, *box[1][1:])


@dataclass(frozen=True, slots=True)
class ScaledView:
    """A quantized tensor times its scales, one for each block of ``block``: read as bfloat16.

    Entry ``(r, c)`` is ``base[r, c] * scales[r // block[0], c // block[1]]``, computed in float32. So DeepSeek-V3
    (arXiv:2412.19437) is published; one scale per tensor or row is a block as large as that.
    """

    base: View
    scales: View
    """As many dimensions as ``base`` or fewer, the last ones of one block left out."""
    block: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def check(self, box: Box) -> list[Damage]:
        return [*self.base.check(box), *self.scales.check(self._stored_box(self._scale_box(box)))]

    def fill(self, box: Box, into: Tensor) -> None:
        values = torch.empty(box[1], dtype=DTYPES[self.base.dtype])
        self.base.fill(box, values)
        covering = self._scale_box(box)
        stored = self._stored_box(covering)
        scales = torch.empty(stored[1], dtype=torch.float32)
        self.scales.fill(stored, scales)
        scales = scales.reshape(covering[1])
        for dim in range(len(self.block)):
            at = torch.arange(box[0][dim], box[0][dim] + box[1][dim]) // self.block[dim] - covering[0][dim]
            scales = scales.index_select(dim, at)
        into.copy_(values.float() * scales)

    def _scale_box(self, box: Box) -> Box:
        low = tuple(at // size for at, size in zip(box[0], self.block, strict=True))
        high = [-(-(at + n) // size) for at, n, size in zip(*box, self.block, strict=True)]
        return low, tuple(h - at for h, at in zip(high, low, strict=True))

    def _stored_box(self, covering: Box) -> Box:
        dims = len(self.scales.shape)
        return covering[0][:dims], covering[1][:dims]


@dataclass(frozen=True, slots=True)
class RefusedView:
    """A tensor that files hold but that cannot be read: an error for who asks for it, nothing for who does not."""

    dtype: str
    shape: tuple[int, ...]
    reason: str
    """What is wrong, and what to do."""

    def check(self, box: Box) -> list[Damage]:
        raise ValueError(self.reason)

    def fill(self, box: Box, into: Tensor) -> None:
        raise ValueError(self.reason)


def whole_box(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return (0,) * len(shape), tuple(shape)


def row_pieces(view: View) -> Iterator[Box]:
    """Boxes of a few megabytes that make up a view in row-major order."""
    return row_boxes(view.shape, max(_PIECE_BYTES // ITEM_BYTES[view.dtype], 1))


def row_boxes(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``max_elements``, in row-major order, each contiguous in the whole."""
    if not math.prod(shape):
        return
    dim = 0
    while dim < len(shape) - 1 and math.prod(shape[dim + 1 :]) > max_elements:
        dim += 1
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[dim + 1 :])
    rows = max(max_elements // row, 1)
    outer = shape[:dim]
    for flat in range(math.prod(outer)):
        at: list[int] = []
        for size in reversed(outer):
            at.insert(0, flat % size)
            flat //= size
        for begin in range(0, shape[dim], rows):
            n = min(rows, shape[dim] - begin)
            yield (*at, begin, *(0,) * (len(shape) - dim - 1)), (*(1,) * dim, n, *shape[dim + 1 :])


def _blank(box: Box) -> Tensor:
    """A tensor of the box's shape without memory, where only the shape matters."""
    return torch.empty(box[1], dtype=torch.uint8, device="meta")


def _replaced(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
