"""Boxes of a tensor: the intersection of two, and whether many cover the tensor, each element once."""

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one number per dimension."""

# Random values are below this prime: a product of two fits into 64 bits.
_PRIME = 2**31 - 1
# In each draw, wrong boxes pass with a probability of at most dimensions / _PRIME.
_DRAWS = 3


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in zip(a[0], a[1], b[0], b[1], strict=True))
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return None
    return low, tuple(h - lo for lo, h in zip(low, high, strict=True))


def is_tiling(shape: Sequence[int], offsets: Sequence[Any], sizes: Sequence[Any], count: int) -> bool:
    """Whether boxes hold every element of a tensor exactly once: no hole, no overlap.

    Equal volumes do not prove it: one half, counted twice, has the volume of the whole. So the volume is measured in
    random coordinates. Each coordinate of a dimension gets a random value, and the volume of a box is the product of its
    extents in these values. The volumes add up to the whole for every choice of values only if the boxes tile the tensor.
    For a random choice modulo a prime, other boxes pass with a probability of at most dimensions / 2^31 (Schwartz-Zippel).
    The cost is linear in the boxes, plus one sort per dimension.

    Args:
        shape: The tensor's shape.
        offsets: One entry per dimension: a number per box, or one number for all boxes.
        sizes: As ``offsets``. Every box must lie within the tensor.
        count: Number of boxes.
    """
    if not math.prod(shape):
        return True
    if count == 1:
        return not any(map(_only, offsets)) and tuple(map(_only, sizes)) == tuple(shape)
    import numpy as np  # not needed to list and verify steps of whole tensors

    draws = np.random.default_rng(random.SystemRandom().getrandbits(128))
    boxes = np.ones((_DRAWS, count), dtype=np.int64)
    whole = np.ones(_DRAWS, dtype=np.int64)
    for length, begin, extent in zip(shape, offsets, sizes, strict=True):
        begins: NDArray[np.int64] = np.atleast_1d(np.asarray(begin, dtype=np.int64))
        ends = begins + np.asarray(extent, dtype=np.int64)
        begins, ends = np.broadcast_arrays(begins, ends)
        places, number = np.unique(np.concatenate([[0, length], begins, ends]), return_inverse=True)
        values = draws.integers(0, _PRIME, (_DRAWS, len(places)))
        extents = values[:, number[2 + len(begins) :]] - values[:, number[2 : 2 + len(begins)]]
        boxes = boxes * (extents % _PRIME) % _PRIME
        whole = whole * ((values[:, number[1]] - values[:, number[0]]) % _PRIME) % _PRIME
    return bool((boxes.sum(axis=1) % _PRIME == whole).all())


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None."""
    import numpy as np

    boxes = [box for box in boxes if math.prod(box[1])]
    begins: NDArray[np.int64] = np.array([box[0] for box in boxes], dtype=np.int64)
    ends = begins + np.array([box[1] for box in boxes], dtype=np.int64)
    for i, box in enumerate(boxes):
        meet = ((begins[i] < ends[i + 1 :]) & (begins[i + 1 :] < ends[i])).all(axis=1)
        if meet.any():
            return box, boxes[i + 1 + int(meet.argmax())]
    return None


def _only(column: int | Sequence[int]) -> int:
    return column if isinstance(column, int) else column[0]
