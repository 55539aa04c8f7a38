"""Who writes what: replicas once, the load balanced, every element of every tensor covered exactly once.

Pure functions on what each rank says it holds. A box that several ranks hold (data-parallel replicas, plain tensors)
is written by the least loaded of them; boxes with one holder are counted first.

Most ranks name the same tensors, and most tensors are cut like another one. So a rank says which tensors it holds and,
apart from that, the few distinct ways in which they are cut: the first half is equal on ranks that differ only in
which part they hold, and parsed once for all of them. Tensors that every rank cuts alike share one `_Pattern`, in which
the boxes are collected and checked once. What is left for each rank and tensor is to give a box its place in a file.
256 ranks with 900 tensors each take under two seconds of one processor, and a plan is reused while the structure of the
state stays the same.
"""

import gc
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_ckpt.format.boxes import Box, find_overlap, is_tiling
from titan_ckpt.format.names import ITEM_BYTES, SECTIONS


class Held(NamedTuple):
    """A tensor as one rank holds it."""

    section: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Piece(NamedTuple):
    """A box that a rank writes: which tensor of its `Held` list, which box of that tensor, and where to."""

    held: int
    box: int
    section: str
    name: str
    """The tensor's name inside the file."""


class Placed(NamedTuple):
    """A box in the checkpoint: the rank whose file holds it, and the byte where it starts in that file's data."""

    rank: int
    start: int
    box: Box


@dataclass(frozen=True, slots=True)
class Places:
    """All boxes of a tensor in the checkpoint, by column, in order of rank."""

    ranks: list[int]
    starts: list[int]
    boxes: list[Box]

    def __iter__(self) -> Iterator[Placed]:
        return map(Placed, self.ranks, self.starts, self.boxes)

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The whole save."""

    pieces: tuple[tuple[Piece, ...], ...]
    """What each rank writes, in file order."""
    placed: dict[tuple[str, str], Places]
    """(section, key) to its boxes."""
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]]
    """(section, key) to dtype and shape."""


def plan_save(ranks: Sequence[Sequence[Held]]) -> SavePlan:
    """Assign every distinct box to one rank.

    Args:
        ranks: What each rank holds, in rank order.

    Raises:
        ValueError: If ranks disagree on a tensor's dtype or shape, boxes overlap without being equal, or an element
            is held by no rank.
    """
    return plan_told([encode_held(tensors) for tensors in ranks])


def plan_told(told: Sequence[bytes]) -> SavePlan:
    """`plan_save` on what the ranks sent, each an `encode_held`.

    Raises:
        ValueError: As `plan_save`.
    """
    # Hundreds of thousands of small tuples, none in a cycle: the collector would walk them over and over, which
    # doubles the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _plan(told)
    finally:
        if collecting:
            gc.enable()


def _plan(told: Sequence[bytes]) -> SavePlan:
    groups = _group(told)
    patterns: dict[Any, _Pattern] = {}
    planned: list[tuple[_Tensor, _Pattern]] = []
    for tensor in _merge(groups):
        alike = (tensor.shape, tuple(tensor.cuts))
        if alike not in patterns:
            pattern = patterns[alike] = _pattern(groups, tensor.cuts)
            _check_cover(tensor, pattern.boxes)
        planned.append((tensor, patterns[alike]))
    return _place(planned, _writers(planned, len(told)), len(told))


class _Group(NamedTuple):
    """Ranks that name the same tensors, cut alike: what they hold differs only in the boxes."""

    rows: list[tuple[str, str, str, list[int], int]]
    """Section, key, dtype, shape and number of the cut."""
    ranks: list[int]
    cuts: list[list[tuple[Box, ...]]]
    """For each of the ranks, the boxes of each cut."""


class _Tensor(NamedTuple):
    """A tensor as all groups together hold it."""

    section: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    """The first rank that named it."""
    rows: list[int]
    """Each row that names it: number in its group."""
    cuts: list[tuple[int, int]]
    """Each row that names it: the group, and the cut in that group."""


class _Holder(NamedTuple):
    """Where a box is held."""

    rank: int
    row: int
    """Which of `_Tensor.rows`."""
    box: int
    """Which box of that row's cut."""


class _Pattern(NamedTuple):
    """How a tensor is cut over all ranks."""

    boxes: list[Box]
    """Distinct boxes, in order."""
    volumes: list[int]
    """Elements of each box."""
    holders: list[list[_Holder]]
    """Holders of each box, in rank order."""


def _group(told: Sequence[bytes]) -> list[_Group]:
    groups: dict[bytes, _Group] = {}
    for rank, data in enumerate(told):
        rows, _, cuts = data.partition(b"\n")
        if rows not in groups:
            groups[rows] = _Group(json.loads(rows), [], [])
        groups[rows].ranks.append(rank)
        groups[rows].cuts.append([tuple((tuple(o), tuple(n)) for o, n in boxes) for boxes in json.loads(cuts)])
    return list(groups.values())


def _merge(groups: Sequence[_Group]) -> list[_Tensor]:
    """The tensors by name, in the order in which ranks name them."""
    tensors: dict[tuple[str, str], _Tensor] = {}
    for g, group in enumerate(groups):
        rank = group.ranks[0]
        for i, (section, key, dtype, sizes, cut) in enumerate(group.rows):
            shape = tuple(sizes)
            tensor = tensors.get((section, key))
            if tensor is None:
                tensor = tensors[section, key] = _Tensor(section, key, dtype, shape, rank, [], [])
            elif (tensor.dtype, tensor.shape) != (dtype, shape):
                raise ValueError(
                    f"{section} tensor {key!r} is {tensor.dtype} {list(tensor.shape)} on rank {tensor.first} but "
                    f"{dtype} {list(shape)} on rank {rank}. A name must mean one tensor on every rank."
                )
            tensor.rows.append(i)
            tensor.cuts.append((g, cut))
    return list(tensors.values())


def _pattern(groups: Sequence[_Group], cuts: Sequence[tuple[int, int]]) -> _Pattern:
    holders: dict[Box, list[_Holder]] = {}
    for row, (g, cut) in enumerate(cuts):
        for rank, boxes in zip(groups[g].ranks, groups[g].cuts, strict=True):
            for j, box in enumerate(boxes[cut]):
                holders.setdefault(box, []).append(_Holder(rank, row, j))
    boxes = sorted(holders)
    return _Pattern(boxes, [math.prod(sizes) for _, sizes in boxes], [sorted(holders[box]) for box in boxes])


# Shared boxes up to this size are all taken from their lowest rank instead of balanced: what ranks do not keep equal,
# such as batch statistics, must not be put together from several of them.
SMALL_BYTES = 64 << 10


def _writers(planned: Sequence[tuple[_Tensor, _Pattern]], num_ranks: int) -> list[list[_Holder]]:
    """For each tensor, who writes each of its boxes."""
    load = [0] * num_ranks
    writers: list[list[_Holder]] = []
    shared: list[tuple[int, str, str, int, int]] = []
    for t, (tensor, pattern) in enumerate(planned):
        item = ITEM_BYTES[tensor.dtype]
        writers.append([who[0] for who in pattern.holders])
        for b, (who, volume) in enumerate(zip(pattern.holders, pattern.volumes, strict=True)):
            if len(who) > 1 and volume * item > SMALL_BYTES:
                shared.append((-volume * item, tensor.section, tensor.key, b, t))
            else:
                load[who[0].rank] += volume * item
    for negated, _, _, b, t in sorted(shared):  # large ones first balances best
        writers[t][b] = writer = min(planned[t][1].holders[b], key=lambda holder: load[holder[0]])
        load[writer.rank] -= negated
    return writers


def _place(
    planned: Sequence[tuple[_Tensor, _Pattern]], writers: Sequence[Sequence[_Holder]], num_ranks: int
) -> SavePlan:
    """Give every box its name and place in its writer's file."""
    pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
    placed = {(tensor.section, tensor.key): Places([], [], []) for tensor, _ in planned}
    ends = {section: [0] * num_ranks for section in SECTIONS}
    names: dict[str, list[set[str]]] = {section: [set() for _ in range(num_ranks)] for section in SECTIONS}

    def file_order(t: int) -> tuple[int, int, str]:
        # Wide dtypes first keeps every tensor aligned to its item size without gaps.
        tensor = planned[t][0]
        return SECTIONS.index(tensor.section), -ITEM_BYTES[tensor.dtype], tensor.key

    for t in sorted(range(len(planned)), key=file_order):
        (section, key, dtype, _, _, rows, _), (boxes, volumes, _) = planned[t]
        item, end, taken = ITEM_BYTES[dtype], ends[section], names[section]
        ranks = [holder.rank for holder in writers[t]]
        order = sorted(range(len(boxes)), key=ranks.__getitem__)
        starts: list[int] = []
        made: dict[Piece, Piece] = {}  # most ranks have an equal one: keep it once
        for b in order:
            rank, row, j = writers[t][b]
            piece = Piece(rows[row], j, section, _free_name(key, taken[rank]))
            pieces[rank].append(made.setdefault(piece, piece))
            starts.append(end[rank])
            end[rank] += volumes[b] * item
        placed[section, key] = Places([ranks[b] for b in order], starts, [boxes[b] for b in order])
    kinds = {(tensor.section, tensor.key): (tensor.dtype, tensor.shape) for tensor, _ in planned}
    return SavePlan(tuple(map(tuple, pieces)), placed, kinds)


def _free_name(key: str, taken: set[str]) -> str:
    name, n = key, 0
    while name in taken:
        n += 1
        name = f"{key}@{n}"
    taken.add(name)
    return name


def _check_cover(tensor: _Tensor, boxes: Sequence[Box]) -> None:
    """Boxes must tile the tensor: every element in exactly one."""
    shape = tensor.shape
    offsets = [[offsets[d] for offsets, _ in boxes] for d in range(len(shape))]
    sizes = [[sizes[d] for _, sizes in boxes] for d in range(len(shape))]
    if boxes and is_tiling(shape, offsets, sizes, len(boxes)):
        return
    clash = find_overlap(boxes)
    if clash:
        raise ValueError(
            f"{tensor.section} tensor {tensor.key!r} has overlapping parts {clash[0]} and {clash[1]} (offsets, sizes). "
            "Two ranks hold different cuts of it."
        )
    volume = sum(math.prod(sizes) for _, sizes in boxes)
    raise ValueError(
        f"{tensor.section} tensor {tensor.key!r} of shape {list(shape)} has {math.prod(shape)} elements, but the "
        f"ranks hold {volume} in {len(boxes)} distinct parts. Every rank that holds a part must take part in the save."
    )


def encode_held(tensors: Sequence[Held]) -> bytes:
    """What a rank holds, for rank 0: a line of JSON that names the tensors, and one with the distinct cuts.

    Equal for equal lists. The first line is equal on ranks that hold other parts of the same tensors.
    """
    cuts: dict[tuple[tuple[int, ...], tuple[Box, ...]], int] = {}
    rows = [(h.section, h.key, h.dtype, h.shape, cuts.setdefault((h.shape, h.boxes), len(cuts))) for h in tensors]
    lines = (rows, [boxes for _, boxes in cuts])
    return b"\n".join(json.dumps(line, separators=(",", ":")).encode() for line in lines)


def encode_pieces(pieces: Sequence[Piece]) -> bytes:
    """A rank's part of the plan, as JSON by column: flat lists are faster to write and read than many small ones."""
    return json.dumps(list(zip(*pieces, strict=True)), separators=(",", ":")).encode()


def decode_pieces(data: bytes) -> tuple[Piece, ...]:
    """Undo `encode_pieces`."""
    return tuple(map(Piece._make, zip(*json.loads(data), strict=True)))
