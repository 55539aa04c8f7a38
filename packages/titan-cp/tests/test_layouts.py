import random

import numpy as np
import pytest
import torch
from titan_cp import attention_mask, plan
from titan_cp.planning.costs import work_matrix
from titan_cp.planning.layouts import LAYOUTS, layout_multiple, plan_ranges
from titan_cp.planning.ranges import attended_pairs, document_pieces, split_ranges
from titan_cp.planning.tiles import plan_tiles


def random_packing(rng, seq_len, mean):
    """Document boundaries with log-normal lengths, the way web text is."""
    bounds = [0]
    while bounds[-1] < seq_len:
        bounds.append(min(seq_len, bounds[-1] + max(1, int(rng.lognormvariate(0, 1) * mean / 1.65))))
    return bounds


def random_cases(count):
    rng = random.Random(0)
    for _ in range(count):
        size, layout, block = rng.choice([1, 2, 3, 4, 8]), rng.choice(LAYOUTS), rng.choice([1, 4])
        multiple = layout_multiple(layout, size, block)
        seq_len = multiple * rng.randint(1, max(1, 96 // multiple))
        bounds = [0, *sorted(rng.sample(range(1, seq_len), rng.randint(0, min(6, seq_len - 1)))), seq_len]
        causal, window = rng.random() < 0.6, rng.choice([None, None, 1, 2, 5, 17])
        ranges = plan_ranges(layout, bounds, size, causal=causal, window=window, block_size=block)
        yield ranges, bounds, seq_len, causal, window


def tokens_of(ranges):
    return [t for start, stop in ranges for t in range(start, stop)]


def test_every_layout_gives_each_token_to_one_rank_and_each_rank_as_many():
    for ranges, _, seq_len, _, _ in random_cases(300):
        held = [tokens_of(r) for r in ranges]
        assert sorted(t for tokens in held for t in tokens) == list(range(seq_len))
        assert {len(h) for h in held} == {seq_len // len(ranges)}
        assert all(h == sorted(h) for h in held)


def test_tiles_cover_each_attended_pair_once_and_leave_no_row_empty():
    for ranges, bounds, seq_len, causal, window in random_cases(200):
        mask = attention_mask(seq_len, causal=causal, window=window, cu_seqlens=bounds)
        for q_ranges in ranges:
            for k_ranges in ranges:
                q_tokens, k_tokens = tokens_of(q_ranges), tokens_of(k_ranges)
                covered = torch.zeros(len(q_tokens), len(k_tokens), dtype=torch.int)
                rows = []
                for tile in plan_tiles(q_ranges, k_ranges, bounds, causal=causal, window=window):
                    tile_mask = tile.mask()
                    assert tile_mask.any(dim=1).all()
                    assert tile_mask.sum() == tile.pairs
                    covered[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += tile_mask.int()
                    rows += range(tile.q_start, tile.q_stop)
                assert len(set(rows)) == len(rows)
                assert torch.equal(covered, mask[q_tokens][:, k_tokens].int())


def test_zigzag_needs_one_tile_a_step():
    p = plan(4096, size=8, rank=0, num_heads=8, method="ring", layout="zigzag")
    assert all(len(p.for_rank(r).tiles(k)) == 1 for r in range(8) for k in range(8))


def test_predicted_work_equals_a_brute_force_count_of_pairs():
    for ranges, bounds, seq_len, causal, window in random_cases(200):
        mask = attention_mask(seq_len, causal=causal, window=window, cu_seqlens=bounds)
        predicted = work_matrix(ranges, bounds, causal=causal, window=window)
        for i, q_ranges in enumerate(ranges):
            counted = sum(
                attended_pairs(a, b, n, causal=causal, window=window)
                for _, a, b, n in document_pieces(q_ranges, bounds)
            )
            assert counted == mask[tokens_of(q_ranges)].sum()
            for j, k_ranges in enumerate(ranges):
                assert predicted[i, j] == mask[tokens_of(q_ranges)][:, tokens_of(k_ranges)].sum()


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses", "usp"])
def test_plan_work_equals_brute_force_pairs_times_heads(method):
    bounds = [0, 3, 40, 41, 96]
    p = plan(cu_seqlens=bounds, size=4, rank=0, num_heads=8, num_kv_heads=2, method=method, window=9)
    mask = attention_mask(96, window=9, cu_seqlens=bounds)
    for rank in range(4):
        mine = tokens_of(p.ring_ranges[rank // p.ulysses_degree])
        assert p.work[rank] == int(mask[mine].sum()) * (8 // p.ulysses_degree)
    assert sum(p.work) == int(mask.sum()) * 8


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("layout", ["per_document", "documents", "block"])
def test_layout_is_balanced_within_5_percent_on_100_random_packings(layout, size):
    rng = random.Random(size)
    worst = 1.0
    for _ in range(100):
        bounds = random_packing(rng, 65536, rng.choice([512, 1024, 4096, 16384]))
        p = plan(cu_seqlens=bounds, size=size, rank=0, num_heads=8, method="ring", layout=layout)
        worst = max(worst, p.imbalance)
    assert worst <= 1.05


def test_per_document_stays_balanced_on_documents_shorter_than_the_number_of_chunks():
    rng = random.Random(0)
    for mean in (2, 8, 32):
        p = plan(
            cu_seqlens=random_packing(rng, 8192, mean),
            size=8,
            rank=0,
            num_heads=8,
            method="ring",
            layout="per_document",
        )
        assert p.imbalance <= 1.05


def test_zigzag_is_perfect_for_one_causal_document_and_not_for_packed_ones():
    one = plan(65536, size=8, rank=0, num_heads=8, method="ring", layout="zigzag")
    assert one.imbalance == 1
    rng = random.Random(0)
    packed = [
        plan(cu_seqlens=random_packing(rng, 65536, 4096), size=8, rank=0, num_heads=8, method="ring", layout="zigzag")
        for _ in range(20)
    ]
    assert max(p.imbalance for p in packed) > 1.5
    assert plan(65536, size=8, rank=0, num_heads=8, method="ring", layout="contiguous").imbalance > 1.8


def test_split_ranges_cuts_a_token_list_into_equal_consecutive_pieces():
    assert split_ranges(((0, 3), (10, 15)), 4) == (((0, 2),), ((2, 3), (10, 11)), ((11, 13),), ((13, 15),))


@pytest.mark.parametrize("lengths", ["1000", "short", "one or two", "mixed"])
@pytest.mark.parametrize("size", [4, 7, 64])
def test_many_documents_are_dealt_in_turn_as_evenly_as_one_by_one(lengths, size):
    rng = np.random.default_rng(size)
    drawn = {
        "1000": rng.integers(500, 1500, 400),
        "short": rng.integers(1, 40, 3000),
        "one or two": rng.integers(1, 3, 3000),
        "mixed": np.concatenate([rng.integers(1, 5, 500), rng.integers(1000, 9000, 60), [200_000]]),
    }[lengths]
    bounds = np.cumsum([0, *rng.permutation(drawn)])
    bounds[-1] += -bounds[-1] % size
    bounds = tuple(bounds.tolist())
    for causal, window in ((True, None), (False, None), (True, 300)):
        ranges = plan_ranges("per_document", bounds, size, causal=causal, window=window, block_size=128)
        pieces = sorted(piece for held in ranges for piece in held)
        assert [a for a, _ in pieces[1:]] == [b for _, b in pieces[:-1]]  # every token once
        assert (pieces[0][0], pieces[-1][1]) == (0, bounds[-1])
        assert {sum(b - a for a, b in held) for held in ranges} == {bounds[-1] // size}
        work = [
            sum(attended_pairs(a, b, n, causal=causal, window=window) for _, a, b, n in document_pieces(held, bounds))
            for held in ranges
        ]
        if (lengths, size) != ("one or two", 64):  # 70 tokens a rank, of documents that nobody can cut
            assert max(work) * size <= 1.05 * sum(work)
        assert [len(held) for held in ranges[1:]] == [len(ranges[r]) for r in range(1, size)]
        assert ranges[-1] == ranges[size - 1]
        with pytest.raises(IndexError):
            ranges[size]
