"""Which boxes of a tensor a rank holds, computed from `DTensor` placements.

Along one dimension, a rank holds runs of global indices. `Shard` cuts the runs into equal parts, rounded up as
`torch.chunk` does. `_StridedShard`, which FSDP2 writes on top of tensor parallelism, is a cut that was made *after* the
cuts to its right. To apply the cuts in the order they were made gives contiguous runs, also for uneven sizes. Such a cut is
recognized by its split factor: the number of parts that the cuts to its right make. With any other split factor (a
placement made by hand or by flattening), the cuts are applied from left to right. A local shape that does not match
is an error.

`_StridedShard` is private to torch. Only this module uses it. `tests/test_layout.py` compares with tensors that torch 2.11
and 2.15 distributed.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Runs = list[tuple[int, int]]
"""Consecutive global indices as (start, length), in local order."""


class Chunk(NamedTuple):
    """A box of a tensor: where it starts in each dimension, and its size there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of one tensor dimension by one mesh axis."""

    parts: int
    """Number of ranks along the axis."""
    part: int
    """This rank's place among them."""
    stride: int = 0
    """`_StridedShard`'s split factor; 0 for a plain `Shard`."""


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a tensor that this rank holds."""

    local: Tensor
    """The plain local tensor. It shares memory with the original."""
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    boxes: tuple[tuple[Chunk, tuple[int, ...]], ...]
    """Boxes of the whole tensor, each with its offsets in ``local``. Empty if this rank holds nothing."""

    def view(self, index: int) -> Tensor:
        """Box ``index`` as a view of ``local``."""
        chunk, start = self.boxes[index]
        view = self.local
        for dim, (begin, size) in enumerate(zip(start, chunk.sizes, strict=True)):
            if size != view.shape[dim]:
                view = view.narrow(dim, begin, size)
        return view


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The place of a rank's tensor in a larger tensor that no `DTensor` describes.

    For example, expert parallelism that keeps each rank's experts as a plain parameter: of 64 experts ``[64, F, D]`` on 8
    ranks, rank 3 holds ``LocalShard(shape=(64, F, D), offsets=(24, 0, 0))``. The tensor may be a `DTensor` itself.
    """

    shape: tuple[int, ...]
    """The larger tensor's shape."""
    offsets: tuple[int, ...]
    """Where this rank's tensor starts in it, per dimension."""

    def of_state(self, state: tuple[int, ...], tensor: tuple[int, ...]) -> "LocalShard | None":
        """The place of optimizer state that has the tensor's shape, or 1 in some dimensions, such as one value for each row, or a
        whole fraction of it, such as one value for each block of 64 in a row.

        Args:
            state: Shape of the state on this rank.
            tensor: Shape of the tensor on this rank.

        Returns:
            None for state of any other shape, such as a step counter: it is not cut like the tensor.
        """
        if len(state) != len(tensor):
            return None
        shape: list[int] = []
        offsets: list[int] = []
        for s, n, whole, at in zip(state, tensor, self.shape, self.offsets, strict=True):
            if s == 1 != n:
                shape.append(1)
                offsets.append(0)
                continue
            block = n // s if s and n % s == 0 else 1
            if s * block != n or whole % block or at % block:
                return None
            shape.append(whole // block)
            offsets.append(at // block)
        return LocalShard(tuple(shape), tuple(offsets))


def local_part(tensor: Tensor, path: str, shard: LocalShard | None = None) -> LocalPart:
    """What this rank holds of ``tensor``.

    Args:
        tensor: A plain tensor, a `DTensor`, or a subclass that wraps one tensor of its own shape and dtype (such as
            float8 all-gather weights).
        path: Name of the tensor, for errors.
        shard: The place of ``tensor`` in a larger tensor, if there is one.

    Raises:
        TypeError: If the tensor is sparse, quantized, or of another subclass.
        ValueError: If its placements are partial or do not explain its local shape, or it does not fit into
            ``shard.shape`` at ``shard.offsets``.
    """
    part = _own_part(tensor, path)
    if shard is None:
        return part
    ends = [at + n for at, n in zip(shard.offsets, part.shape, strict=False)]
    lengths = {len(shard.shape), len(shard.offsets), len(part.shape)}
    if len(lengths) > 1 or min(shard.offsets) < 0 or any(e > n for e, n in zip(ends, shard.shape, strict=True)):
        raise ValueError(
            f"{path} of shape {list(part.shape)} does not fit into {list(shard.shape)} at {list(shard.offsets)}. "
            "Give the whole tensor's shape, and where this rank's part of it starts."
        )
    moved = tuple(
        (Chunk(tuple(map(sum, zip(chunk.offsets, shard.offsets, strict=True))), chunk.sizes), at)
        for chunk, at in part.boxes
    )
    return LocalPart(part.local, shard.shape, moved)


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether a value is a `DTensor`; does not import it, which costs a process without any more than torch itself."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _own_part(tensor: Tensor, path: str) -> LocalPart:
    if not is_dtensor(tensor):
        local = _plain(tensor, path)
        shape = tuple(local.shape)
        return LocalPart(local, shape, ((Chunk((0,) * len(shape), shape), (0,) * len(shape)),))
    local = _plain(tensor.to_local(), path)
    shape = tuple(tensor.shape)
    if not math.prod(shape):  # an empty tensor: every rank holds all of it
        return LocalPart(local.new_empty(shape), shape, ((Chunk((0,) * len(shape), shape), (0,) * len(shape)),))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is outside the tensor's mesh
        return LocalPart(local, shape, ())
    cuts = _cuts(tensor, coordinate, path)
    runs = [shard_runs(size, _in_order_made(cut)) for size, cut in zip(shape, cuts, strict=True)]
    if tuple(sum(n for _, n in run) for run in runs) == tuple(local.shape):
        return LocalPart(local, shape, _boxes(runs))
    raise ValueError(
        f"{path} of shape {list(shape)} has a local part of shape {list(local.shape)}, which its placements "
        f"{tensor.placements} on mesh {tuple(tensor.device_mesh.shape)} do not give at coordinate {coordinate}. "
        "Make the dimension divisible by its mesh axes."
    )


def shard_runs(length: int, cuts: Sequence[Cut]) -> Runs:
    """The runs of ``range(length)`` that are left after all cuts."""
    runs: Runs = [(0, length)]
    for cut in cuts:
        if cut.stride:
            pieces = [_part(runs, cut.stride, i) for i in range(cut.stride)]
            runs = _merged([run for piece in pieces for run in _part(piece, cut.parts, cut.part)])
        else:
            runs = _part(runs, cut.parts, cut.part)
    return [run for run in runs if run[1]]


def _cuts(tensor: "DTensor", coordinate: Sequence[int], path: str) -> list[list[Cut]]:
    spec: Any = tensor._spec
    order = getattr(spec, "shard_order", None)  # newer than torch 2.11; None if _StridedShard has the order
    if order is not None and order != type(spec).compute_default_shard_order(spec.placements):
        raise ValueError(
            f"{path} was cut in the order {order}, not along its mesh from left to right. Redistribute it to plain "
            f"{tensor.placements} before saving."
        )
    cuts: list[list[Cut]] = [[] for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        dim: int | None = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise ValueError(f"{path} has placement {placement} on mesh axis {axis}; reduce it before saving.")
        stride = int(getattr(placement, "split_factor", 0))
        cuts[dim].append(Cut(tensor.device_mesh.size(axis), coordinate[axis], stride))
    return cuts


def _in_order_made(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts in the order they were made: FSDP's strided cut came after every cut to its right."""
    if any(cut.stride not in (0, math.prod(c.parts for c in cuts[i + 1 :])) for i, cut in enumerate(cuts)):
        return list(cuts)
    order: list[Cut] = []
    for cut in reversed(cuts):
        if cut.stride:
            order.append(Cut(cut.parts, cut.part))
        else:
            order.insert(0, cut)
    return order


def _part(runs: Runs, parts: int, part: int) -> Runs:
    """Part ``part`` of the indices in ``runs``, cut into ``parts`` equal parts (rounded up)."""
    total = sum(n for _, n in runs)
    size = -(-total // parts)
    begin, end = min(part * size, total), min((part + 1) * size, total)
    kept: Runs = []
    at = 0
    for start, n in runs:
        low, high = max(begin, at), min(end, at + n)
        if low < high:
            kept.append((start + low - at, high - low))
        at += n
    return kept


def _merged(runs: Runs) -> Runs:
    merged: Runs = []
    for start, n in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + n)
        else:
            merged.append((start, n))
    return merged


def _boxes(runs: Sequence[Runs]) -> tuple[tuple[Chunk, tuple[int, ...]], ...]:
    """Every combination of one run per dimension, with its offsets in the local tensor."""
    placed: list[list[tuple[int, int, int]]] = []
    for run in runs:
        at = itertools.accumulate((n for _, n in run), initial=0)
        placed.append([(start, n, local) for (start, n), local in zip(run, at, strict=False)])
    return tuple(
        (Chunk(tuple(s for s, _, _ in combo), tuple(n for _, n, _ in combo)), tuple(at for _, _, at in combo))
        for combo in itertools.product(*placed)
    )


def _plain(tensor: Tensor, path: str) -> Tensor:
    """The ordinary strided tensor behind ``tensor``."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    while flatten is not None:
        inner = [getattr(tensor, name) for name in flatten()[0]]
        if len(inner) != 1 or inner[0].shape != tensor.shape or inner[0].dtype != tensor.dtype:
            raise TypeError(
                f"{path} is a {type(tensor).__name__} made of {len(inner)} tensors, which safetensors cannot hold. "
                "Convert it to a plain tensor before saving."
            )
        tensor = inner[0]
        flatten = getattr(tensor, "__tensor_flatten__", None)
    if tensor.is_quantized:
        raise TypeError(f"{path} is a quantized tensor, which safetensors cannot hold. Call dequantize() first.")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{path} is a {tensor.layout} tensor; safetensors holds dense ones. Call to_dense() first.")
    if tensor.is_meta:
        raise ValueError(f"{path} is on the meta device, so it has no values. Call to_empty(device=...) on its module.")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"{path} of shape {list(tensor.shape)} is an expanded view: its elements share memory, so it cannot be "
            "loaded in place. Register a contiguous() copy."
        )
    return tensor.detach() if tensor.requires_grad else tensor
