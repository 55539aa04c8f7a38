"""Weight gradients summed in float32 by the products: equal to a sum of single gradients, and `grad` at the end."""

import copy
from types import SimpleNamespace

import pytest
import titan_fp8
import torch
from titan_fp8 import Float8Linear, MainGradients, QTensor, Recipe
from titan_fp8.kernels.products import scaled_mm_cublaslt
from titan_fp8.layers import accumulate
from torch import nn
from torch._subclasses import FakeTensorMode

RECIPES = ["tensorwise", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8"]
MICROBATCHES = 3


def make(recipe, dtype, out=40):
    torch.manual_seed(0)
    return nn.Sequential(Float8Linear(50, 64, recipe=recipe, dtype=dtype), nn.GELU(), nn.Linear(64, out, dtype=dtype))


def batch(index, dtype):
    return torch.randn(3, 7, 50, generator=torch.Generator().manual_seed(index)).to(dtype)


def backward(model, index, dtype):
    model(batch(index, dtype)).float().square().mean().backward()


def plain_sum(model, dtype):
    """Each microbatch's gradient alone, summed in float64, by name."""
    sums = {}
    for index in range(MICROBATCHES):
        single = copy.deepcopy(model).float()  # float32 weights give unrounded float32 gradients of the same casts
        rounded = batch(index, dtype).float()
        single(rounded).square().mean().backward()
        for name, p in single.named_parameters():
            sums[name] = sums.get(name, 0) + p.grad.double()
    return sums


@pytest.mark.parametrize("recipe", RECIPES)
def test_sums_are_those_of_the_plain_path(recipe):
    model = make(recipe, torch.float32)
    want = plain_sum(model, torch.float32)
    with MainGradients(model):
        for index in range(MICROBATCHES):
            backward(model, index, torch.float32)
    for name, p in model.named_parameters():
        # Three float32 terms: a sum in another order moves by the last bit of the largest.
        assert torch.allclose(p.grad.double(), want[name], rtol=2**-20, atol=2**-22 * float(want[name].abs().max())), (
            name
        )


def test_bfloat16_weights_sum_without_loss():
    """Many equal gradients: bfloat16 sums stop at 256 of them, float32 ones do not."""
    layers = {
        "float8": Float8Linear(16, 16, bias=False, dtype=torch.bfloat16),
        "plain": nn.Linear(16, 16, bias=False, dtype=torch.bfloat16),
    }
    for name, layer in layers.items():
        x = torch.ones(1, 16, dtype=torch.bfloat16)
        for _ in range(300):
            layer(x).sum().backward()
        assert layer.weight.grad.max() == 256, name
        layer.zero_grad()
        sums = MainGradients(layer)
        with sums:
            for _ in range(300):
                layer(x).sum().backward()
                assert layer.weight.grad is None
        ((weight, total),) = sums.items()
        assert weight is layer.weight
        assert total.dtype == torch.float32
        assert bool((total == 300).all()), name
        assert layer.weight.grad.dtype == torch.bfloat16
        assert bool((layer.weight.grad == 300).all()), name


def recomputed(layer, x):
    return torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=False)


def offloaded(layer, x):
    with torch.autograd.graph.save_on_cpu():
        return layer(x)


@pytest.mark.parametrize("run", [recomputed, offloaded])
@pytest.mark.parametrize("kind", [Float8Linear, nn.Linear])
def test_so_they_do_where_backward_gets_copies_of_weights(kind, run):
    layer = kind(16, 16, bias=False, dtype=torch.bfloat16)
    sums = MainGradients(layer)
    with sums:
        for value in (256, 1):
            run(layer, torch.full((1, 16), value, dtype=torch.bfloat16)).sum().backward()
    ((_, total),) = sums.items()
    assert bool((total == 257).all())


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise_gw_hp"])
def test_steps_and_blocks_start_from_zero_unless_gradients_are_kept(recipe):
    model = make(recipe, torch.float32)
    sums = MainGradients(model)

    def block():
        with sums:
            backward(model, 0, torch.float32)
        return [p.grad.clone() for p in model.parameters()]

    once = block()
    model.zero_grad()
    assert all(map(torch.equal, block(), once))
    assert all(torch.equal(g, 2 * o) for g, o in zip(block(), once, strict=True))  # no zero_grad: the sum goes on
    model.zero_grad()
    backward(model, 0, torch.float32)  # outside, autograd accumulates
    assert all(torch.equal(p.grad, o) for p, o in zip(model.parameters(), once, strict=True))
    assert all(torch.equal(g, 2 * o) for g, o in zip(block(), once, strict=True))  # what was there is kept
    assert not any(hasattr(p, "main_grad") for p in model.parameters())


def test_weights_may_be_replaced_between_blocks():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), Float8Linear(16, 16, bias=False)).bfloat16()
    sums = MainGradients(model)
    with sums:
        model(torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
    for layer in model:
        layer.weight = nn.Parameter(torch.ones_like(layer.weight))
    with sums:
        for value in (256, 1):
            model[0](torch.full((1, 16), value, dtype=torch.bfloat16)).sum().backward()
            model[1](torch.full((1, 16), value, dtype=torch.bfloat16)).sum().backward()
    assert [weight for weight, _ in sums.items()] == [layer.weight for layer in model]
    assert all(bool((total == 257).all()) for _, total in sums.items())


def test_tied_frozen_and_recomputed_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Float8Linear(32, 32), nn.Linear(32, 32)
            self.second.weight = self.first.weight
            self.frozen = Float8Linear(32, 32).requires_grad_(False)

        def forward(self, x):
            y = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
            return self.frozen(self.second(y)) + nn.functional.linear(x, self.first.weight)

    torch.manual_seed(0)
    model = Tied()
    other = copy.deepcopy(model)
    x = torch.randn(5, 32)
    other(x).square().sum().backward()
    with MainGradients(model):
        model(x).square().sum().backward()
    assert model.frozen.weight.grad is None
    torch.testing.assert_close(model.first.weight.grad, other.first.weight.grad)
    torch.testing.assert_close(model.second.bias.grad, other.second.bias.grad)


def test_several_linears_of_one_input_and_fused_ones():
    weights = [nn.Parameter(torch.randn(24, 32, generator=torch.Generator().manual_seed(i))) for i in range(2)]
    x, norm = torch.randn(6, 32), torch.ones(32, requires_grad=True)
    for call in (
        lambda: sum(titan_fp8.linears(x, weights)),
        lambda: sum(titan_fp8.norm_linears(x, norm, 1e-5, weights)),
    ):
        want = torch.autograd.grad(call().square().sum(), weights)
        for w in weights:
            w.main_grad = torch.ones_like(w)
        call().square().sum().backward()
        for w, g in zip(weights, want, strict=True):
            assert w.grad is None
            torch.testing.assert_close(w.main_grad, g + 1)
            del w.main_grad


@pytest.mark.parametrize("how", ["autocast", "no_grad", "mixed dtypes", "left before backward"])
def test_where_it_cannot_add_a_plain_layer_is_plain(how):
    layer = nn.Linear(16, 16)
    other = copy.deepcopy(layer)
    x = torch.randn(4, 16)
    sums = MainGradients(layer)
    if how == "no_grad":
        with sums, torch.no_grad():
            assert torch.equal(layer(x), other(x))
        return
    if how == "left before backward":
        with sums:
            y = layer(x)
        layer.zero_grad()
        y.sum().backward()
        other(x).sum().backward()
    else:
        with sums, torch.autocast("cpu", enabled=how == "autocast"):
            if how == "mixed dtypes":
                with pytest.raises(RuntimeError, match="dtype"):
                    layer(x.bfloat16())
            layer(x).sum().backward()
        with torch.autocast("cpu", enabled=how == "autocast"):
            other(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, other.weight.grad)
    torch.testing.assert_close(layer.bias.grad, other.bias.grad)


def test_the_products_that_add_take_these_operands_on_cuda(monkeypatch):
    """Shapes, strides and dtypes alone: nothing runs."""
    with FakeTensorMode():
        main = torch.zeros(256, 384, device="cuda")
        g, x = (torch.empty(512, size, device="cuda", dtype=torch.bfloat16) for size in (256, 384))
        if torch.__version__ >= (2, 15):  # the stand-in that 2.11 has for it mistakes one argument for another
            torch.addmm(main, g.t(), x, out_dtype=torch.float32, out=main)
        if not hasattr(nn.functional, "scaled_addmm_"):
            pytest.skip("this torch has no scaled_addmm_")
        monkeypatch.setattr(accumulate, "watched", lambda: False)
        monkeypatch.setattr(accumulate, "implementation", lambda *_: scaled_mm_cublaslt)
        a, b = (torch.empty(n, 512, device="cuda", dtype=torch.float8_e4m3fn) for n in (256, 384))
        one = torch.empty((), device="cuda")
        products = SimpleNamespace(
            recipe=Recipe.get("tensorwise"),
            weight_gradient=lambda *_, **__: pytest.fail("the product that adds was not taken"),
        )
        q = [QTensor(512, size, data_t=data, scale_t=one) for size, data in ((256, a), (384, b))]
        accumulate.add_float8(main, products, *q)
        scale_a, scale_b = (torch.empty(4, n, device="cuda").t() for n in (256, 384))
        q = [QTensor(512, size, data_t=d, scale_t=s) for size, d, s in ((256, a, scale_a), (384, b, scale_b))]
        products.recipe = Recipe.get("blockwise")
        accumulate.add_float8(main, products, *q)
        narrow = torch.zeros(250, 384, device="cuda")  # the codes are padded: no product adds to a part of its result
        plain = SimpleNamespace(
            recipe=products.recipe,
            weight_gradient=lambda g, x, dtype: torch.empty(250, 384, device="cuda", dtype=dtype),
        )
        accumulate.add_float8(narrow, plain, *q)
