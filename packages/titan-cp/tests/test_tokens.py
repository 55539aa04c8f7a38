from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from titan_cp import plan
from titan_testing import assert_close, run_ranks

LAYOUTS = ["contiguous", "zigzag", "per_document", "block"]
METHODS = ["ring", "ulysses", "usp"]
BOUNDS = [0, 1, 2, 7, 20, 51, 52, 64]


def make_plan(rank, size, layout, method="ring", **options):
    options = {"cu_seqlens": BOUNDS, "num_heads": 8, "block_size": 4, **options}
    return plan(size=size, rank=rank, method=method, layout=layout, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_shards_of_all_ranks_are_the_sequence_and_positions_count_within_documents(method, layout):
    tokens = torch.arange(64)
    position = torch.cat([torch.arange(b - a) for a, b in pairwise(BOUNDS)])
    plans = [make_plan(r, 4, layout, method) for r in range(4)]
    shards = [p.shard(tokens, 0) for p in plans]
    assert torch.equal(torch.cat(shards).sort().values, tokens)
    for p, shard in zip(plans, shards, strict=True):
        assert torch.equal(p.global_index(), shard)
        assert torch.equal(p.positions(), position[shard])


def test_shard_is_out_of_place_and_its_gradient_falls_on_its_own_tokens():
    p = make_plan(1, 4, "per_document")
    x = torch.randn(2, 64, 3, requires_grad=True)
    shard = p.shard(x, 1)
    assert shard.data_ptr() != x.data_ptr()
    shard.sum().backward()
    mine = torch.zeros(64)
    mine[p.global_index()] = 1
    assert torch.equal(x.grad, mine[None, :, None].expand_as(x))


def test_labels_never_cross_a_document_and_are_the_next_token_otherwise():
    p = make_plan(0, 4, "zigzag")
    tokens = torch.arange(100, 164).repeat(2, 1)
    kept = tokens.clone()
    labels = p.shift_labels(tokens)
    assert torch.equal(tokens, kept)
    for t in range(64):
        expected = -100 if t + 1 in BOUNDS else 101 + t
        assert labels[0, t] == labels[1, t] == expected


def test_padding_is_a_document_of_its_own_that_unshard_removes():
    p = plan(61, size=4, rank=3, num_heads=4, method="ring", layout="zigzag", pad=True)
    assert (p.seq_len, p.pad_to, p.cu_seqlens) == (61, 64, (0, 61, 64))
    shards = [p.for_rank(r).shard(torch.arange(61), 0, pad_value=-1) for r in range(4)]
    together = torch.cat(shards)
    assert (together == -1).sum() == 3
    assert torch.equal(together[together >= 0].sort().values, torch.arange(61))


def test_a_legal_length_is_not_padded():
    assert plan(64, size=4, rank=0, num_heads=4, method="ring", layout="zigzag", pad=True).pad_to == 64


def unshard_everything():
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for layout in LAYOUTS:
        for method in METHODS:
            p = make_plan(rank, size, layout, method)
            x = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            local = p.shard(x, 1).requires_grad_()
            whole = p.unshard(local, 1, group=dist.group.WORLD)
            weight = torch.arange(64.0, dtype=torch.float64)[None, :, None] * (rank + 1)
            (whole * weight).sum().backward()
            results.append((whole.detach(), x, local.grad, p.global_index()))
    padded = plan(61, size=size, rank=rank, num_heads=4, method="ring", layout="zigzag", pad=True)
    x = torch.arange(61.0)
    results.append((padded.unshard(padded.shard(x, 0), 0, group=dist.group.WORLD), x, None, None))
    return results


def test_unshard_inverts_shard_and_its_gradient_is_the_sum_over_ranks():
    for results in run_ranks(unshard_everything, 4):
        for whole, x, grad, index in results:
            assert torch.equal(whole, x)
            if grad is not None:
                # ranks weigh token t by t·1, t·2, t·3, t·4: the sum is 10 t
                assert_close(grad, (10.0 * index.double())[None, :, None].expand_as(grad))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.shard(torch.zeros(2, 32), 1), "shard got 32 tokens .* plan is for 64"),
        (lambda p: p.shift_labels(torch.zeros(2, 32)), "shift_labels got 32 tokens .* Shift the whole sequence first"),
        (lambda p: p.unshard(torch.zeros(2, 64), 1, group=None), "unshard got 64 tokens .* holds 16"),
        (lambda p: p.unshard(torch.zeros(2, 16), 1, group=None), "group is missing, and the plan is for 4 ranks"),
        (lambda p: p.for_rank(4), "rank=4 is outside the plan's 4 ranks"),
    ],
)
def test_tokens_of_the_wrong_length_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_plan(0, 4, "contiguous"))
