"""Packed documents: what a rank sends is what the others' queries see, and planning it costs milliseconds."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from titan_cp import attention, attention_mask, plan, reference_attention
from titan_cp.planning.ranges import Ranges
from titan_testing import max_abs_error, run_ranks


def packing(documents, tokens, seed=0, sigma=1.0):
    """Boundaries of about so many documents with log-normal lengths."""
    lengths = np.random.default_rng(seed).lognormal(0, sigma, documents)
    ends = np.cumsum(lengths / lengths.sum() * tokens).astype(int)
    return sorted({0, tokens, *(int(e) for e in ends if e < tokens)})


def make(bounds, size, rank=0, **options):
    base = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "method": "ring", "layout": "documents"}
    return plan(cu_seqlens=bounds, size=size, rank=rank, **{**base, **options})


def rows(ranges: Ranges):
    return [row for start, stop in ranges for row in range(start, stop)]


CASES = [
    pytest.param(seed, size, options, id=f"seed{seed}-{size}ranks-{'-'.join(map(str, options.values()))}")
    for seed, size in ((0, 4), (1, 6), (2, 3))
    for options in (
        {"layout": "documents"},
        {"layout": "documents", "causal": False},
        {"layout": "contiguous"},
        {"layout": "block", "block_size": 4},
        {"layout": "contiguous", "window": 7},
        {"layout": "contiguous", "window": 7, "causal": False},
        {"layout": "block", "block_size": 4, "window": 7},
        {"layout": "per_document", "window": 3},
        {"layout": "zigzag", "window": 5, "causal": False},
    )
]


@pytest.mark.parametrize(("seed", "size", "options"), CASES)
def test_rows_that_travel_are_exactly_the_keys_that_queries_see(seed, size, options):
    bounds = packing(14, 48 * size, seed)
    p = make(bounds, size, **options)
    mask = attention_mask(48 * size, causal=p.causal, window=p.window, cu_seqlens=bounds)
    held = [torch.tensor(rows(r)) for r in p.ring_ranges]
    for i in range(size):
        mine = p.for_rank(i)
        assert len(mine.rounds) == len(p.rounds), "every rank has the same rounds"
        for j in range(size):
            seen = held[j][mask[held[i]][:, held[j]].any(dim=0)].tolist() if i != j else []
            assert int(p.rows_needed[i, j]) == len(seen)
            tokens = [
                token
                for this in mine.rounds
                for source, where in this.receives
                if source == j
                for token in (rows(this.tokens)[row] for row in rows(where))
            ]
            assert sorted(tokens) == seen
            sent = [r for this in p.for_rank(j).rounds for to, where in this.sends if to == i for r in rows(where)]
            assert [int(held[j][r]) for r in sent] == tokens, "sent in the order in which they are expected"


@pytest.mark.parametrize(("seed", "size", "options"), CASES[:4] + CASES[-3:])
def test_tiles_of_a_rank_and_its_rounds_cover_every_attended_pair_once(seed, size, options):
    bounds = packing(14, 48 * size, seed)
    p = make(bounds, size, **options)
    mask = attention_mask(48 * size, causal=p.causal, window=p.window, cu_seqlens=bounds)
    for i in range(size):
        mine = p.for_rank(i)
        covered = torch.zeros_like(mask, dtype=torch.int32)
        blocks = [(mine.ring_ranges[i], mine.tiles(i))]
        blocks += [(this.tokens, mine.round_tiles(index)) for index, this in enumerate(mine.rounds)]
        queries = torch.tensor(rows(mine.ring_ranges[i]))
        for ranges, tiles in blocks:
            keys = torch.tensor(rows(ranges))
            for tile in tiles:
                q, k = queries[tile.q_start : tile.q_stop], keys[tile.k_start : tile.k_stop]
                covered[q[:, None], k[None, :]] += tile.mask().int()
        assert torch.equal(covered[queries], mask[queries].int())


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_dealt_documents_are_balanced_and_few_keys_travel(sigma):
    p = make(packing(1047, 1 << 18, sigma=sigma), 64, layout="auto")
    assert p.layout == "documents"
    assert {sum(b - a for a, b in held) for held in p.ring_ranges} == {(1 << 18) // 64}
    assert p.imbalance <= 1.05
    assert max(p.sent_rows) <= 0.05 * (1 << 18), "a rank of the ring sends all of it but its own, 63 times as much"


def test_the_same_packing_is_planned_once():
    bounds = packing(300, 1 << 16)
    assert make(bounds, 16) is make(torch.tensor(bounds), 16)


class Sent:
    """Bytes given to point-to-point sends."""

    def __enter__(self):
        self.count, self._original = 0, dist.batch_isend_irecv
        dist.batch_isend_irecv = self._counted
        return self

    def _counted(self, operations):
        self.count += sum(o.tensor.nbytes for o in operations if o.op is dist.isend)
        return self._original(operations)

    def __exit__(self, *_):
        dist.batch_isend_irecv = self._original


def packed_attention(bounds, options):
    rank, size = dist.get_rank(), dist.get_world_size()
    p = make(bounds, size, rank, dtype=torch.float32, **options)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, h, p.seq_len, 8, generator=generator) for h in (4, 2, 2, 4))
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want, _ = reference_attention(*wide, cu_seqlens=bounds, window=p.window)
    wanted = (want, *torch.autograd.grad(want, wide, grad.double()))
    local = [p.shard(t, 2).requires_grad_() for t in (q, k, v)]
    with Sent() as forward:
        out = attention(*local, plan=p, group=dist.group.WORLD)
    with Sent() as backward:
        got = (out, *torch.autograd.grad(out, local, p.shard(grad, 2)))
    errors = [max_abs_error(a, p.shard(b.detach(), 2)) for a, b in zip(got, wanted, strict=True)]
    largest = [float(b.detach().abs().max()) for b in wanted]
    return p.direct, errors, largest, (forward.count, p.costs.forward_bytes), (backward.count, p.costs.backward_bytes)


@pytest.mark.parametrize("options", [{}, {"layout": "contiguous"}, {"layout": "contiguous", "window": 5}], ids=str)
def test_bytes_sent_are_the_bound_and_the_result_is_exact(options):
    size, bounds = 4, packing(40, 320, seed=3, sigma=0.5)
    mask = attention_mask(320, window=options.get("window"), cu_seqlens=bounds)
    held = [torch.tensor(rows(r)) for r in make(bounds, size, **options).ring_ranges]
    pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
    bound = sum(int(mask[held[i]][:, held[j]].any(dim=0).sum()) for i, j in pairs) * 2 * (8 + 8) * 4
    results = run_ranks(packed_attention, size, bounds, options)
    for direct, errors, largest, forward, backward in results:
        assert direct
        assert forward[0] == forward[1]
        assert backward[0] == backward[1]
        for error, scale in zip(errors, largest, strict=True):
            # Every number is a float32 sum over at most 320 tokens and 8 channels, rounded once for each: 328 roundings
            # of 2^-24, relative to the largest.
            assert error <= 328 * 2**-24 * max(scale, 1.0)
    assert sum(forward[0] for _, _, _, forward, _ in results) == bound
    # The backward fetches the same rows again, and sends a float32 gradient for each.
    assert sum(backward[0] for *_, backward in results) == 2 * bound


def narrow_values(case):
    """Values of 6 channels under keys of 10, by every method; errors against float64, and the bytes of the ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    p = plan(
        size=size, rank=rank, num_heads=4, num_kv_heads=2, head_dim=10, value_dim=6, dtype=torch.float32, block_size=4,
        **case,
    )  # fmt: skip
    groups = {"group": dist.group.WORLD}
    if p.method == "usp":
        mesh = dist.init_device_mesh("cpu", (p.ring_degree, p.ulysses_degree), mesh_dim_names=("ring", "ulysses"))
        groups = {"ring_group": mesh["ring"].get_group(), "ulysses_group": mesh["ulysses"].get_group()}
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 10), (2, 10), (2, 6), (4, 6))
    q, k, v, grad = (torch.randn(1, h, p.seq_len, d, generator=generator) for h, d in shapes)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want, _ = reference_attention(*wide, cu_seqlens=p.cu_seqlens)
    wanted = (want, *torch.autograd.grad(want, wide, grad.double()))
    local = [p.shard(t, 2).requires_grad_() for t in (q, k, v)]
    ratios = []
    for backend in ("cpu_flash", "naive"):
        with Sent() as forward:
            out = attention(*local, plan=p, backend=backend, **groups)
        got = (out, *torch.autograd.grad(out, local, p.shard(grad, 2)))
        if p.method == "ring":
            assert forward.count == p.costs.forward_bytes
        for a, b in zip(got, wanted, strict=True):
            scale = max(1.0, float(b.detach().abs().max()))
            ratios.append(max_abs_error(a, p.shard(b.detach(), 2)) / scale)
    return max(ratios)


PACKED = [0, 1, 2, 7, 20, 30, 41, 51, 52, 64]


@pytest.mark.parametrize(
    "case",
    [
        {"method": "ring", "seq_len": 64},
        {"method": "ring", "cu_seqlens": PACKED, "layout": "documents"},
        {"method": "allgather", "cu_seqlens": PACKED},
        {"method": "ulysses", "seq_len": 64},
        {"method": "usp", "seq_len": 64, "ulysses_degree": 2},
    ],
    ids=lambda case: f"{case['method']}{'-packed' if 'cu_seqlens' in case else ''}",
)
def test_values_may_be_narrower_than_keys_in_every_method(case):
    # Float32 sums over at most 64 tokens and 10 channels, one rounding of 2^-24 for each.
    assert max(run_ranks(narrow_values, 4, case)) <= 74 * 2**-24


def test_values_wider_than_keys_are_refused():
    with pytest.raises(ValueError, match=r"value_dim=16 is wider than head_dim=8"):
        make([0, 64], 4, value_dim=16, layout="zigzag")
    p = make([0, 64], 1, layout="zigzag")
    q, v = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 12)
    with pytest.raises(ValueError, match="v has 12 channels and q has 8"):
        attention(q, q[:, :2], v, plan=p)
