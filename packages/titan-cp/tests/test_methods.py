"""Every method, layout and mask equals float64 full attention, in the output and in every gradient."""

import pytest
import torch
import torch.distributed as dist
from titan_cp import attention, plan, reference_attention
from titan_testing import max_abs_error, run_ranks

LAYOUTS = ["contiguous", "zigzag", "per_document", "documents", "block"]
HEAD_DIM = 8
# float32 rounding of sums over 64 keys, and of gradients over 64 queries and 8 heads, values of order one. The
# measured worst over all cases is 4.3e-6.
TOLERANCE = 5e-6


def cases(method):
    for layout in LAYOUTS:
        base = {"method": method, "layout": layout, "num_heads": 8}
        for num_kv_heads in (4, 2, 1):
            yield {**base, "seq_len": 64, "num_kv_heads": num_kv_heads}
        yield {**base, "seq_len": 64, "num_kv_heads": 8, "causal": False}
        yield {**base, "seq_len": 64, "num_kv_heads": 2, "window": 11}
        yield {**base, "seq_len": 64, "num_kv_heads": 2, "window": 11, "causal": False}
        packed = {**base, "cu_seqlens": [0, 1, 2, 7, 20, 51, 52, 64], "num_kv_heads": 2}
        yield packed
        yield {**packed, "window": 5}
        yield {**packed, "causal": False}


def groups_for(p, mesh_by_degree):
    if p.method != "usp":
        return {"group": dist.group.WORLD}
    mesh = mesh_by_degree[p.ulysses_degree]
    return {"ring_group": mesh["ring"].get_group(), "ulysses_group": mesh["ulysses"].get_group()}


def errors_of_all_cases(method, batch):
    rank, size = dist.get_rank(), dist.get_world_size()
    meshes = {}
    if method == "usp":
        for degree in (1, 2, 4, 8):
            if size % degree == 0:
                shape = (size // degree, degree)
                meshes[degree] = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    errors = {}
    for case in cases(method):
        p = plan(**case, size=size, rank=rank, head_dim=HEAD_DIM, dtype=torch.float32, block_size=4)
        generator = torch.Generator().manual_seed(0)
        heads = (p.num_heads, p.num_kv_heads, p.num_kv_heads, p.num_heads)
        q, k, v, grad_out = (torch.randn(batch, h, p.seq_len, HEAD_DIM, generator=generator) for h in heads)
        wide = [t.double().requires_grad_() for t in (q, k, v)]
        want, _ = reference_attention(*wide, causal=p.causal, window=p.window, cu_seqlens=p.cu_seqlens)
        wanted = (want, *torch.autograd.grad(want, wide, grad_out.double()))
        local = [p.shard(t, 2).requires_grad_() for t in (q, k, v)]
        out = attention(*local, plan=p, **groups_for(p, meshes))
        got = (out, *torch.autograd.grad(out, local, p.shard(grad_out, 2)))
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
            assert a.dtype == torch.float32
            errors[f"{name} of {case}"] = max_abs_error(a, p.shard(b.detach(), 2))
    return errors


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses", "usp"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_method_equals_float64_full_attention_in_out_and_every_gradient(size, method):
    for errors in run_ranks(errors_of_all_cases, size, method, 2 if size == 2 else 1, timeout_s=150):
        assert len(errors) == 4 * 5 * 9
        off = {name: error for name, error in errors.items() if not error <= TOLERANCE}
        assert not off


def float64_error(method):
    return max(error for name, error in errors_in_float64(method).items())


def errors_in_float64(method):
    rank, size = dist.get_rank(), dist.get_world_size()
    p = plan(48, size=size, rank=rank, num_heads=4, num_kv_heads=2, method=method, dtype=torch.float64)
    torch.manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, h, 48, HEAD_DIM, dtype=torch.float64) for h in (4, 2, 2, 4))
    wide = [t.clone().requires_grad_() for t in (q, k, v)]
    want, _ = reference_attention(*wide)
    wanted = (want, *torch.autograd.grad(want, wide, grad_out))
    local = [p.shard(t, 2).requires_grad_() for t in (q, k, v)]
    out = attention(*local, plan=p, group=dist.group.WORLD)
    got = (out, *torch.autograd.grad(out, local, p.shard(grad_out, 2)))
    return {str(i): max_abs_error(a, p.shard(b.detach(), 2)) for i, (a, b) in enumerate(zip(got, wanted, strict=True))}


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_float64_stays_float64_throughout(method):
    # 1e-13: a float32 accumulator anywhere would leave 1e-7
    assert max(run_ranks(float64_error, 2, method)) < 1e-13


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses", "usp"])
def test_channels_may_lie_apart_in_memory(method):
    p = plan(96, size=1, rank=0, num_heads=2, method=method, dtype=torch.float32)
    torch.manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, 2, HEAD_DIM, 96).transpose(2, 3) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, plan=p)
    want, _ = reference_attention(*leaves)
    assert max_abs_error(out, want.detach()) <= TOLERANCE
    both = (torch.autograd.grad(x, leaves, grad_out.to(x.dtype)) for x in (out, want))
    for got, wanted in zip(*both, strict=True):
        assert max_abs_error(got, wanted) <= TOLERANCE


def one_rank():
    p = plan(32, size=1, rank=0, num_heads=4, num_kv_heads=2, dtype=torch.float32)
    q, k, v = (torch.randn(1, h, 32, 8, requires_grad=True) for h in (4, 2, 2))
    return max_abs_error(attention(q, k, v, plan=p), reference_attention(q, k, v)[0].detach())


def test_a_plan_for_one_rank_needs_no_group():
    assert one_rank() < 1e-6


def misuse():
    rank, size = dist.get_rank(), dist.get_world_size()
    p = plan(32, size=size, rank=rank, num_heads=4, num_kv_heads=2, method="ring")
    q, k, v = (torch.randn(1, h, 16, 8) for h in (4, 2, 2))
    world = dist.group.WORLD
    wrong = plan(32, size=size, rank=1 - rank, num_heads=4, num_kv_heads=2, method="ring")
    usp = plan(32, size=size, rank=rank, num_heads=4, num_kv_heads=2, method="usp", ulysses_degree=2)
    attempts = [
        lambda: attention(q, k, v, plan=p),
        lambda: attention(q, k, v, plan=wrong, group=world),
        lambda: attention(q, q, q, plan=p, group=world),
        lambda: attention(q[:, :, :8], k, v, plan=p, group=world),
        lambda: attention(q, k.double(), v, plan=p, group=world),
        lambda: attention(q, k, v, plan=usp, group=world),
        lambda: attention(q, k, v, plan=p, group=world, ring_group=world),
        lambda: attention(q, k, v, plan=p, group=world, backend="cudnn"),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(ValueError, match=r".") as error:
            attempt()
        messages.append(str(error.value))
    return messages


def test_what_does_not_fit_the_plan_is_refused_on_every_rank_before_any_communication():
    for messages in run_ranks(misuse, 2):
        for message, part in zip(
            messages,
            [
                "group is missing",
                "but the plan is for rank",
                "do not repeat KV heads",
                "Shard with plan.shard",
                "Cast before attention",
                "needs two groups",
                "takes group=, not ring_group",
                "cannot run here",
            ],
            strict=True,
        ):
            assert part in message
