import itertools
import math
import random
import time
from collections import defaultdict

import numpy as np
import pytest
from titan_ckpt.format.boxes import find_overlap, intersect, is_tiling
from titan_ckpt.format.codec import block_digests
from titan_ckpt.format.columns import column_numbers
from titan_ckpt.format.index import FileRecord, Index
from titan_ckpt.format.names import BLOCK_BYTES, ITEM_BYTES
from titan_ckpt.save.plan import (
    Held,
    decode_pieces,
    encode_held,
    encode_pieces,
    plan_encoded,
    plan_save,
)


def row(rank: int, ranks: int, rows: int = 8, key: str = "w") -> Held:
    n = rows // ranks
    return Held("model", key, "F32", (rows, 4), (((rank * n, 0), (n, 4)),))


def test_replicas_are_written_once_and_the_load_is_balanced():
    # two replicas of two shards, and one tensor on every rank
    ranks = [[row(r % 2, 2, 1 << 15, key=f"w{i}") for i in range(8)] for r in range(4)]
    plan = plan_save(ranks)
    assert [len(pieces) for pieces in plan.pieces] == [4, 4, 4, 4]
    assert sum(len(places.ranks) for places in plan.placed.values()) == 16


def test_small_replicas_all_come_from_the_lowest_rank_that_holds_them():
    ranks = [[row(r % 2, 2, key=f"w{i}") for i in range(8)] for r in range(4)]
    assert [len(pieces) for pieces in plan_save(ranks).pieces] == [8, 8, 0, 0]


def test_starts_follow_each_other_without_gaps_wide_types_first():
    held = [
        Held("model", key, dtype, (3,), (((0,), (3,)),)) for key, dtype in (("a", "BF16"), ("b", "F64"), ("c", "U8"))
    ]
    plan = plan_save([held])
    assert {key: places.starts[0] for (_, key), places in plan.placed.items()} == {"b": 0, "a": 24, "c": 30}


def test_a_missing_part_is_refused():
    with pytest.raises(ValueError, match=r"'w' of shape \[8, 4\] has 32 elements, but the ranks hold 24"):
        plan_save([[row(r, 4)] for r in range(3)])


def test_overlapping_parts_are_refused_even_if_volumes_add_up():
    boxes = (((0, 0), (4, 4)), ((2, 0), (4, 4)))
    with pytest.raises(ValueError, match="overlapping parts"):
        plan_save([[Held("model", "w", "F32", (8, 4), boxes)]])


def test_find_overlap_on_grids_and_oddly_cut_boxes():
    grid = [((r, c), (2, 3)) for r in range(0, 8, 2) for c in range(0, 9, 3)]
    assert find_overlap(grid) is None
    assert find_overlap([*grid, ((7, 8), (1, 1))]) is not None
    bricks = [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0, 2), (3, 2)), ((3, 2), (1, 2))]
    assert find_overlap(bricks) is None


def random_bricks(draw, offsets, shape):
    """A random cut of a box into boxes, seldom a grid."""
    dims = [d for d, n in enumerate(shape) if n > 1]
    if not dims or draw.random() < 0.3:
        return [(offsets, shape)]
    dim = draw.choice(dims)
    ends = [*sorted(draw.sample(range(1, shape[dim]), min(2, shape[dim] - 1))), shape[dim]]
    boxes = []
    for begin, end in itertools.pairwise([0, *ends]):
        at = (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :])
        boxes += random_bricks(draw, at, (*shape[:dim], end - begin, *shape[dim + 1 :]))
    return boxes


def random_layout(draw):
    """What a few ranks hold: tensors cut at random, each box on one rank, some ranks or all."""
    ranks = [[] for _ in range(draw.randint(1, 6))]
    for i in range(draw.randint(1, 8)):
        section, dtype = draw.choice(["model", "optim"]), draw.choice(["F32", "BF16", "U8"])
        key = draw.choice([f"w{i}", f"w{i - 1}@1"])  # the second is also how a second box of a tensor is named
        shape = tuple(draw.choice([0, 1, 3, 8]) if draw.random() < 0.1 else 6 for _ in range(draw.randint(0, 3)))
        held = [[] for _ in ranks]
        for box in random_bricks(draw, (0,) * len(shape), shape):
            for rank in draw.sample(range(len(ranks)), draw.choice([1, 1, draw.randint(1, len(ranks)), len(ranks)])):
                held[rank].append(box)
        for rank, boxes in enumerate(held):
            if boxes or draw.random() < 0.5:
                ranks[rank].append(Held(section, key, dtype, shape, tuple(boxes)))
    for tensors in ranks:
        if draw.random() < 0.5:
            draw.shuffle(tensors)
    return ranks


def plain_writers(ranks, small):
    """Who writes which box, the slow way: boxes of one holder and small ones first, then the largest to the least loaded."""
    holders = defaultdict(list)
    for rank, tensors in enumerate(ranks):
        for held in tensors:
            for box in held.boxes:
                nbytes = math.prod(box[1]) * ITEM_BYTES[held.dtype]
                holders[-nbytes, (held.section, held.key), box].append(rank)
    load, writers = [0] * len(ranks), {}
    for negated, at, box in sorted(holders, key=lambda e: (len(holders[e]) > 1 and -e[0] > small, e)):
        choice = holders[negated, at, box]
        writer = min(choice) if -negated <= small else min(choice, key=lambda rank: (load[rank], rank))
        writers[at, box] = writer
        load[writer] -= negated
    return writers


def unpacked(places):
    """Rank, start and box of each box of a tensor."""
    count = len(places.ranks)
    offsets, sizes = ([column_numbers(c, count) for c in side] for side in places.boxes.columns)
    boxes = zip(zip(*offsets, strict=True), zip(*sizes, strict=True), strict=True) if offsets else [((), ())] * count
    return list(zip(places.ranks.tolist(), places.starts.tolist(), boxes, strict=True))


@pytest.mark.parametrize("seeds", [range(at, at + 100) for at in range(0, 500, 100)], ids=lambda seeds: str(seeds[0]))
def test_every_element_is_written_once_by_the_least_loaded_holder_whatever_the_cuts(seeds, monkeypatch):
    small = 24
    monkeypatch.setattr("titan_ckpt.save.plan.SMALL_BYTES", small)
    for seed in seeds:
        ranks = random_layout(random.Random(seed))
        plan = plan_save(ranks)
        placed = {at: unpacked(places) for at, places in plan.placed.items()}
        writers = {(at, box): rank for at, places in placed.items() for rank, _, box in places}
        assert writers == plain_writers(ranks, small)
        for at, places in placed.items():
            times_written = np.zeros(plan.kinds[at][1], dtype=int)
            for _, _, (offsets, sizes) in places:
                times_written[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
            assert (times_written == 1).all()
        for rank, pieces in enumerate(plan.pieces):  # a file's tensors follow each other in the order of the pieces
            assert decode_pieces(encode_pieces(pieces)) == pieces
            assert len({(piece.section, piece.name) for piece in pieces}) == len(pieces)
            end = {"model": 0, "optim": 0}
            for piece in pieces:
                held = ranks[rank][piece.held]
                box = held.boxes[piece.box]
                assert held.section == piece.section
                assert (rank, end[held.section], box) in placed[held.section, held.key]
                end[held.section] += math.prod(box[1]) * ITEM_BYTES[held.dtype]
        assert sum(map(len, plan.pieces)) == sum(map(len, placed.values()))


def test_find_overlap_agrees_with_comparing_all_pairs():
    found = 0
    for seed in range(300):
        draw = random.Random(seed)
        boxes = random_bricks(draw, (0, 0, 0), (6, 5, 4))
        if draw.random() < 0.5:
            offsets = tuple(draw.randint(0, 3) for _ in range(3))
            boxes.append((offsets, tuple(draw.choice([0, 1, 1, 2, 2]) for _ in range(3))))
        draw.shuffle(boxes)
        clash = find_overlap(boxes)
        assert (clash is not None) == any(intersect(a, b) for a, b in itertools.combinations(boxes, 2))
        if clash:
            found += 1
            assert clash[0] is not clash[1]
            assert set(clash) <= set(boxes)
            assert intersect(*clash)
    assert 50 < found < 150


def columns(boxes, dims):
    return [[[box[side][d] for box in boxes] for d in range(dims)] for side in (0, 1)]


def test_is_tiling_agrees_with_counting_every_element():
    """Cuts of a tensor, with boxes doubled, moved, dropped or resized: volumes often add up although elements are
    missing."""
    right = same_volume = 0
    for seed in range(600):
        draw = random.Random(seed)
        shape = (6, 5, 4)[: draw.randint(1, 3)]
        boxes = random_bricks(draw, (0,) * len(shape), shape)
        for _ in range(draw.randint(0, 2)):
            i, j = draw.randrange(len(boxes)), draw.randrange(len(boxes))
            offsets, sizes = boxes[i]
            change = draw.choice(["double", "move", "drop", "grow"])
            if change == "double":
                boxes[j] = boxes[i]
            elif change == "move":
                boxes[i] = (tuple(draw.randint(0, n - size) for n, size in zip(shape, sizes, strict=True)), sizes)
            elif change == "drop" and len(boxes) > 1:
                del boxes[i]
            elif change == "grow":
                boxes[i] = (offsets, (draw.randint(0, shape[0] - offsets[0]), *sizes[1:]))
        times = np.zeros(shape, dtype=int)
        for offsets, sizes in boxes:
            times[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        tiles = bool((times == 1).all())
        assert is_tiling(shape, *columns(boxes, len(shape)), len(boxes)) == tiles
        right += tiles
        same_volume += times.sum() == math.prod(shape) and not tiles
    assert right > 150
    assert same_volume > 30


@pytest.mark.parametrize("crossed", [False, True], ids=["grid", "strips-crossed"])
def test_checking_a_hundred_thousand_boxes_takes_under_a_second_of_the_processor(crossed):
    """The second half of the strips all meet in one dimension and the first half in the other, so no sweep along one
    dimension is short."""
    n = 320
    if crossed:
        n = 50_000
        boxes = [((i, 0), (1, 7)) for i in range(n)] + [((0, 7 + i), (n, 1)) for i in range(n)]
        shape = (n, 7 + n)
    else:
        boxes = [((2 * i, 3 * j), (2, 3)) for i in range(n) for j in range(n)]
        shape = (2 * n, 3 * n)
    listed = columns(boxes, 2)
    began = time.process_time()
    assert is_tiling(shape, *listed, len(boxes))
    listed[0][0][-1] += 1
    listed[1][0][-1] -= 1
    assert not is_tiling(shape, *listed, len(boxes))
    assert time.process_time() - began < 2


def adamw_rows(rank, num_ranks):
    """225 parameters with AdamW's state, in even rows as FSDP cuts them: 900 tensors."""
    shapes = [(4096, 4096), (1024, 4096), (4096,), (14336, 4096), (4096, 14336), (128256, 4096), (11008,), (4097, 33)]
    tensors = []
    for i, shape in zip(range(225), itertools.cycle(shapes), strict=False):
        rows = -(-shape[0] // num_ranks)
        begin, end = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        zeros = (0,) * (len(shape) - 1)
        boxes = (((begin, *zeros), (end - begin, *shape[1:])),) if begin < end else ()
        tensors += [
            Held("model", f"layers.{i}.weight", "F32", shape, boxes),
            Held("optim", f"layers.{i}.weight/exp_avg", "F32", shape, boxes),
            Held("optim", f"layers.{i}.weight/exp_avg_sq", "F32", shape, boxes),
            Held("optim", f"layers.{i}.weight/step", "F32", (), (((), ()),)),
        ]
    return tensors


def shifted_rows(rank, num_ranks):
    """900 tensors in strips of columns, each strip cut into rows at other places: not a grid."""
    strip, part = divmod(rank, 16)
    strips = num_ranks // 16
    begin = part * 64 + strip * (part > 0)
    end = (part + 1) * 64 + strip if part < 15 else 1024
    box = ((begin, strip * 64), (end - begin, 64))
    return [Held("model", f"layers.{i}.weight", "F32", (1024, strips * 64), (box,)) for i in range(900)]


@pytest.mark.parametrize("held", [adamw_rows, shifted_rows])
def test_planning_for_256_ranks_with_900_tensors_takes_seconds_and_the_index_under_a_megabyte(held):
    num_ranks = 256
    began = time.process_time()
    told = [encode_held(held(rank, num_ranks)) for rank in range(num_ranks)]
    said_s = time.process_time() - began
    began = time.process_time()
    plan = plan_encoded(told)  # all that rank 0 does, from here
    sent = [encode_pieces(pieces) for pieces in plan.pieces]
    names, tensors = plan.index_tensors()
    data = 900 * 16 * 1024 * 4
    blocks = -(-data // BLOCK_BYTES)
    draw = random.Random(0)  # digests do not compress
    files = tuple(
        FileRecord(name, data, tuple(f"{draw.getrandbits(128):032x}" for _ in range(blocks)), 4096) for name in names
    )
    encoded, _ = Index(files, tensors, {}).encode()
    planned_s = time.process_time() - began
    print(f"say {said_s:.2f} s, plan {planned_s:.2f} s, index {len(encoded)} bytes")
    assert len(sent) == num_ranks
    assert sum(map(len, tensors.values())) == 900
    assert planned_s < 5, "processor seconds"
    assert len(encoded) < 1_000_000
    began = time.process_time()
    index = Index.decode(encoded)
    assert len(index.tensors["model"]["layers.3.weight"].chunks) == num_ranks
    assert time.process_time() - began < 3


def test_block_digests_do_not_depend_on_how_the_stream_is_cut():
    from titan_ckpt.format.codec import BlockDigester

    data = bytes(range(256)) * (BLOCK_BYTES // 128 + 3)
    digester = BlockDigester()
    for at in range(0, len(data), 999_983):
        digester.feed(data[at : at + 999_983])
    assert digester.finish() == block_digests(data)
    assert len(digester.finish()) == 3
