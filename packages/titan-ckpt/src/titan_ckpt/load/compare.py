"""Compare two stored tensors bit by bit, in any layout. numpy, no torch."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_ckpt.errors import DamageError
from titan_ckpt.format.boxes import Box, intersect
from titan_ckpt.format.index import StoredChunk, StoredTensor
from titan_ckpt.format.names import ITEM_BYTES
from titan_ckpt.load.reader import StepReader

_PIECE_BYTES = 16 << 20


def unequal_elements(
    a: StepReader,
    ours: StoredTensor,
    b: StepReader,
    theirs: StoredTensor,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """How many elements differ in any bit, of two tensors of the same dtype and shape. Takes tens of megabytes.

    Args:
        a: The step of ``ours``.
        ours: A tensor.
        b: The step of ``theirs``.
        theirs: Another tensor.
        progress: Called with the bytes just compared.

    Raises:
        DamageError: If bytes of either tensor are damaged.
    """
    count, item = 0, ITEM_BYTES[ours.dtype]
    for mine in ours.chunks:
        for other in theirs.overlapping(mine.box):
            common = intersect(mine.box, other.box)
            for box in () if common is None else _pieces(common, item):
                count += int(np.count_nonzero(_part(a, ours, mine, box) != _part(b, theirs, other, box)))
                progress(math.prod(box[1]) * item)
    return count


def _pieces(box: Box, item_bytes: int) -> Iterator[Box]:
    """A box, cut along its first dimension into boxes of a few megabytes."""
    offsets, sizes = box
    if not sizes:
        yield box
        return
    rows = max(_PIECE_BYTES // max(math.prod(sizes[1:]) * item_bytes, 1), 1)
    for at in range(0, sizes[0], rows):
        yield (offsets[0] + at, *offsets[1:]), (min(rows, sizes[0] - at), *sizes[1:])


def _part(reader: StepReader, tensor: StoredTensor, chunk: StoredChunk, box: Box) -> NDArray[np.unsignedinteger[Any]]:
    """A box within a chunk, with each element's bits as a number."""
    item = ITEM_BYTES[tensor.dtype]
    sizes, (offsets, wanted) = chunk.sizes, box
    row_bytes = math.prod(sizes[1:]) * item
    first, rows = (offsets[0] - chunk.offsets[0], wanted[0]) if sizes else (0, 1)
    begin, end = first * row_bytes, (first + rows) * row_bytes
    damages = reader.check(chunk.file, *reader.stored_range(tensor, chunk, begin, end))
    if damages:
        raise DamageError(str(reader.path), damages)
    bits = np.frombuffer(reader.data(tensor, chunk, begin, end), f"u{item}")
    inner = zip(offsets[1:], wanted[1:], chunk.offsets[1:], strict=True)
    slices = (slice(None), *(slice(at - start, at - start + n) for at, n, start in inner))
    return bits.reshape(rows, *sizes[1:])[slices]
