"""bfloat16, gradcheck, determinism, and a group that is part of the world."""

import pytest
import torch
import torch.distributed as dist
from titan_cp import (
    allgather_attention,
    attention,
    causal_convolution,
    plan,
    reference_attention,
    ulysses_attention,
)
from titan_testing import assert_close, run_ranks


def bfloat16_errors(method, bounds):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    seq_len = bounds[-1]
    whole = [torch.randn(1, h, seq_len, 32, dtype=torch.bfloat16) for h in (8, 2, 2)]
    grad_out = torch.randn(1, 8, seq_len, 32, dtype=torch.bfloat16)
    wide = [t.double().requires_grad_() for t in whole]
    want, _ = reference_attention(*wide, cu_seqlens=bounds)
    wanted = (want.detach(), *torch.autograd.grad(want, wide, grad_out.double()))

    def errors(got, wanted):
        differences = [a.double() - b for a, b in zip(got, wanted, strict=True)]
        return [(float(d.abs().max()), float(d.pow(2).sum())) for d in differences]

    single = plan(cu_seqlens=bounds, size=1, rank=0, num_heads=8, num_kv_heads=2)
    leaves = [t.clone().requires_grad_() for t in whole]
    if len(bounds) == 2:
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    else:
        out = attention(*leaves, plan=single)
    on_one_device = errors((out.detach(), *torch.autograd.grad(out, leaves, grad_out)), wanted)

    p = plan(cu_seqlens=bounds, size=size, rank=rank, num_heads=8, num_kv_heads=2, method=method)
    local = [p.shard(t, 2).requires_grad_() for t in whole]
    out = attention(*local, plan=p, group=dist.group.WORLD)
    got = (out.detach(), *torch.autograd.grad(out, local, p.shard(grad_out, 2)))
    return on_one_device, errors(got, [p.shard(w, 2) for w in wanted])


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("bounds", [[0, 512], [0, 100, 101, 450, 512]], ids=["one-document", "packed"])
def test_bfloat16_error_on_8_ranks_is_at_most_half_again_the_single_device_error(method, bounds):
    results = run_ranks(bfloat16_errors, 8, method, bounds)
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        worst_one, squares_one = results[0][0][i]
        assert max(r[1][i][0] for r in results) <= 1.5 * worst_one, name
        assert sum(r[1][i][1] for r in results) <= 1.5**2 * squares_one, name


class Replicate(torch.autograd.Function):
    """The same whole tensor on every rank; its gradient is the mean over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


def check_gradients(method, window):
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = [0, 3, 8]
    p = plan(
        cu_seqlens=bounds, size=size, rank=rank, num_heads=4, num_kv_heads=2, method=method, window=window,
        dtype=torch.float64,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = [torch.randn(1, h, 8, 2, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]

    def function(q, k, v):
        local = [p.shard(Replicate.apply(t), 2) for t in (q, k, v)]
        return p.unshard(attention(*local, plan=p, group=dist.group.WORLD), 2, group=dist.group.WORLD)

    return torch.autograd.gradcheck(function, whole)


@pytest.mark.parametrize(("method", "window"), [("ring", None), ("ring", 2), ("allgather", None), ("ulysses", None)])
def test_gradcheck_passes_in_float64(method, window):
    assert all(run_ranks(check_gradients, 2, method, window))


def run_twice(method):
    rank, size = dist.get_rank(), dist.get_world_size()
    p = plan(cu_seqlens=[0, 5, 64], size=size, rank=rank, num_heads=4, num_kv_heads=2, method=method)
    torch.manual_seed(rank)
    local = [torch.randn(1, h, p.local_len, 8, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)]
    runs = []
    for _ in range(2):
        out = attention(*local, plan=p, group=dist.group.WORLD)
        runs.append((out, *torch.autograd.grad(out, local, torch.ones_like(out))))
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_two_runs_are_bit_identical(method):
    assert all(run_ranks(run_twice, 4, method))


def attend_in_subgroup(method):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group, replica = mesh["cp"].get_group(), mesh["dp"].get_local_rank()
    p = plan(32, size=2, rank=group.rank(), num_heads=4, num_kv_heads=2, method=method, dtype=torch.float32)
    torch.manual_seed(replica)
    whole = [torch.randn(1, h, 32, 8) for h in (4, 2, 2)]
    wide = [t.double().requires_grad_() for t in whole]
    want, _ = reference_attention(*wide)
    wanted = torch.autograd.grad(want.sum(), wide)
    local = [p.shard(t, 2).requires_grad_() for t in whole]
    out = attention(*local, plan=p, group=group)
    got = torch.autograd.grad(out.sum(), local)
    assert_close(p.unshard(out.detach(), 2, group=group), want.detach().float(), atol=5e-6)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, p.shard(b, 2).float(), atol=5e-6)
    return True


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_a_group_that_is_part_of_the_world_works(method):
    assert all(run_ranks(attend_in_subgroup, 4, method))


def two_plans_at_once():
    rank, size = dist.get_rank(), dist.get_world_size()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    options = {"size": size, "rank": rank, "num_heads": 4, "num_kv_heads": 2}
    first = plan(32, method="ring", window=5, layout="contiguous", **options)
    second = plan(32, method="ulysses", causal=False, **options)
    torch.manual_seed(0)
    whole = [torch.randn(1, h, 32, 8) for h in (4, 2, 2)]
    outs = [attention(*(p.shard(t, 2) for t in whole), plan=p, group=dist.group.WORLD) for p in (first, second, first)]
    for p, out in zip((first, second, first), outs, strict=True):
        want, _ = reference_attention(*whole, causal=p.causal, window=p.window)
        assert_close(out, p.shard(want, 2).float(), atol=5e-6)
    return torch.nn.functional.scaled_dot_product_attention is sdpa


def test_two_plans_with_different_options_coexist_and_torch_is_not_patched():
    assert all(run_ranks(two_plans_at_once, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_naive_computes_as_wide_inside_autocast(dtype):
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 32, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    p = plan(32, size=1, rank=0, num_heads=2)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = attention(*leaves, plan=p, backend="naive")
            found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def second_derivatives():
    """Messages of what is raised where a first derivative is differentiated again, by function."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    q = torch.randn(1, 2, 16, 8, dtype=torch.float64)

    def local(q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    def planned(method, **options):
        return plan(32, size=size, rank=rank, num_heads=2, method=method, dtype=torch.float64, **options)

    ring, ulysses, gather = (planned(method) for method in ("ring", "ulysses", "allgather"))
    window = planned("ring", layout="contiguous", window=4)
    assert window.direct
    cut = planned("ring", layout="contiguous")
    functions = {
        "ring": lambda x: attention(x, x, x, plan=ring, group=world),
        "direct": lambda x: attention(x, x, x, plan=window, group=world),
        "allgather": lambda x: attention(x, x, x, plan=gather, group=world),
        "ulysses": lambda x: attention(x, x, x, plan=ulysses, group=world),
        "ulysses, attn_fn": lambda x: ulysses_attention(x, x, x, plan=ulysses, group=world, attn_fn=local),
        "allgather, attn_fn": lambda x: allgather_attention(x, x, x, plan=gather, group=world, attn_fn=local),
        "unshard": lambda x: ring.unshard(x, 2, group=world),
        "convolution": lambda x: causal_convolution(x[0].mT, x.new_ones(8, 3), plan=cut, group=world),
    }
    messages = {}
    for name, function in functions.items():
        x = q.clone().requires_grad_()
        out = function(x)
        for kind, loss in (("square", out.square().sum()), ("sum", out.sum())):  # a sum's gradient depends on nothing
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            try:
                again = grad.square().sum() + x.sum()
                again.backward() if kind == "sum" else torch.autograd.grad(again, x)
                messages[name, kind] = "nothing"
            except RuntimeError as error:
                messages[name, kind] = str(error)
    return messages


def test_a_second_derivative_is_refused_rather_than_wrong():
    for messages in run_ranks(second_derivatives, 2):
        assert {name: text for name, text in messages.items() if "differentiable once" not in text} == {}
