"""Compare two stored tensors bit by bit, whatever cuts they were saved in. numpy, no torch."""

import math

import numpy as np
from numpy.typing import NDArray

from titan_ckpt._errors import DamageError
from titan_ckpt._format import ITEM_BYTES
from titan_ckpt._index import StoredChunk, StoredTensor
from titan_ckpt._plan import Box, intersect
from titan_ckpt._read import StepReader


def unequal_elements(a: StepReader, ours: StoredTensor, b: StepReader, theirs: StoredTensor) -> int:
    """How many elements of two tensors of one dtype and shape differ in any bit.

    Raises:
        DamageError: If the bytes of either are not what was written.
    """
    count = 0
    for mine in ours.chunks:
        for other in theirs.chunks:
            common = intersect((mine.offsets, mine.sizes), (other.offsets, other.sizes))
            if common is not None:
                differs = _part(a, ours, mine, common) != _part(b, theirs, other, common)
                count += int(np.count_nonzero(differs.any(axis=-1)))
    return count


def _part(reader: StepReader, tensor: StoredTensor, chunk: StoredChunk, box: Box) -> NDArray[np.uint8]:
    """Part of a chunk as bytes, the last dimension being an element's."""
    begin, end = reader.span(tensor, chunk)
    damages = reader.check(chunk.file, begin, end)
    if damages:
        raise DamageError(str(reader.manifest.path), damages)
    item = ITEM_BYTES[tensor.dtype]
    data = np.frombuffer(reader.data(tensor, chunk, 0, math.prod(chunk.sizes) * item), np.uint8)
    slices = tuple(slice(at - o, at - o + n) for at, n, o in zip(*box, chunk.offsets, strict=True))
    return data.reshape((*chunk.sizes, item))[slices]
