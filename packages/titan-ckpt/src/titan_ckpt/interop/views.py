"""Lazy tensors that are read from files box by box, so that layouts are converted without holding whole tensors.

A Hugging Face folder and a model store the same numbers in different ways: experts separate or stacked, gate and up
projection separate or in one matrix, rotary channels as neighbors or as halves, weights plain or as float8 with scales.
Each difference is one view. A view reads only the bytes that a box needs, so every conversion works for any sharding.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from titan_ckpt.errors import Damage, DamageError
from titan_ckpt.format.boxes import Box
from titan_ckpt.format.index import StoredTensor
from titan_ckpt.format.names import ITEM_BYTES
from titan_ckpt.load.copies import box_copies, check_copies, run_copies
from titan_ckpt.load.reader import StepReader
from titan_ckpt.state.dtypes import DTYPES

# A tensor is read this many bytes at a time.
_PIECE_BYTES = 8 << 20


class View:
    """A tensor that can be read box by box.

    Args:
        dtype: Safetensors dtype name.
        shape: The whole tensor's shape.
    """

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self.dtype, self.shape = dtype, tuple(shape)

    def needs(self, box: Box) -> list[tuple["View", Box]]:
        """The boxes of other views that ``box`` is made of."""
        return []

    def check(self, box: Box) -> list[Damage]:
        """The damage in the bytes that ``box`` needs; none if the files have no digests.

        Raises:
            ValueError: If the tensor cannot be read at all.
        """
        return [damage for view, inner in self.needs(box) for damage in view.check(inner)]

    def fill(self, box: Box, into: Tensor) -> None:
        """Write ``box`` to ``into``, which has the box's shape and any dtype."""
        raise NotImplementedError


class StoredView(View):
    """A tensor as it is stored."""

    def __init__(self, reader: StepReader, stored: StoredTensor) -> None:
        super().__init__(stored.dtype, stored.shape)
        self.reader, self.stored = reader, stored

    def check(self, box: Box) -> list[Damage]:
        blank = torch.empty(box[1], dtype=torch.uint8, device="meta")
        return check_copies(self.reader, {"": box_copies(self.stored, box, blank)})

    def fill(self, box: Box, into: Tensor) -> None:
        run_copies(self.reader, {"": box_copies(self.stored, box, into)})


class PartView(View):
    """``size`` indices of a view along ``dim``, from ``start``."""

    def __init__(self, base: View, dim: int, start: int, size: int) -> None:
        super().__init__(base.dtype, _replaced(base.shape, dim, size))
        self.base, self.dim, self.start = base, dim, start

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.base, (_replaced(box[0], self.dim, box[0][self.dim] + self.start), box[1]))]

    def fill(self, box: Box, into: Tensor) -> None:
        ((base, inner),) = self.needs(box)
        base.fill(inner, into)


class GrownView(View):
    """A view with additional rows. They are the mean of the view's rows, computed in float32."""

    def __init__(self, base: View, rows: int) -> None:
        super().__init__(base.dtype, (rows, *base.shape[1:]))
        self.base = base

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        inner, new = self._split(box)
        return [(self.base, whole_box(self.base.shape) if new else inner)]

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
            rows = read_box(self.base, piece)
            columns = tuple(slice(o, o + n) for o, n in zip(piece[0][1:], piece[1][1:], strict=True))
            total[columns] += rows.float().sum(0)
        return total / self.base.shape[0]

    def _split(self, box: Box) -> tuple[Box, int]:
        """The part of a box that is in the base, and its number of new rows."""
        start, count = box[0][0], box[1][0]
        old = max(0, min(start + count, self.base.shape[0]) - start)
        return (box[0], (old, *box[1][1:])), count - old


class TransposedView(View):
    """A transposed matrix, or a stack of them."""

    def __init__(self, base: View) -> None:
        super().__init__(base.dtype, _swapped(base.shape))
        self.base = base

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.base, (_swapped(box[0]), _swapped(box[1])))]

    def fill(self, box: Box, into: Tensor) -> None:
        into.copy_(read_box(*self.needs(box)[0]).mT)


class ItemView(View):
    """``base[index]``: one expert of a stack."""

    def __init__(self, base: View, index: int) -> None:
        super().__init__(base.dtype, base.shape[1:])
        self.base, self.index = base, index

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.base, ((self.index, *box[0]), (1, *box[1])))]

    def fill(self, box: Box, into: Tensor) -> None:
        self.base.fill(self.needs(box)[0][1], into.unsqueeze(0))


class StackView(View):
    """Views of the same shape and dtype, stacked along a new first dimension."""

    def __init__(self, items: Sequence[View]) -> None:
        super().__init__(items[0].dtype, (len(items), *items[0].shape))
        self.items = items

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        (first, *offsets), (count, *sizes) = box
        return [(item, (tuple(offsets), tuple(sizes))) for item in self.items[first : first + count]]

    def fill(self, box: Box, into: Tensor) -> None:
        for place, (item, inner) in enumerate(self.needs(box)):
            item.fill(inner, into[place])


class JoinView(View):
    """Views joined along ``dim``: gate and up projection in one matrix."""

    def __init__(self, parts: Sequence[View], dim: int) -> None:
        super().__init__(parts[0].dtype, _replaced(parts[0].shape, dim, sum(part.shape[dim] for part in parts)))
        self.parts, self.dim = parts, dim

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        low, high, start = box[0][self.dim], box[0][self.dim] + box[1][self.dim], 0
        found: list[tuple[View, Box]] = []
        for part in self.parts:
            begin, stop = max(low, start), min(high, start + part.shape[self.dim])
            if begin < stop:
                offsets = _replaced(box[0], self.dim, begin - start)
                found.append((part, (offsets, _replaced(box[1], self.dim, stop - begin))))
            start += part.shape[self.dim]
        return found

    def fill(self, box: Box, into: Tensor) -> None:
        at = 0
        for part, inner in self.needs(box):
            part.fill(inner, into.narrow(self.dim, at, inner[1][self.dim]))
            at += inner[1][self.dim]


class RotaryView(View):
    """Rows of a query or key projection, with the channels of each head in the other rotary order.

    Hugging Face pairs channel ``d`` of a head with ``d + head_dim / 2`` (halves), Meta's code pairs ``2 d`` with ``2 d + 1``
    (neighbors). With the matching rotation, both orders are the same model.
    """

    def __init__(self, base: View, head_dim: int, *, to_halves: bool) -> None:
        super().__init__(base.dtype, base.shape)
        self.base, self.head_dim = base, head_dim
        self.to_halves = to_halves
        """True reads neighbors as halves; False is the reverse."""

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        begin = box[0][0] // self.head_dim * self.head_dim
        end = -(-(box[0][0] + box[1][0]) // self.head_dim) * self.head_dim
        return [(self.base, ((begin, *box[0][1:]), (end - begin, *box[1][1:])))]  # whole heads

    def fill(self, box: Box, into: Tensor) -> None:
        ((base, heads),) = self.needs(box)
        inner = (self.head_dim // 2, 2) if self.to_halves else (2, self.head_dim // 2)
        turned = read_box(base, heads).unflatten(0, (-1, *inner)).transpose(1, 2).flatten(0, 2)
        into.copy_(turned.narrow(0, box[0][0] - heads[0][0], box[1][0]))


class ScaledView(View):
    """A quantized tensor times its scales, as bfloat16.

    Entry ``(r, c)`` is ``base[r, c] * scales[r // block[0], c // block[1]]``, computed in float32, as DeepSeek-V3
    (arXiv:2412.19437) is published. With one scale per tensor or row, the block is that large. ``scales`` may lack trailing
    dimensions with one block.
    """

    def __init__(self, base: View, scales: View, block: tuple[int, ...]) -> None:
        super().__init__("BF16", base.shape)
        self.base, self.scales, self.block = base, scales, block

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        low, sizes = self._scale_box(box)
        dims = len(self.scales.shape)
        return [(self.base, box), (self.scales, (low[:dims], sizes[:dims]))]

    def fill(self, box: Box, into: Tensor) -> None:
        (base, _), (scale_view, stored) = self.needs(box)
        low, sizes = self._scale_box(box)
        scales = torch.empty(stored[1], dtype=torch.float32)
        scale_view.fill(stored, scales)
        scales = scales.reshape(sizes)
        for dim, size in enumerate(self.block):
            at = torch.arange(box[0][dim], box[0][dim] + box[1][dim]) // size - low[dim]
            scales = scales.index_select(dim, at)
        into.copy_(read_box(base, box).float() * scales)

    def _scale_box(self, box: Box) -> Box:
        low = tuple(at // size for at, size in zip(box[0], self.block, strict=True))
        high = [-(-(at + n) // size) for at, n, size in zip(*box, self.block, strict=True)]
        return low, tuple(h - at for h, at in zip(high, low, strict=True))


class Mxfp4View(View):
    """Experts in 4 bits with a power of two for every 32 of them (OCP Microscaling Formats, MXFP4), as bfloat16; exact.

    So gpt-oss is published: ``blocks`` ``[E, R, G, 16]`` of two E2M1 codes a byte, the lower one first, and ``scales``
    ``[E, R, G]``, exponents with a bias of 127. The tensor is ``[E, 32 G, R]``, as its module multiplies from the right.
    """

    def __init__(self, blocks: View, scales: View) -> None:
        experts, rows, groups, _ = blocks.shape
        super().__init__("BF16", (experts, MX_GROUP * groups, rows))
        self.blocks, self.scales = blocks, scales

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        (expert, column, row), (experts, columns, rows) = box
        group = column // MX_GROUP
        groups = -(-(column + columns) // MX_GROUP) - group
        held = (expert, row, group), (experts, rows, groups)
        return [(self.blocks, ((*held[0], 0), (*held[1], MX_GROUP // 2))), (self.scales, held)]

    def fill(self, box: Box, into: Tensor) -> None:
        first = box[0][1] % MX_GROUP
        for place in range(box[1][0]):  # one matrix at a time in float32
            one = (box[0][0] + place, *box[0][1:]), (1, *box[1][1:])
            codes, exponents = (read_box(view, stored) for view, stored in self.needs(one))
            values = torch.ldexp(_of_halves(codes), exponents.int().unsqueeze(-1) - 127).flatten(-2)
            into[place].copy_(values[0].narrow(-1, first, box[1][1]).t())


class HalfBytesView(View):
    """Values of E2M1 in a matrix of bytes, two in each, the lower half first: ``[R, C]`` int8 to ``[R, 2 C]``, without scales."""

    def __init__(self, base: View) -> None:
        super().__init__("F32", (base.shape[0], 2 * base.shape[1]))
        self.base = base

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        (row, column), (rows, columns) = box
        first = column // 2
        return [(self.base, ((row, first), (rows, -(-(column + columns) // 2) - first)))]

    def fill(self, box: Box, into: Tensor) -> None:
        codes = read_box(*self.needs(box)[0]).view(torch.uint8)
        into.copy_(_of_halves(codes).narrow(-1, box[0][1] % 2, box[1][1]))


def _of_halves(codes: Tensor) -> Tensor:
    """The two values in each byte, ``[..., C]`` uint8 to ``[..., 2 C]``."""
    return _E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]


MX_GROUP = 32
"""Values that share an exponent."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The value of each code."""


class RefusedView(View):
    """A tensor that cannot be read: any access is a `ValueError` with ``reason``."""

    def __init__(self, dtype: str, shape: Sequence[int], reason: str) -> None:
        super().__init__(dtype, shape)
        self.reason = reason

    def check(self, box: Box) -> list[Damage]:
        raise ValueError(self.reason)

    def fill(self, box: Box, into: Tensor) -> None:
        raise ValueError(self.reason)


def whole_box(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return (0,) * len(shape), tuple(shape)


def row_pieces(view: View) -> Iterator[Box]:
    """Boxes of a few megabytes that cover a view, in row-major order."""
    return row_boxes(view.shape, max(_PIECE_BYTES // ITEM_BYTES[view.dtype], 1))


def row_boxes(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Cut a tensor into contiguous boxes of at most ``max_elements``, in row-major order."""
    if not math.prod(shape):
        return
    if math.prod(shape) <= max_elements or not shape:
        yield whole_box(shape)
        return
    row = math.prod(shape[1:])
    if row > max_elements:
        for first in range(shape[0]):
            for offsets, sizes in row_boxes(shape[1:], max_elements):
                yield (first, *offsets), (1, *sizes)
        return
    rows = max(max_elements // row, 1)
    for begin in range(0, shape[0], rows):
        yield (begin, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - begin), *shape[1:])


def read_box(view: View, box: Box) -> Tensor:
    """A box of a view as a new tensor."""
    values = torch.empty(box[1], dtype=DTYPES[view.dtype])
    view.fill(box, values)
    return values


def unequal_elements(a: StoredView, b: StoredView, progress: Callable[[int], None] = lambda nbytes: None) -> int:
    """How many elements of two tensors of the same dtype and shape differ in any bit. Takes tens of megabytes.

    ``progress`` is called with the bytes just compared.

    Raises:
        DamageError: If bytes of either tensor are damaged.
    """
    count, item = 0, ITEM_BYTES[a.dtype]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item]
    for box in row_pieces(a):
        for view in (a, b):
            if damages := view.check(box):
                raise DamageError(str(view.reader.path), damages)
        count += int((read_box(a, box).view(bits) != read_box(b, box).view(bits)).sum())
        for view in (a, b):
            view.reader.release()
        progress(math.prod(box[1]) * item)
    return count


def _replaced(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _swapped(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values[:-2], values[-1], values[-2])
