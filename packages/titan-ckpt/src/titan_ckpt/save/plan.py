"""Who writes what: replicas once, the load balanced, every element of every tensor covered exactly once.

Pure functions on what each rank says it holds. A box that several ranks hold (data-parallel replicas, plain tensors)
is written by the least loaded of them; boxes with one holder are counted first.

Most ranks name the same tensors, and most tensors are cut like another one. So a rank says which tensors it holds and,
apart from that, the few distinct ways in which they are cut: the first half is equal on ranks that differ only in
which part they hold, and parsed once for all of them. Tensors that every rank cuts alike share one `_Pattern`, in which
the boxes are collected and checked once. What is left for each tensor is arithmetic on columns with an entry per box.
"""

import gc
import itertools
import json
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_ckpt.format.boxes import Box, find_overlap, is_tiling
from titan_ckpt.format.columns import Column, pack_column
from titan_ckpt.format.names import ITEM_BYTES, SECTIONS

Numbers = NDArray[np.int64]


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

    ranks: Numbers
    starts: Numbers
    boxes: "_Boxes"

    def __iter__(self) -> Iterator[Placed]:
        return map(Placed, self.ranks.tolist(), self.starts.tolist(), self.boxes.listed())

    def __len__(self) -> int:
        return len(self.ranks)


class _Boxes:
    """Boxes of a pattern in some order, and their columns."""

    def __init__(self, boxes: "list[Box]", order: Numbers) -> None:
        self._boxes, self._order = boxes, order
        self._columns: tuple[list[Column], list[Column]] | None = None

    def listed(self) -> list[Box]:
        return [self._boxes[i] for i in self._order.tolist()]

    @property
    def columns(self) -> tuple[list[Column], list[Column]]:
        """Offsets and sizes, a column per dimension."""
        if self._columns is None:
            packed = [
                [pack_column(np.array(column, dtype=np.int64)[self._order]) for column in side]
                for side in _columns(self._boxes)
            ]
            self._columns = packed[0], packed[1]
        return self._columns


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The whole save."""

    pieces: tuple[tuple[Piece, ...], ...]
    """What each rank writes, in file order; one object for ranks that write the same."""
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


def plan_told(encoded: Sequence[bytes]) -> SavePlan:
    """`plan_save` on what the ranks sent, each an `encode_held`.

    Raises:
        ValueError: As `plan_save`.
    """
    # Hundreds of thousands of small tuples, none in a cycle: the collector would walk them over and over, which
    # doubles the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _plan(encoded)
    finally:
        if collecting:
            gc.enable()


def _plan(encoded: Sequence[bytes]) -> SavePlan:
    groups = _group(encoded)
    patterns: dict[Any, _Pattern] = {}
    planned: list[tuple[_Tensor, _Pattern]] = []
    for tensor in _merge(groups):
        alike = (tensor.shape, tuple(tensor.cuts))
        if alike not in patterns:
            pattern = patterns[alike] = _pattern(groups, tensor.cuts)
            _check_cover(tensor, pattern.boxes)
        planned.append((tensor, patterns[alike]))
    return _place(planned, _writers(planned, len(encoded)), len(encoded))


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


@dataclass(slots=True, eq=False)
class _Pattern:
    """How a tensor is cut over all ranks."""

    boxes: list[Box]
    """Distinct boxes, in order."""
    holders: list[list[_Holder]]
    """Holders of each box, in rank order."""
    volumes: Numbers
    """Elements of each box."""
    first: Numbers
    """The first holder of each box: rank, row and box."""
    shared: NDArray[np.bool_]
    """Whether a box has several holders."""
    by_first: "_Arranged | None" = None
    """The boxes as their first holders write them: kept, since most tensors are written so."""


def _group(encoded: Sequence[bytes]) -> list[_Group]:
    groups: dict[bytes, _Group] = {}
    for rank, data in enumerate(encoded):
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
                    f"{dtype} {list(shape)} on rank {rank}. Each name must be the same tensor on every rank."
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
    listed = [sorted(holders[box]) for box in boxes]
    return _Pattern(
        boxes,
        listed,
        volumes=np.array([math.prod(sizes) for _, sizes in boxes], dtype=np.int64),
        first=np.array([held_by[0] for held_by in listed], dtype=np.int64).reshape(-1, 3),
        shared=np.array([len(held_by) > 1 for held_by in listed], dtype=bool),
    )


# Shared boxes up to this size are all taken from their lowest rank instead of balanced: what ranks do not keep equal,
# such as batch statistics, must not be put together from several of them.
SMALL_BYTES = 64 << 10


def _writers(planned: Sequence[tuple[_Tensor, _Pattern]], num_ranks: int) -> list[Numbers]:
    """For each tensor, the writer of each box: rows of rank, row and box."""
    load = np.zeros(num_ranks, dtype=np.int64)
    writers = [pattern.first for _, pattern in planned]
    names = sorted(range(len(planned)), key=lambda t: planned[t][0][:2])
    shared: list[Numbers] = []
    for place, t in enumerate(names):
        tensor, pattern = planned[t]
        nbytes = pattern.volumes * ITEM_BYTES[tensor.dtype]
        balanced = np.flatnonzero(pattern.shared & (nbytes > SMALL_BYTES))
        if len(balanced):
            shared.append(np.stack([-nbytes[balanced], np.full_like(balanced, place), balanced]))
            nbytes[balanced] = 0
        np.add.at(load, pattern.first[:, 0], nbytes)
    if not shared:
        return writers
    keys = np.concatenate(shared, axis=1)
    keys = keys[:, np.lexsort(keys[::-1])]  # large ones first balances best
    loads = load.tolist()
    for negated, place, b in zip(*keys.tolist(), strict=True):
        t = names[place]
        writer = min(planned[t][1].holders[b], key=lambda holder: loads[holder[0]])
        loads[writer.rank] -= negated
        if writers[t] is planned[t][1].first:
            writers[t] = writers[t].copy()
        writers[t][b] = writer
    return writers


def _place(planned: Sequence[tuple[_Tensor, _Pattern]], writers: Sequence[Numbers], num_ranks: int) -> SavePlan:
    """Give every box its name and place in its writer's file."""
    pieces: list[Piece] = []
    written: list[tuple[Numbers, Numbers]] = []  # ranks, and the number of the piece that each of them writes
    placed: dict[tuple[str, str], Places] = {}
    ends = {section: np.zeros(num_ranks, dtype=np.int64) for section in SECTIONS}
    keys = {section: {tensor.key for tensor, _ in planned if tensor.section == section} for section in SECTIONS}

    def file_order(t: int) -> tuple[int, int, str]:
        # Wide dtypes first keeps every tensor aligned to its item size without gaps.
        tensor = planned[t][0]
        return SECTIONS.index(tensor.section), -ITEM_BYTES[tensor.dtype], tensor.key

    for t in sorted(range(len(planned)), key=file_order):
        (section, key, dtype, _, _, rows, _), pattern = planned[t]
        if writers[t] is pattern.first:
            arranged = pattern.by_first = pattern.by_first or _arrange(pattern, writers[t])
        else:
            arranged = _arrange(pattern, writers[t])
        ranks, first = arranged.ranks, arranged.first
        nbytes = arranged.volumes * ITEM_BYTES[dtype]
        # A rank's boxes follow each other: counted from the first of them.
        before = np.cumsum(nbytes) - nbytes
        starts = ends[section][ranks] + before - before[first]
        np.add.at(ends[section], ranks, nbytes)
        written.append((ranks, arranged.which + len(pieces)))
        names = _names(key, keys[section])
        pieces += [Piece(rows[i], j, section, names(count)) for i, j, count in arranged.kinds]
        placed[section, key] = Places(ranks, starts, arranged.boxes)
    kinds_of = {(tensor.section, tensor.key): (tensor.dtype, tensor.shape) for tensor, _ in planned}
    return SavePlan(_pieces_of_ranks(pieces, written, num_ranks), {at: placed[at] for at in kinds_of}, kinds_of)


class _Arranged(NamedTuple):
    """A pattern's boxes in order of the ranks that write them."""

    ranks: Numbers
    first: Numbers
    """For each box, where the boxes of its rank begin."""
    volumes: Numbers
    kinds: list[tuple[int, int, int]]
    """Distinct pieces: row, box, and how many boxes of the tensor the rank writes before it."""
    which: Numbers
    """For each box, its number in ``kinds``."""
    boxes: _Boxes


def _arrange(pattern: _Pattern, writers: Numbers) -> _Arranged:
    order = np.argsort(writers[:, 0], kind="stable")
    ranks, row, box = writers[order].T
    begins = np.flatnonzero(np.diff(ranks, prepend=-1))
    first = np.repeat(begins, np.diff(begins, append=len(ranks)))
    pieces = np.stack([row, box, np.arange(len(ranks)) - first])
    kinds, which = np.unique(pieces, axis=1, return_inverse=True)
    listed = [(i, j, count) for i, j, count in kinds.T.tolist()]
    return _Arranged(ranks, first, pattern.volumes[order], listed, which.reshape(-1), _Boxes(pattern.boxes, order))


def _pieces_of_ranks(
    pieces: Sequence[Piece], written: Sequence[tuple[Numbers, Numbers]], num_ranks: int
) -> tuple[tuple[Piece, ...], ...]:
    """Each rank's pieces in file order; ranks that write the same share one tuple."""
    ranks = np.concatenate([np.zeros(0, np.int64), *(ranks for ranks, _ in written)])
    numbers = np.concatenate([np.zeros(0, np.int64), *(which for _, which in written)])
    # Narrow integers are sorted by radix.
    numbers = numbers[np.argsort(ranks.astype(np.uint16) if num_ranks <= 1 << 16 else ranks, kind="stable")]
    listed = np.split(numbers, np.cumsum(np.bincount(ranks, minlength=num_ranks))[:-1])
    made: dict[bytes, tuple[Piece, ...]] = {}
    for mine in listed:
        if mine.tobytes() not in made:
            made[mine.tobytes()] = tuple(pieces[i] for i in mine.tolist())
    return tuple(made[mine.tobytes()] for mine in listed)


def _names(key: str, keys: Container[str]) -> Callable[[int], str]:
    """The name in a file of a tensor's box: its key, for further boxes of one rank with a number that makes it unique."""
    free = itertools.chain([key], (numbered for n in itertools.count(1) if (numbered := f"{key}@{n}") not in keys))
    known: list[str] = []

    def name(count: int) -> str:
        while len(known) <= count:
            known.append(next(free))
        return known[count]

    return name


def _columns(boxes: Sequence[Box]) -> list[list[list[int]]]:
    """Offsets and sizes of boxes, a list per dimension."""
    dims = range(len(boxes[0][0]) if boxes else 0)
    return [[[box[side][d] for box in boxes] for d in dims] for side in (0, 1)]


def _check_cover(tensor: _Tensor, boxes: Sequence[Box]) -> None:
    """Boxes must tile the tensor: every element in exactly one."""
    shape = tensor.shape
    offsets, sizes = _columns(boxes)
    if boxes and is_tiling(shape, offsets, sizes, len(boxes)):
        return
    clash = find_overlap(boxes)
    if clash:
        raise ValueError(
            f"{tensor.section} tensor {tensor.key!r} has overlapping parts {clash[0]} and {clash[1]} (offsets, sizes): "
            "two ranks shard it differently."
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
