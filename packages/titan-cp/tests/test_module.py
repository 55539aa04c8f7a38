import copy

import pytest
import torch
import torch.distributed as dist
from titan_cp import CPAttention, apply_context_parallel, plan, reference_attention
from titan_testing import assert_close, run_ranks
from torch import nn


class Inner(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 64)
        self.inner = Inner()

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).split([32, 16, 16], dim=-1))
        return x + self.inner(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build():
    torch.manual_seed(0)
    return Model(), torch.randn(2, 32, 32)


def apply_to_model(compiled):
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x = build()
    want = model(x)
    want.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    originals = dict(model.named_modules())
    sdpa = nn.functional.scaled_dot_product_attention
    p = plan(32, size=size, rank=rank, num_heads=4, num_kv_heads=2, method="ring", head_dim=8)
    with apply_context_parallel(model, "layers.*.inner", plan=p, group=dist.group.WORLD) as handle:
        assert sorted(handle.modules) == ["layers.0.inner", "layers.1.inner"]
        assert "ring, zigzag, 2 ranks" in repr(model)
        runner = torch.compile(model, backend="aot_eager") if compiled else model
        out = runner(p.shard(x, 1))
        out.square().sum().backward()
        assert_close(out.detach(), p.shard(want.detach(), 1), atol=1e-5)
        for name, parameter in model.named_parameters():
            grad = parameter.grad.clone()
            dist.all_reduce(grad)
            assert_close(grad, wanted[name], rtol=1e-6)
    assert dict(model.named_modules()) == originals
    assert nn.functional.scaled_dot_product_attention is sdpa
    assert torch.equal(model(x), want)
    return True


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_applied_to_a_model_it_gives_the_same_output_and_gradients_and_can_be_undone(compiled):
    assert all(run_ranks(apply_to_model, 2, compiled, timeout_s=150))


@pytest.mark.parametrize("shared", ["inner", "layer"])
def test_a_part_that_several_layers_share_is_replaced_in_each_and_put_back(shared):
    model, _ = build()
    if shared == "inner":
        model.layers[1].inner = model.layers[0].inner
    else:
        model.layers[1] = model.layers[0]
    originals = dict(model.named_modules(remove_duplicate=False))
    handle = apply_context_parallel(model, "layers.*.inner")
    assert sorted(handle.modules) == ["layers.0.inner", "layers.1.inner"]
    for layer, placed in zip(model.layers, handle.modules.values(), strict=True):
        assert isinstance(layer.inner, CPAttention)
        assert layer.inner is placed
    one = plan(8, size=1, rank=0, num_heads=4, num_kv_heads=2)
    handle.set_plan(one)
    assert all(layer.inner.plan is one for layer in model.layers)
    handle.remove()
    assert dict(model.named_modules(remove_duplicate=False)) == originals


def test_an_exception_inside_leaves_the_model_as_it_was():
    model, _ = build()
    originals = dict(model.named_modules())
    with pytest.raises(RuntimeError, match="mine"), apply_context_parallel(model, "layers.*.inner"):
        raise RuntimeError("mine")
    assert dict(model.named_modules()) == originals


def test_set_plan_reaches_every_module_and_a_call_may_bring_its_own():
    model, _ = build()
    handle = apply_context_parallel(model, "layers.*.inner", dim_order="bthd")
    q, k = torch.randn(1, 8, 4, 8), torch.randn(1, 8, 2, 8)
    with pytest.raises(ValueError, match="CPAttention has no plan"):
        model.layers[0].inner(q, k, k)
    one = plan(8, size=1, rank=0, num_heads=4, num_kv_heads=2)
    handle.set_plan(one)
    assert all(m.plan is one for m in handle.modules.values())
    full = plan(8, size=1, rank=0, num_heads=4, num_kv_heads=2, causal=False)
    for out, causal in ((model.layers[1].inner(q, k, k), True), (model.layers[1].inner(q, k, k, plan=full), False)):
        want, _ = reference_attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), causal=causal)
        assert_close(out, want.transpose(1, 2).float(), atol=5e-6)


def copied_module():
    p = plan(8, size=1, rank=0, num_heads=4, num_kv_heads=2)
    module = nn.Sequential(CPAttention(p, group=dist.group.WORLD, scale=0.5))
    (copied,) = copy.deepcopy(module)
    q, k = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8)
    assert torch.equal(copied(q, k, k), module[0](q, k, k))
    return copied is not module[0] and copied.group is dist.group.WORLD


def test_a_copy_is_of_the_same_ranks():
    assert all(run_ranks(copied_module, 1))


def test_the_module_has_no_state():
    assert CPAttention().state_dict() == {}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("blocks.*", r"matches no submodule. Names here are, for example, \['layers'"),
        ("layers.0", r"'layers.0' \(Attention\) holds \['qkv.weight', 'qkv.bias'\]"),
    ],
)
def test_a_pattern_that_cannot_be_replaced_is_refused_and_the_model_is_unchanged(pattern, message):
    model, _ = build()
    originals = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        apply_context_parallel(model, pattern)
    assert dict(model.named_modules()) == originals


def test_applying_twice_is_refused():
    model, _ = build()
    apply_context_parallel(model, "layers.*.inner")
    with pytest.raises(ValueError, match="context-parallel already"):
        apply_context_parallel(model, "layers.*.inner")


def test_an_unknown_dim_order_is_refused():
    with pytest.raises(ValueError, match="dim_order='sbhd' does not exist"):
        CPAttention(dim_order="sbhd")
