"""Keys and values in one buffer, so that both travel in one message; values may be narrower than keys."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_cp.backends.backend import Backend
from titan_cp.planning.ranges import Ranges


class KeyValues(NamedTuple):
    """Keys ``[B, H, T, D]`` and values ``[B, H, T, E]`` that lie in ``buffer``: one after the other, or token by token."""

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


def token_rows(buffer: Tensor, like_k: Tensor, like_v: Tensor) -> KeyValues:
    """A buffer ``[T, B · H · (D + E)]`` that has the keys and values of each token together, as views of the usual shape.

    The buffers of several ranks laid end to end are one of all their tokens, and another order of tokens is one of its rows.
    """
    sizes = [x.shape[0] * x.shape[1] * x.shape[3] for x in (like_k, like_v)]
    k, v = (
        part.unflatten(1, (x.shape[0], x.shape[1], x.shape[3])).permute(1, 2, 0, 3)
        for part, x in zip(buffer.split(sizes, dim=1), (like_k, like_v), strict=True)
    )
    return KeyValues(buffer, k, v)


def zero_tokens(like_k: Tensor, like_v: Tensor, rows: int, dtype: torch.dtype) -> KeyValues:
    """`token_rows` of zeros."""
    return token_rows(like_k.new_zeros((rows, _token_width(like_k, like_v)), dtype=dtype), like_k, like_v)


def pack_tokens(k: Tensor, v: Tensor) -> KeyValues:
    """A copy of keys and values as `token_rows`."""
    packed = token_rows(k.new_empty((k.shape[2], _token_width(k, v))), k, v)
    packed.k.copy_(k)
    packed.v.copy_(v)
    return packed


def _token_width(k: Tensor, v: Tensor) -> int:
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


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
