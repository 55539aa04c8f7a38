"""Moving tokens between the whole sequence and the ranks: shard, unshard, positions, labels. All out of place.

An index is made on the host, in time linear in the tokens, and goes to its device without the host waiting for it; the plan
keeps it, as every layer needs the same one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.differentiable import differentiable_once
from titan_cp.planning.groups import check_group
from titan_cp.planning.ranges import Ranges, document_pieces


class TokenOrder(NamedTuple):
    """Two inverse indices of a whole sequence, int32."""

    tokens: Tensor
    """The token at each place of the ranks' tokens laid end to end."""
    places: Tensor
    """The place of each token in that order."""


def token_order(ranges: Sequence[Ranges], device: torch.device | str) -> TokenOrder:
    """The order of the tokens that the ranks hold."""
    tokens = torch.cat([range_index(held, "cpu") for held in ranges]).int()
    places = torch.empty_like(tokens)
    places[tokens] = torch.arange(len(tokens), dtype=torch.int32)
    return TokenOrder(to_device(tokens, device), to_device(places, device))


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor on ``device``. The copy leaves pinned memory: of any other the host waits for the whole stream."""
    if torch.device(device).type != "cuda":
        return x.to(device)
    pinned = x.pin_memory() if type(x) is Tensor else x  # a fake tensor has no memory
    return pinned.to(device, non_blocking=True)


def range_index(ranges: Ranges, device: torch.device | str) -> Tensor:
    """The tokens of ``ranges`` as an index, int64."""
    return to_device(torch.cat([torch.arange(start, stop) for start, stop in ranges]), device)


def document_positions(ranges: Ranges, cu_seqlens: Sequence[int], device: torch.device | str) -> Tensor:
    """The position of each token of ``ranges`` in its document, int64."""
    pieces = document_pieces(ranges, cu_seqlens)
    return to_device(torch.cat([torch.arange(start, stop) for _, start, stop, _ in pieces]), device)


def shard(
    x: Tensor, dim: int, ranges: Ranges, seq_len: int, padded_len: int, pad_value: float, index: Callable[[], Tensor]
) -> Tensor:
    """The tokens of ``ranges``, which ``index`` gives as an index on the device of ``x``; see `AttentionPlan.shard`."""
    if x.shape[dim] != seq_len:
        raise ValueError(
            f"shard got {x.shape[dim]} tokens along dim {dim} of {tuple(x.shape)}, but the plan is for {seq_len}. Pass "
            "the whole sequence (not a shard), and the right dim."
        )
    if padded_len > seq_len:
        tail = list(x.shape)
        tail[dim] = padded_len - seq_len
        x = torch.cat([x, x.new_full(tail, pad_value)], dim=dim)
    pieces = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    # Few pieces: one copy of each. Many (short documents): one gather.
    return torch.cat(pieces, dim=dim) if len(pieces) <= 64 else x.index_select(dim, index())


def shift_labels(tokens: Tensor, dim: int, cu_seqlens: Sequence[int], seq_len: int, ignore_index: int) -> Tensor:
    """Next-token labels within each document; see `AttentionPlan.shift_labels`."""
    if tokens.shape[dim] != seq_len:
        raise ValueError(
            f"shift_labels got {tokens.shape[dim]} tokens along dim {dim} of {tuple(tokens.shape)}, but the plan is "
            f"for {seq_len}. Shift the whole sequence first, then shard."
        )
    labels = torch.roll(tokens, -1, dims=dim)
    ends = torch.tensor([end - 1 for end in cu_seqlens[1:] if end <= seq_len])
    return labels.index_fill(dim, to_device(ends, tokens.device), ignore_index)


def unshard(
    x: Tensor,
    dim: int,
    local_len: int,
    group: dist.ProcessGroup | None,
    rank: int,
    size: int,
    places: Callable[[], Tensor],
) -> Tensor:
    """The whole sequence from each rank's tokens, each at its one of ``places``; see `AttentionPlan.unshard`."""
    if x.shape[dim] != local_len:
        raise ValueError(
            f"unshard got {x.shape[dim]} tokens along dim {dim} of {tuple(x.shape)}, but each rank of the plan holds "
            f"{local_len}. Pass a shard, and the right dim."
        )
    check_group(group, size, rank, "group")
    gathered = x if group is None else _Gather.apply(x.movedim(dim, 0), group).movedim(0, dim)
    return gathered.index_select(dim, places())


class _Gather(torch.autograd.Function):
    """All-gather along dim 0; its gradient is a reduce-scatter (the sum over ranks)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (grad,) = grad_outputs
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None
