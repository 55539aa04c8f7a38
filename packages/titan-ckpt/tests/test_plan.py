import random
import time

import pytest
from titan_ckpt._digest import block_digests
from titan_ckpt._format import BLOCK_BYTES
from titan_ckpt._index import FileRecord, Index
from titan_ckpt._plan import Held, encode_held, encode_pieces, find_overlap, plan_save, plan_told
from titan_ckpt._save import index_tensors


def row(rank: int, ranks: int, rows: int = 8, key: str = "w") -> Held:
    n = rows // ranks
    return Held("model", key, "F32", (rows, 4), (((rank * n, 0), (n, 4)),))


def test_replicas_are_written_once_and_the_load_is_balanced():
    # two replicas of two shards, and one tensor on every rank
    ranks = [[row(r % 2, 2, key=f"w{i}") for i in range(8)] for r in range(4)]
    plan = plan_save(ranks)
    assert [len(pieces) for pieces in plan.pieces] == [4, 4, 4, 4]
    assert sum(len(placed) for placed in plan.placed.values()) == 16


def test_starts_follow_each_other_without_gaps_wide_types_first():
    held = [
        Held("model", key, dtype, (3,), (((0,), (3,)),)) for key, dtype in (("a", "BF16"), ("b", "F64"), ("c", "U8"))
    ]
    plan = plan_save([held])
    assert {key: placed[0].start for (_, key), placed in plan.placed.items()} == {"b": 0, "a": 24, "c": 30}


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


def test_planning_for_256_ranks_with_900_tensors_takes_seconds_and_the_index_under_a_megabyte():
    num_ranks, num_tensors = 256, 900
    began = time.process_time()
    told = []
    for rank in range(num_ranks):
        shape = (num_ranks * 16, 1024)
        told.append(
            encode_held(
                [
                    Held("model", f"layers.{i}.weight", "F32", shape, (((rank * 16, 0), (16, 1024)),))
                    for i in range(num_tensors)
                ]
            )
        )
    said_s = time.process_time() - began
    began = time.process_time()
    plan = plan_told(told)
    sent = [encode_pieces(pieces) for pieces in plan.pieces]
    names, tensors = index_tensors(plan)
    data = 900 * 16 * 1024 * 4
    blocks = -(-data // BLOCK_BYTES)
    draw = random.Random(0)  # digests do not compress
    files = tuple(
        FileRecord(name, data, tuple(f"{draw.getrandbits(128):032x}" for _ in range(blocks)), 4096) for name in names
    )
    encoded = Index(files, tensors, {}).encode()
    planned_s = time.process_time() - began
    assert len(sent) == num_ranks
    assert planned_s < 10, "processor seconds; 4 on a quiet machine, doubled where others contend for its caches"
    assert len(encoded) < 1_000_000
    began = time.process_time()
    index = Index.decode(encoded)
    assert len(index.tensors["model"]["layers.3.weight"].chunks) == num_ranks
    assert time.process_time() - began < 3
    print(f"say {said_s:.2f} s, plan {planned_s:.2f} s, index {len(encoded)} bytes")


def test_block_digests_do_not_depend_on_how_the_stream_is_cut():
    from titan_ckpt._digest import BlockDigester

    data = bytes(range(256)) * (BLOCK_BYTES // 128 + 3)
    digester = BlockDigester()
    for at in range(0, len(data), 999_983):
        digester.feed(data[at : at + 999_983])
    assert digester.finish() == block_digests(data)
    assert len(digester.finish()) == 3
