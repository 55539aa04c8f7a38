"""FlashAttention over many tiles in one call: the packed-document kernel.

The variable-length kernel takes, for each "sequence", its own query and key length, aligned to the bottom right, and
one window for all of them. A tile is such a sequence. Tiles whose window agrees go in one call; a window is ``(left,
right)``, -1 for no bound:

    full rectangle (-1, -1) · causal staircase (-1, 0) · band (k_len - q_len, 0) · trailing edge (k_len - q_len, -1)

Private operators (``aten::_flash_attention_forward`` and ``_backward``, signatures checked on torch 2.11 and 2.15 with
fake tensors); values are checked by the tests marked ``gpu``.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from titan_cp.backends.backend import Backend, Grads, Request, Saved
from titan_cp.backends.cuda_dense import why_not_cuda
from titan_cp.backends.merge import merge_in_place
from titan_cp.planning.tiles import Tile, Tiles
from titan_cp.planning.tokens import to_device


class CudaVarlenFlash(Backend):
    """Variable-length FlashAttention, one call for all tiles of a kind."""

    name = "cuda_varlen"
    summary = "variable-length FlashAttention, one call for all tiles of a kind"

    def why_not(self, request: Request) -> str | None:
        """Needs a half-precision dtype on CUDA."""
        return why_not_cuda(request, (torch.bfloat16, torch.float16), 256)

    def why_not_first(self, request: Request) -> str | None:
        """Where tiles are few, dense calls need no gathering of rows."""
        return None if request.packed or request.window else "one document without a window: dense calls are enough"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], scale: float, out: Tensor, lse: Tensor
    ) -> None:
        """Merge the tiles' attention into ``out`` and ``lse``, in place."""
        for call in _calls(tiles, q.shape[0], q.device):
            packed_out, packed_lse, *_ = torch.ops.aten._flash_attention_forward(
                _pack(q, call.q_rows), _pack(k, call.k_rows), _pack(v, call.k_rows), *call.lengths,
                0.0, call.causal, False, scale=scale, window_size_left=call.left, window_size_right=call.right,
            )  # fmt: skip
            block_out, block_lse = _unpack(packed_out, q.shape[0]), packed_lse.unflatten(1, (q.shape[0], -1))
            row = 0
            for start, stop in call.q_rows:
                rows, local = slice(row, row + stop - start), slice(start, stop)
                merge_in_place(
                    out[:, :, local], lse[:, :, local], block_out[:, :, rows], block_lse.transpose(0, 1)[:, :, rows]
                )
                row = rows.stop

    def backward(self, saved: Saved, tiles: Sequence[Tile], scale: float, grads: Grads) -> None:
        """Add the tiles' gradients into ``grads``, in place."""
        batch, device = saved.q.shape[0], saved.q.device
        for call in _calls(tiles, batch, device):
            q_rows, k_rows = call.q_rows, call.k_rows
            lse = torch.cat([saved.lse[:, :, a:b] for a, b in q_rows], dim=2)
            grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
                _pack(saved.grad_out, q_rows), _pack(saved.q, q_rows), _pack(saved.k, k_rows),
                _pack(saved.v, k_rows), _pack(saved.out, q_rows), lse.transpose(0, 1).flatten(1).contiguous(),
                *call.lengths, 0.0, call.causal,
                torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device),
                scale=scale, window_size_left=call.left, window_size_right=call.right,
            )  # fmt: skip
            for into, spans, packed in (
                (grads.q, q_rows, grad_q),
                (grads.k, k_rows, grad_k),
                (grads.v, k_rows, grad_v),
            ):
                rows = _unpack(packed, batch)
                row = 0
                for start, stop in spans:
                    into[:, :, start:stop] += rows[:, :, row : row + stop - start]
                    row += stop - start


class _VarlenCall(NamedTuple):
    """One call of the kernel: the tiles whose window agrees."""

    left: int
    right: int
    q_rows: list[tuple[int, int]]
    k_rows: list[tuple[int, int]]
    lengths: tuple[Tensor, Tensor, int, int]
    """Cumulative query and key lengths (int32, on the device) and the longest of each."""

    @property
    def causal(self) -> bool:
        return (self.left, self.right) == (-1, 0)


def _calls(tiles: Sequence[Tile], batch: int, device: torch.device) -> list[_VarlenCall]:
    """The calls for these tiles, built once: every layer has the same, and a copy of lengths would make the host wait."""

    def build() -> list[_VarlenCall]:
        groups: dict[tuple[int, int], list[Tile]] = {}
        for tile in tiles:
            left = tile.k_len - tile.q_len if tile.sliding else -1
            groups.setdefault((left, 0 if tile.causal else -1), []).append(tile)
        return [
            _VarlenCall(
                *window,
                _joined([(t.q_start, t.q_stop) for t in group]),
                _joined([(t.k_start, t.k_stop) for t in group]),
                _lengths(group, batch, device),
            )
            for window, group in groups.items()
        ]

    return tiles.once(("cuda_varlen", batch, device), build) if isinstance(tiles, Tiles) else build()


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join each span to its predecessor where it starts at its end; order and overlaps stay."""
    joined = spans[:1]
    for start, stop in spans[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _pack(x: Tensor, joined: list[tuple[int, int]]) -> Tensor:
    """``[B, H, T, D]`` to the spans' rows as ``[B·rows, H, D]``, one batch row after the other."""
    rows = x[:, :, slice(*joined[0])] if len(joined) == 1 else torch.cat([x[:, :, a:b] for a, b in joined], dim=2)
    return rows.transpose(1, 2).flatten(0, 1)


def _unpack(packed: Tensor, batch: int) -> Tensor:
    """``[B·rows, H, D]`` to ``[B, H, rows, D]``."""
    return packed.unflatten(0, (batch, -1)).transpose(1, 2)


def _lengths(tiles: Sequence[Tile], batch: int, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative query and key lengths (int32, on ``device``) and the longest of each."""
    q_lens, k_lens = [t.q_len for t in tiles], [t.k_len for t in tiles]
    cumulative = torch.tensor([[0, *accumulate(q_lens * batch)], [0, *accumulate(k_lens * batch)]], dtype=torch.int32)
    lengths = to_device(cumulative, device)
    return lengths[0], lengths[1], max(q_lens), max(k_lens)
