"""Keys and values in one buffer, so that both travel in one message; values may be narrower than keys."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_cp.backends.backend import Backend
from titan_cp.planning.ranges import Ranges


class KeyValues(NamedTuple):
    """Keys ``[B, H, T, D]`` and values ``[B, H, T, E]`` that lie one after the other in ``buffer``, one dimension."""

    buffer: Tensor
    k: Tensor
    v: Tensor


def empty_rows(like_k: Tensor, like_v: Tensor, rows: int, dtype: torch.dtype | None = None) -> KeyValues:
    """A buffer for ``rows`` rows, with everything else as in the two tensors; not initialised."""
    shapes = [(*x.shape[:2], rows, x.shape[3]) for x in (like_k, like_v)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    buffer = torch.empty(sum(sizes), dtype=dtype or like_k.dtype, device=like_k.device)
    return KeyValues(buffer, buffer[: sizes[0]].view(shapes[0]), buffer[sizes[0] :].view(shapes[1]))


def zero_rows(like_k: Tensor, like_v: Tensor, rows: int, dtype: torch.dtype) -> KeyValues:
    """As `empty_rows`, of zeros."""
    made = empty_rows(like_k, like_v, rows, dtype)
    made.buffer.zero_()
    return made


def pack_rows(k: Tensor, v: Tensor, rows: Ranges | None = None) -> KeyValues:
    """A copy of ``rows`` (all, if None) of keys and values, in one buffer."""
    ranges: Sequence[tuple[int, int]] = ((0, k.shape[2]),) if rows is None else rows
    packed = empty_rows(k, v, sum(stop - start for start, stop in ranges))
    row = 0
    for start, stop in ranges:
        end = row + stop - start
        packed.k[:, :, row:end] = k[:, :, start:stop]
        packed.v[:, :, row:end] = v[:, :, start:stop]
        row = end
    return packed


def place_rows(packed: KeyValues, k: Tensor, v: Tensor, rows: Ranges, *, add: bool = False) -> None:
    """Write packed rows to ``rows`` of keys and values, or add them."""
    row = 0
    for start, stop in rows:
        end = row + stop - start
        for into, part in ((k, packed.k), (v, packed.v)):
            target = into[:, :, start:stop]
            target.add_(part[:, :, row:end]) if add else target.copy_(part[:, :, row:end])
        row = end


def widen(x: Tensor, backend: Backend, width: int) -> Tensor:
    """``x`` with zeros appended to ``width`` channels where the backend's kernels need values as wide as keys.

    The zeros are local and short-lived: they are neither sent nor kept. They change no other number.
    """
    if x.shape[-1] == width or backend.narrow_values:
        return x
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))
