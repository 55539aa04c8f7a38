"""What a backend is: tiles in, accumulated attention and gradients out.

A backend adds the attention of some tiles into float32 accumulators (float64 for float64 inputs), forward and
backward. It never returns block results: where and how often partial results are rounded is the difference between a
ring that trains and one that drifts, so it is decided once, in `merge_in_place`, for all of them.

In the backward each tile is given the *global* output and log-sum-exp of its rows. The probabilities a kernel
recomputes from them are then the final ones, and the tiles' gradients simply add up.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_cp.backends.merge import merge_in_place
from titan_cp.backends.one_key import one_key_backward, one_key_forward
from titan_cp.planning.tiles import Tile


@dataclass(frozen=True)
class Request:
    """What a backend is asked to compute."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    packed: bool
    """More than one document, so many small tiles."""
    window: bool
    """A sliding window, so tiles with a moving lower bound."""


class Backend(ABC):
    """Attention over tiles, on one device. Stateless."""

    name: str
    summary: str
    narrow_values: bool = False
    """Whether its kernels take values with fewer channels than keys. Others are given a local copy with zeros."""

    @abstractmethod
    def why_not(self, request: Request) -> str | None:
        """Why this backend cannot serve the request, None if it can."""

    def why_not_first(self, request: Request) -> str | None:
        """Why ``"auto"`` prefers another backend although this one could, None if it does not."""
        del request
        return None

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], scale: float, out: Tensor, lse: Tensor
    ) -> None:
        """Merge the tiles' attention into ``out`` and ``lse``, in place.

        Args:
            q: Queries, shape ``[B, Hq, Tq, D]``.
            k: Keys, shape ``[B, Hk, Tk, D]``.
            v: Values, shape ``[B, Hk, Tk, E]``; ``E = D`` unless `narrow_values`.
            tiles: What to compute; rows that no tile covers keep their values.
            scale: Factor on the scores.
            out: Running output, shape ``[B, Hq, Tq, E]``, float32 or float64.
            lse: Running log-sum-exp, shape ``[B, Hq, Tq]``, same dtype.
        """

    @abstractmethod
    def backward(self, saved: "Saved", tiles: Sequence[Tile], scale: float, grads: "Grads") -> None:
        """Add the tiles' gradients into ``grads``, in place; arguments as in `forward`."""


class Saved(NamedTuple):
    """What the backward of one block is computed from; ``out`` and ``lse`` are of the whole attention."""

    grad_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Grads(NamedTuple):
    """Gradient accumulators, float32 or float64, shaped as ``q``, ``k`` and ``v``."""

    q: Tensor
    k: Tensor
    v: Tensor


class AttentionPart(NamedTuple):
    """A piece of a tile that a dense kernel can compute: no mask, a square causal mask, or an explicit mask."""

    q: slice
    k: slice
    causal: bool
    mask: Tensor | None
    one_key: bool = False
    """Each row sees one key: of as many keys as rows its own, of one key that one. No kernel is needed."""


class DenseBackend(Backend):
    """A backend whose kernel knows full and square causal blocks, and perhaps an additive mask.

    Tiles without a window need no mask: what is not a rectangle or a staircase there is rows of one key each. A kernel is
    given a mask only where the request has a window, so one without masks refuses such a request.
    """

    one_key_apart: bool = True
    """Whether rows that see one key each are computed without the kernel (`titan_cp.backends.one_key`)."""

    @abstractmethod
    def block_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one block: ``(out, lse)``, shapes ``[B, Hq, Tq, D]`` and ``[B, Hq, Tq]``."""

    @abstractmethod
    def block_backward(
        self, saved: Saved, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one block with respect to ``q``, ``k`` and ``v``."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], scale: float, out: Tensor, lse: Tensor
    ) -> None:
        """Merge the tiles' attention into ``out`` and ``lse``, in place."""
        for part in split_tiles(tiles, q.device, one_key_apart=self.one_key_apart):
            block = q[:, :, part.q], k[:, :, part.k], v[:, :, part.k]
            if part.one_key:
                block_out, block_lse = one_key_forward(*block, scale)
            else:
                block_out, block_lse = self.block_forward(*block, part.causal, _bias(part.mask, q.dtype), scale)
            merge_in_place(out[:, :, part.q], lse[:, :, part.q], block_out, block_lse)

    def backward(self, saved: Saved, tiles: Sequence[Tile], scale: float, grads: Grads) -> None:
        """Add the tiles' gradients into ``grads``, in place."""
        grad_out, q, k, v, out, lse = saved
        for part in split_tiles(tiles, q.device, one_key_apart=self.one_key_apart):
            block = Saved(
                grad_out[:, :, part.q],
                q[:, :, part.q],
                k[:, :, part.k],
                v[:, :, part.k],
                out[:, :, part.q],
                lse[:, :, part.q],
            )
            if part.one_key:
                grad_q, grad_k, grad_v = one_key_backward(*block, scale)
            else:
                grad_q, grad_k, grad_v = self.block_backward(block, part.causal, _bias(part.mask, q.dtype), scale)
            grads.q[:, :, part.q] += grad_q
            grads.k[:, :, part.k] += grad_k
            grads.v[:, :, part.k] += grad_v


def split_tiles(
    tiles: Sequence[Tile], device: torch.device | str, mask_rows: int = 512, *, one_key_apart: bool = False
) -> Iterator[AttentionPart]:
    """Cut tiles into parts that a dense kernel knows.

    A causal tile wider than tall is a full rectangle and a square. A tile with a moving lower bound needs a mask; it is
    made for at most ``mask_rows`` query rows at a time, and only for the columns those rows reach. With ``one_key_apart``
    a rectangle of one key and a band of width one are parts by themselves, and without a window nothing needs a mask: from
    one document to the next the lower bound passes the upper one, so where it moves on by one, each row sees one key.
    """
    for tile in tiles:
        rows = slice(tile.q_start, tile.q_stop)
        if one_key_apart and (tile.k_len == 1 or (tile.causal and tile.sliding and tile.q_len == tile.k_len)):
            yield AttentionPart(rows, slice(tile.k_start, tile.k_stop), False, None, one_key=True)
            continue
        if not tile.sliding:
            if not tile.causal:
                yield AttentionPart(rows, slice(tile.k_start, tile.k_stop), False, None)
                continue
            diagonal = tile.k_stop - tile.q_len
            if diagonal > tile.k_start:
                one_key = one_key_apart and diagonal - tile.k_start == 1
                yield AttentionPart(rows, slice(tile.k_start, diagonal), False, None, one_key)
            yield AttentionPart(rows, slice(diagonal, tile.k_stop), True, None)
            continue
        for first in range(0, tile.q_len, mask_rows):
            last = min(first + mask_rows, tile.q_len)
            reach = tile.k_len - tile.q_len + last if tile.causal else tile.k_len
            mask = tile.mask(device, (first, last))[:, first:reach]
            yield AttentionPart(
                slice(tile.q_start + first, tile.q_start + last),
                slice(tile.k_start + first, tile.k_start + reach),
                False,
                mask,
            )


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The additive form of a boolean mask; the CPU kernel rejects boolean ones, and any dtype but the queries'."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
