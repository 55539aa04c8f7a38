"""Attention sinks, and heads that ranks cannot share equally, in every method: values and every gradient."""

import random
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from titan_cp import CPAttention, allgather_attention, attention, plan, reference_attention, ulysses_attention
from titan_cp.planning.costs import share_heads
from titan_cp.planning.layouts import LAYOUTS
from titan_testing import assert_close, run_ranks
from titan_testing.sent_bytes import SentBytes

HEAD_DIM = 8


def with_gradients(function, inputs, grad_out):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def attending(p, groups):
    return lambda q, k, v, s=None: attention(q, k, v, plan=p, sinks=s, **groups)


def worst_ratios(cases, world=None, replica=0):
    """Of each case, the largest error over three times that of one process; two roundings of the largest value are granted.

    One process may be exact by luck (2 roundings where others have 5), and a rounding of the log-sum-exp, which parts are
    merged by, is as many of the result as it is large.

    A sink's gradient is a sum over all tokens whose terms cancel, and with one head it is one number, which one process
    may hit by luck. Its rounding is granted over the sum of the terms' sizes, which is what the error of a float32 sum
    grows with (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), rather than over the result.
    """
    world = world or dist.group.WORLD
    ranks, meshes, ratios = dist.get_process_group_ranks(world), {}, {}
    for number, (method, degree, layout, lengths, heads, window, causal, with_sinks) in enumerate(cases):
        options = {"num_heads": heads[0], "num_kv_heads": heads[1], "window": window, "causal": causal}
        bounds = [0, *accumulate(lengths)]
        p = plan(
            cu_seqlens=bounds, size=world.size(), rank=world.rank(), method=method, layout=layout, block_size=4, pad=True,
            head_dim=HEAD_DIM, dtype=torch.float32, ulysses_degree=degree, **options,
        )  # fmt: skip
        groups = {"group": world}
        if method == "usp":
            if degree not in meshes:
                assert len(ranks) == dist.get_world_size(), "two groups of the whole world"
                shape = (p.ring_degree, p.ulysses_degree)
                mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
                meshes[degree] = {f"{name}_group": mesh[name].get_group() for name in ("ring", "ulysses")}
            groups = meshes[degree]
        generator = torch.Generator().manual_seed(number + replica)
        shapes = [(1, h, bounds[-1], HEAD_DIM) for h in (heads[0], heads[1], heads[1], heads[0])]
        q, k, v, grad_out = (torch.randn(*shape, generator=generator) for shape in shapes)
        sinks = [torch.randn(heads[0], generator=generator)] if with_sinks else []

        with SentBytes() as sent:
            got = with_gradients(
                attending(p, groups), [*(p.shard(t, 2) for t in (q, k, v)), *sinks], p.shard(grad_out, 2)
            )
        assert sent.count == p.costs.forward_bytes + p.costs.backward_bytes, (method, heads)
        for t in got[4:]:
            dist.all_reduce(t, group=world)
        whole = [p.unshard(t, 2, group=world) for t in got[:4]] + got[4:]
        if world.rank() == 0:
            one = plan(cu_seqlens=bounds, size=1, rank=0, dtype=torch.float32, **options)
            alone = with_gradients(attending(one, {}), [q, k, v, *sinks], grad_out)
            masked = partial(reference_attention, causal=causal, window=window, cu_seqlens=bounds)
            want = with_gradients(
                lambda q, k, v, s=None, masked=masked: masked(q, k, v, sinks=s)[0],
                [t.double() for t in (q, k, v, *sinks)],
                grad_out.double(),
            )
            sizes = [w.abs().max() for w in want]
            if with_sinks:
                out, lse = masked(q, k, v, sinks=sinks[0])
                terms = torch.exp(sinks[0].double()[:, None] - lse) * (grad_out * out).sum(-1)
                assert_close(-terms.sum((0, 2)), want[4], rtol=1e-12)
                sizes[4] = terms.abs().sum((0, 2)).max()
            if window == 1 and not with_sinks:  # one key a token: dq and dk are zero, as differences of equal terms
                term = grad_out.abs().max() * v.abs().max() * HEAD_DIM**0.5
                sizes[1:3] = [term * k.abs().max(), term * q.abs().max()]
            for name, a, b, w, size in zip(
                ("out", "dq", "dk", "dv", "dsinks"), whole, alone, want, sizes, strict=False
            ):
                allowed = 3 * (b.double() - w).abs().max() + 2.4e-7 * size
                ratios[number, method, layout, heads, window, name] = float((a.double() - w).abs().max() / allowed)
    return ratios


PACKED = [1, 3, 33, 1, 20, 6]


def test_sinks_equal_full_attention_in_every_method_with_their_gradients():
    cases = [
        (method, degree, layout, lengths, (4, 2), window, causal, True)
        for method, degree, layout in (
            ("ring", None, "zigzag"), ("allgather", None, "per_document"), ("ulysses", None, "contiguous"), ("usp", 2, "zigzag")
        )
        for lengths, window, causal in ((PACKED, None, True), ([64], 9, True), ([64], None, False))
    ]  # fmt: skip
    cases.append(("ring", None, "contiguous", [64], (4, 2), 9, True, True))  # straight, not round
    for ratios in run_ranks(worst_ratios, 4, cases):
        assert not {case: ratio for case, ratio in ratios.items() if not ratio <= 1}


def test_heads_that_ranks_do_not_divide_are_shared_with_heads_of_zeros():
    cases = [
        ("ulysses", None, "contiguous", PACKED, (4, 2), None, True, True),
        ("ulysses", None, "contiguous", [64], (6, 2), 9, True, True),
        ("ulysses", None, "zigzag", PACKED, (7, 7), None, True, False),
        ("usp", 2, "zigzag", PACKED, (3, 1), None, True, True),
        ("usp", 4, "zigzag", [64], (6, 3), None, False, True),
    ]
    for ratios in run_ranks(worst_ratios, 4, cases):
        assert not {case: ratio for case, ratio in ratios.items() if not ratio <= 1}


def random_cases(size, count, seed):
    """Sinks and windows over packed documents of odd lengths, heads that ranks do not divide among them."""
    rng = random.Random(seed)
    for number in range(count):
        method = ("ring", "allgather", "ulysses", "usp")[number % 4]
        degree = rng.choice([d for d in (1, 2, 4, 8) if size % d == 0]) if method == "usp" else None
        # A mask of thousands of tokens squared is slow in float64, so one case in sixteen has it.
        longest = [4097] if number % 16 == size % 16 else []
        lengths = longest + rng.choices([1, 2, 3, 17, 64, 65, 255], k=rng.randint(1, 6))
        rng.shuffle(lengths)
        kv_heads = rng.choice([1, 2, 3])
        heads = (kv_heads * rng.choice([1, 2, 3]), kv_heads)
        window = rng.choice([None, None, 1, 5, 100])
        layout = "auto" if method == "ulysses" else rng.choice(LAYOUTS)
        yield method, degree, layout, lengths, heads, window, rng.random() < 0.8, rng.random() < 0.8


def ratios_beside_tensor_parallel(cases):
    mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("tp", "cp"))
    return worst_ratios([c for c in cases if c[0] != "usp"], mesh["cp"].get_group(), mesh["tp"].get_local_rank())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tp", "count"), [(2, 1, 32), (4, 1, 32), (8, 1, 20), (2, 2, 12), (4, 2, 12)])
def test_random_sinks_windows_and_heads_on_2_4_and_8_ranks(size, tp, count):
    run = worst_ratios if tp == 1 else ratios_beside_tensor_parallel
    for ratios in run_ranks(run, size * tp, list(random_cases(size, count, 10 * size + tp)), timeout_s=1500):
        assert not {case: ratio for case, ratio in ratios.items() if not ratio <= 1}


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 6, 8])
def test_shares_of_heads_are_whole_equal_and_keep_query_heads_beside_their_keys(degree):
    for kv_heads in range(1, 9):
        for per_group in range(1, 9):
            shares = share_heads(kv_heads * per_group, kv_heads, degree)
            assert shares.num_heads % degree == shares.num_kv_heads % degree == shares.group_heads % shares.repeats == 0
            assert shares.groups >= kv_heads
            assert shares.group_heads >= per_group
            if kv_heads * per_group % degree == 0:
                assert (shares.groups, shares.group_heads) == (kv_heads, per_group)  # none is added
    assert share_heads(4, 2, 8).num_heads == 8
    assert (
        "heads of zeros: 8 ranks do not divide 4" in plan(64, size=8, rank=0, num_heads=4, method="ulysses").explain()
    )


def test_sinks_that_do_not_fit_are_refused_before_any_communication():
    q, k = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8)
    one = {name: plan(8, size=1, rank=0, num_heads=4, num_kv_heads=2, method=name) for name in ("allgather", "ulysses")}
    with pytest.raises(ValueError, match="one logit per query head"):
        attention(q, k, k, plan=one["ulysses"], sinks=torch.zeros(2))
    for name, function in (("allgather", allgather_attention), ("ulysses", ulysses_attention)):
        with pytest.raises(ValueError, match="Drop one"):
            function(q, k, k, plan=one[name], group=None, sinks=torch.zeros(4), attn_fn=lambda q, k, v: q)
    module = CPAttention(one["ulysses"])
    assert not torch.equal(module(q, k, k, sinks=torch.zeros(4)), module(q, k, k))
