"""Who writes what: replicas once, the load balanced, every element of every tensor covered exactly once.

Pure functions on what each rank says it holds. A box that several ranks hold (data-parallel replicas, plain tensors)
is written by the least loaded of them; boxes with one holder are counted first. The cost is linear in ranks × tensors:
256 ranks with 900 tensors each take a few seconds in one process, and a plan is reused while the structure of the
state stays the same.
"""

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_ckpt._format import ITEM_BYTES, SECTIONS

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one number a dimension."""


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
class Plan:
    """The whole save."""

    pieces: tuple[tuple[Piece, ...], ...]
    """What each rank writes, in file order."""
    placed: dict[tuple[str, str], tuple[Placed, ...]]
    """(section, key) to its boxes."""
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]]
    """(section, key) to dtype and shape."""


def plan_save(ranks: Sequence[Sequence[Held]]) -> Plan:
    """Assign every distinct box to one rank.

    Args:
        ranks: What each rank holds, in rank order.

    Raises:
        ValueError: If ranks disagree on a tensor's dtype or shape, boxes overlap without being equal, or an element
            is held by no rank.
    """
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    first: dict[tuple[str, str], int] = {}
    holders: dict[tuple[str, str], dict[Box, list[tuple[int, int, int]]]] = {}
    for rank, tensors in enumerate(ranks):
        for i, held in enumerate(tensors):
            at = (held.section, held.key)
            kind = (held.dtype, held.shape)
            if kinds.setdefault(at, kind) != kind:
                raise ValueError(
                    f"{held.section} tensor {held.key!r} is {_text(*kinds[at])} on rank {first[at]} but "
                    f"{_text(*kind)} on rank {rank}. A name must mean one tensor on every rank."
                )
            first.setdefault(at, rank)
            boxes = holders.setdefault(at, {})
            for j, box in enumerate(held.boxes):
                boxes.setdefault(box, []).append((rank, i, j))
    for at, boxes in holders.items():
        _check_cover(at, kinds[at][1], list(boxes))
    return _place(len(ranks), kinds, holders)


def _place(
    num_ranks: int,
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]],
    holders: dict[tuple[str, str], dict[Box, list[tuple[int, int, int]]]],
) -> Plan:
    load = [0] * num_ranks
    chosen: list[list[tuple[int, tuple[str, str], Box, int, int]]] = [[] for _ in range(num_ranks)]
    shared: list[tuple[int, tuple[str, str], Box, list[tuple[int, int, int]]]] = []
    for at, boxes in holders.items():
        item = ITEM_BYTES[kinds[at][0]]
        for box, who in boxes.items():
            nbytes = math.prod(box[1]) * item
            if len(who) > 1:
                shared.append((nbytes, at, box, who))
            else:
                rank, i, j = who[0]
                load[rank] += nbytes
                chosen[rank].append((item, at, box, i, j))
    shared.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))  # large ones first balances best
    for nbytes, at, box, who in shared:
        rank, i, j = min(who, key=lambda holder: (load[holder[0]], holder[0]))
        load[rank] += nbytes
        chosen[rank].append((ITEM_BYTES[kinds[at][0]], at, box, i, j))
    pieces: list[tuple[Piece, ...]] = []
    placed: dict[tuple[str, str], list[Placed]] = {at: [] for at in holders}
    for rank, mine in enumerate(chosen):
        # Wide dtypes first keeps every tensor aligned to its item size without gaps.
        mine.sort(key=lambda entry: (SECTIONS.index(entry[1][0]), -entry[0], entry[1][1], entry[2]))
        start: dict[str, int] = dict.fromkeys(SECTIONS, 0)
        names: set[tuple[str, str]] = set()
        listed: list[Piece] = []
        for item, at, box, i, j in mine:
            section, key = at
            listed.append(Piece(i, j, section, _free_name(section, key, names)))
            placed[at].append(Placed(rank, start[section], box))
            start[section] += math.prod(box[1]) * item
        pieces.append(tuple(listed))
    return Plan(tuple(pieces), {at: tuple(boxes) for at, boxes in placed.items()}, kinds)


def _free_name(section: str, key: str, names: set[tuple[str, str]]) -> str:
    name, n = key, 0
    while (section, name) in names:
        n += 1
        name = f"{key}@{n}"
    names.add((section, name))
    return name


def _check_cover(at: tuple[str, str], shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Boxes must tile ``shape``: volumes add up and no two overlap."""
    volume = sum(math.prod(sizes) for _, sizes in boxes)
    if volume != math.prod(shape) or not boxes:
        raise ValueError(
            f"{at[0]} tensor {at[1]!r} of shape {list(shape)} has {math.prod(shape)} elements, but the ranks hold "
            f"{volume} in {len(boxes)} distinct parts. Every rank that holds a part must take part in the save."
        )
    clash = find_overlap(boxes)
    if clash:
        raise ValueError(
            f"{at[0]} tensor {at[1]!r} has overlapping parts {clash[0]} and {clash[1]} (offsets, sizes). "
            "Two ranks hold different cuts of it."
        )


def find_overlap(boxes: Sequence[Box], dim: int = 0) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. Near linear for grids, which is what meshes make."""
    if len(boxes) < 2:
        return None
    if dim == len(boxes[0][0]):
        return boxes[0], boxes[1]  # equal in every dimension so far
    ordered = sorted(boxes, key=lambda box: (box[0][dim], box[1][dim]))
    groups: list[tuple[int, list[Box]]] = []  # (end, boxes): intervals that touch share a group
    for box in ordered:
        begin, end = box[0][dim], box[0][dim] + box[1][dim]
        if begin == end:
            continue
        if groups and begin < groups[-1][0]:
            last, members = groups[-1]
            members.append(box)
            groups[-1] = (max(end, last), members)
        else:
            groups.append((end, [box]))
    for _, group in groups:
        same = all(b[0][dim] == group[0][0][dim] and b[1][dim] == group[0][1][dim] for b in group)
        clash = find_overlap(group, dim + 1) if same else _find_overlap_pairwise(group)
        if clash:
            return clash
    return None


def _find_overlap_pairwise(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            if intersect(a, b) is not None:
                return b, a
    return None


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None if they share no element."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in zip(a[0], a[1], b[0], b[1], strict=True))
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return None
    return low, tuple(h - lo for lo, h in zip(low, high, strict=True))


def plan_told(told: Sequence[bytes]) -> Plan:
    """`plan_save` on what the ranks sent.

    Raises:
        ValueError: As `plan_save`.
    """
    # Hundreds of thousands of small tuples, none in a cycle: the collector would walk them over and over, which
    # doubles the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return plan_save([decode_held(data) for data in told])
    finally:
        if collecting:
            gc.enable()


def encode_held(tensors: Sequence[Held]) -> bytes:
    """What a rank holds, as JSON for rank 0."""
    rows: list[Any] = [[h.section, h.key, h.dtype, h.shape, h.boxes] for h in tensors]
    return json.dumps(rows, separators=(",", ":")).encode()


def decode_held(data: bytes) -> list[Held]:
    """Undo `encode_held`."""
    return [
        Held(section, key, dtype, tuple(shape), tuple((tuple(o), tuple(s)) for o, s in boxes))
        for section, key, dtype, shape, boxes in json.loads(data)
    ]


def encode_pieces(pieces: Sequence[Piece]) -> bytes:
    """A rank's part of the plan, as JSON."""
    return json.dumps([[p.held, p.box, p.section, p.name] for p in pieces], separators=(",", ":")).encode()


def decode_pieces(data: bytes) -> tuple[Piece, ...]:
    """Undo `encode_pieces`."""
    return tuple(Piece(*row) for row in json.loads(data))


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
