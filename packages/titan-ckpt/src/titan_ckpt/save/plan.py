"""Which rank writes which box. Each box is written once, the load is balanced, and every element is covered once.

These are pure functions on what each rank reports to hold. If one rank holds a box, that rank writes it. If several ranks
hold it (data-parallel replicas, plain tensors), the least loaded of them writes it.

Planning 3,000 tensors on 1,024 ranks takes under a second, for two reasons. A rank reports its tensors and, apart from
them, the few distinct ways in which they are cut. The first part is equal on ranks that hold other boxes of the
same tensors, and is parsed once for all of them. Tensors that every rank cuts alike share one `_Pattern`, whose boxes are
collected and checked once. The work per tensor is then arithmetic on columns with one entry per box.
"""

import functools
import gc
import itertools
import json
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_ckpt.format.boxes import Box, find_overlap, is_tiling
from titan_ckpt.format.columns import Column, pack_column
from titan_ckpt.format.index import StoredTensor
from titan_ckpt.format.names import ITEM_BYTES, SECTIONS, shard_name

Numbers = NDArray[np.int64]


class Held(NamedTuple):
    """A tensor as one rank holds it."""

    section: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Piece(NamedTuple):
    """A box that a rank writes: the number of the tensor in its `Held` list, and of the box in that tensor."""

    held: int
    box: int
    section: str
    name: str
    """Its name in the file."""


@dataclass(frozen=True, slots=True)
class Places:
    """All boxes of a tensor in the step, by column, in rank order."""

    ranks: Numbers
    """The rank whose file holds each box."""
    starts: Numbers
    """First byte of each box in that file's data."""
    boxes: "_Boxes"


class _Boxes:
    """Boxes of a pattern in some order."""

    def __init__(self, boxes: "list[Box]", order: Numbers) -> None:
        self._boxes, self._order = boxes, order

    @functools.cached_property
    def columns(self) -> tuple[list[Column], list[Column]]:
        """Offsets and sizes, one column per dimension."""
        offsets, sizes = (
            [pack_column(np.array(column, dtype=np.int64)[self._order]) for column in side]
            for side in _columns(self._boxes)
        )
        return offsets, sizes


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The whole save."""

    pieces: tuple[tuple[Piece, ...], ...]
    """What each rank writes, in file order. Ranks that write the same share one tuple."""
    placed: dict[tuple[str, str], Places]
    """(section, key) to its boxes."""
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]]
    """(section, key) to dtype and shape."""

    def index_tensors(self) -> tuple[tuple[str, ...], dict[str, dict[str, StoredTensor]]]:
        """The safetensors files, and the tensors as the index holds them."""
        names: list[str] = []
        numbers = {section: np.zeros(len(self.pieces), dtype=np.int64) for section in SECTIONS}  # rank to file
        sections: dict[int, set[str]] = {}
        for rank, pieces in enumerate(self.pieces):
            if id(pieces) not in sections:
                sections[id(pieces)] = {piece.section for piece in pieces}
            for section in SECTIONS:
                if section in sections[id(pieces)]:
                    numbers[section][rank] = len(names)
                    names.append(shard_name(section, rank))
        tensors: dict[str, dict[str, StoredTensor]] = {section: {} for section in SECTIONS}
        for (section, key), places in self.placed.items():
            dtype, shape = self.kinds[section, key]
            offsets, sizes = places.boxes.columns
            columns = {
                "count": len(places.ranks),
                "file": pack_column(numbers[section][places.ranks]),
                "start": pack_column(places.starts),
                "offsets": offsets,
                "sizes": sizes,
            }
            tensors[section][key] = StoredTensor(dtype, shape, columns)
        return tuple(names), tensors


def plan_save(ranks: Sequence[Sequence[Held]]) -> SavePlan:
    """Assign every distinct box to one rank, given what each rank holds.

    Raises:
        ValueError: If ranks disagree on a tensor's dtype or shape, boxes overlap without being equal, or no rank holds an
            element.
    """
    return plan_encoded([encode_held(tensors) for tensors in ranks])


def plan_encoded(encoded: Sequence[bytes]) -> SavePlan:
    """`plan_save` on what the ranks sent (`encode_held`)."""
    # The garbage collector would walk hundreds of thousands of small tuples again and again. That doubles the time.
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
    """Ranks that report the same tensors, cut alike. They differ only in the boxes."""

    rows: list[tuple[str, str, str, list[int], int]]
    """Section, key, dtype, shape, and number of the cut."""
    ranks: list[int]
    cuts: list[list[tuple[Box, ...]]]
    """For each rank, the boxes of each cut."""


class _Tensor(NamedTuple):
    """A tensor in all groups."""

    section: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    """The first rank that reported it."""
    rows: list[int]
    """Its rows: each one's number in its group."""
    cuts: list[tuple[int, int]]
    """Its rows: each one's group, and the cut in that group."""


class _Holder(NamedTuple):
    """A rank that holds a box."""

    rank: int
    row: int
    """Index into `_Tensor.rows`."""
    box: int
    """Number of the box in the row's cut."""


@dataclass(slots=True, eq=False)
class _Pattern:
    """How all ranks together cut a tensor."""

    boxes: list[Box]
    """Distinct boxes, in order."""
    holders: list[list[_Holder]]
    """The holders of each box, in rank order."""
    volumes: Numbers
    """Elements of each box."""
    first: Numbers
    """The first holder of each box: rank, row and box."""
    shared: NDArray[np.bool_]
    """Whether a box has several holders."""
    by_first: "_Arranged | None" = None
    """The arrangement if every box is written by its first holder, which is the common case."""


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
    """The tensors, in the order in which ranks report them."""
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


# Shared boxes up to this size are written by their lowest rank, and not balanced. State that ranks do not keep equal, such
# as batch statistics, is then taken from one rank.
SMALL_BYTES = 64 << 10


def _writers(planned: Sequence[tuple[_Tensor, _Pattern]], num_ranks: int) -> list[Numbers]:
    """For each tensor, the holder that writes each box: an array of rank, row and box."""
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
    keys = keys[:, np.lexsort(keys[::-1])]  # largest first: the best balance
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
    """Give every box its name and its place in the writer's file."""
    pieces: list[Piece] = []
    written: list[tuple[Numbers, Numbers]] = []  # ranks, and the number of the piece that each writes
    placed: dict[tuple[str, str], Places] = {}
    ends = {section: np.zeros(num_ranks, dtype=np.int64) for section in SECTIONS}
    keys = {section: {tensor.key for tensor, _ in planned if tensor.section == section} for section in SECTIONS}

    def file_order(t: int) -> tuple[int, int, str]:
        # Wide dtypes first: every tensor is aligned to its item size without gaps.
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
        # The boxes of a rank are consecutive: count from the first of them.
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
    """A pattern's boxes, sorted by the rank that writes them."""

    ranks: Numbers
    first: Numbers
    """For each box, the index of the first box of its rank."""
    volumes: Numbers
    kinds: list[tuple[int, int, int]]
    """Distinct pieces: row, box, and number of boxes of the tensor that the rank writes before it."""
    which: Numbers
    """For each box, its index in ``kinds``."""
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
    """Each rank's pieces in file order. Ranks that write the same share one tuple."""
    ranks = np.concatenate([np.zeros(0, np.int64), *(ranks for ranks, _ in written)])
    numbers = np.concatenate([np.zeros(0, np.int64), *(which for _, which in written)])
    # numpy sorts narrow integers by radix.
    numbers = numbers[np.argsort(ranks.astype(np.uint16) if num_ranks <= 1 << 16 else ranks, kind="stable")]
    listed = np.split(numbers, np.cumsum(np.bincount(ranks, minlength=num_ranks))[:-1])
    made: dict[bytes, tuple[Piece, ...]] = {}
    for mine in listed:
        if mine.tobytes() not in made:
            made[mine.tobytes()] = tuple(pieces[i] for i in mine.tolist())
    return tuple(made[mine.tobytes()] for mine in listed)


def _names(key: str, keys: Container[str]) -> Callable[[int], str]:
    """The names of a tensor's boxes in one file: the key, then the key with a number that makes it unique."""
    free = itertools.chain([key], (numbered for n in itertools.count(1) if (numbered := f"{key}@{n}") not in keys))
    known: list[str] = []

    def name(count: int) -> str:
        while len(known) <= count:
            known.append(next(free))
        return known[count]

    return name


def _columns(boxes: Sequence[Box]) -> list[list[list[int]]]:
    """Offsets and sizes of boxes, one list per dimension."""
    dims = range(len(boxes[0][0]) if boxes else 0)
    return [[[box[side][d] for box in boxes] for d in dims] for side in (0, 1)]


def _check_cover(tensor: _Tensor, boxes: Sequence[Box]) -> None:
    """Check that each element is in exactly one box."""
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
    """What a rank holds, as two lines of JSON: the tensors, and the distinct cuts.

    Equal lists give equal bytes. The first line is equal on ranks that hold other boxes of the same tensors.
    """
    cuts: dict[tuple[tuple[int, ...], tuple[Box, ...]], int] = {}
    rows = [(h.section, h.key, h.dtype, h.shape, cuts.setdefault((h.shape, h.boxes), len(cuts))) for h in tensors]
    lines = (rows, [boxes for _, boxes in cuts])
    return b"\n".join(json.dumps(line, separators=(",", ":")).encode() for line in lines)


def encode_pieces(pieces: Sequence[Piece]) -> bytes:
    """A rank's pieces as JSON, by column: a few long lists are faster than many short ones."""
    return json.dumps(list(zip(*pieces, strict=True)), separators=(",", ":")).encode()


def decode_pieces(data: bytes) -> tuple[Piece, ...]:
    """Undo `encode_pieces`."""
    return tuple(map(Piece._make, zip(*json.loads(data), strict=True)))
