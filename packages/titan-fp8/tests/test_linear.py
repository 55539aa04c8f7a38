"""Linear layers in float8: how exact, how many kernels, and the same bits however they are run."""

import copy
import pickle
from typing import Any

import pytest
import titan_fp8
import torch
import torch.nn.functional as F
from titan_fp8 import Float8Linear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RECIPES = list(titan_fp8.RECIPES)
# Decibels that outputs, input gradients and weight gradients keep on normal data. torchao's own test floors are 18 (y)
# and 17 (dW) for tensorwise, 27/26/26 for its blockwise experts, 27/25/24 for MX.
FLOORS = {
    "tensorwise": (18.0, 17.0, 17.0),
    "rowwise": (26.0, 26.0, 26.0),
    "rowwise_gw_hp": (26.0, 26.0, 45.0),
    "blockwise": (27.0, 26.0, 26.0),
    "mxfp8": (27.0, 25.0, 24.0),
}


def draw(rows: int, k: int, n: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator, dtype=torch.float32).to(dtype)
    w = (torch.randn(n, k, generator=generator, dtype=torch.float32) * k**-0.5).to(dtype)
    g = torch.randn(rows, n, generator=generator, dtype=torch.float32).to(dtype)
    return x, w, g


def run(fn: Any, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fn(x, w)
    y.backward(g.to(y.dtype))
    return y.detach(), x.grad, w.grad


def sqnr(got: Tensor, want: Tensor) -> float:
    noise = (got.double() - want.double()).square().sum()
    return 10 * float(torch.log10(want.double().square().sum() / noise))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(256, 512, 384), (100, 200, 72)])
def test_signal_over_quantisation_noise_is_above_the_floor(recipe: str, shape: tuple[int, int, int]) -> None:
    x, w, g = draw(*shape)
    got = run(lambda x, w: titan_fp8.linear(x, w, None, recipe), x, w, g)
    want = run(F.linear, x.double(), w.double(), g)
    for a, b, floor in zip(got, want, FLOORS[recipe], strict=True):
        assert sqnr(a, b) >= floor


@pytest.mark.parametrize("recipe", RECIPES)
def test_ragged_and_empty_inputs_need_no_care(recipe: str) -> None:
    layer = Float8Linear(37, 21, recipe=recipe)
    for rows in (0, 1, 5, 129):
        x = torch.randn(2, rows, 37, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == (2, rows, 21)
        assert x.grad.shape == x.shape
    y += 1.0  # an output may be changed in place, as nn.Linear's


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_cast_of_the_input_serves_several_weights(recipe: str) -> None:
    x, w, g = draw(64, 96, 80)
    parts = [p.contiguous() for p in w.split([48, 32])]
    biases = [torch.ones(48), None]
    xs = x.clone().requires_grad_()
    ws = [p.clone().requires_grad_() for p in parts]
    a, b = titan_fp8.linears(xs, ws, biases, recipe)
    torch.autograd.backward([a, b], [g[:, :48], g[:, 48:]])
    total = 0
    for out, part, weight, bias, grad in zip((a, b), parts, ws, biases, (g[:, :48], g[:, 48:]), strict=True):
        y, dx, dw = run(lambda x, w, bias=bias: titan_fp8.linear(x, w, bias, recipe), x, part, grad)
        assert torch.equal(out.detach(), y)
        assert torch.equal(weight.grad, dw)
        total = total + dx
    assert torch.equal(xs.grad, total)


class Kernels(TorchDispatchMode):
    """The operations that move data: neither views nor metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in ("aten::_unsafe_view", "aten::detach", "aten::empty"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recipe", "want"), [("tensorwise", 6), ("blockwise", 6), ("rowwise", 6), ("rowwise_gw_hp", 6)]
)
def test_a_linear_layer_is_few_kernels(recipe: str, want: int) -> None:
    """Forward and backward of a layer; torchao eager runs 57 to 84."""
    layer = Float8Linear(256, 128, bias=False, recipe=recipe).bfloat16()
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(128, 128, dtype=torch.bfloat16)
    with Kernels() as kernels:
        layer(x).backward(g)
    # One cast each of x, w and the gradient, and three products.
    casts = [n for n in kernels.names if "cast" in n]
    products = [n for n in kernels.names if n.endswith("scaled_mm") or n == "aten::mm"]
    assert len(casts) == len(products) == 3
    assert len(kernels.names) <= want + 1  # what autograd does to store a gradient
    layer.cache_weight = False
    layer.zero_grad()
    with Kernels() as kernels:
        layer(x).backward(g)
    assert len(kernels.names) <= 12


def saved_bytes(fn: Any) -> int:
    total = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal total
        total += 0 if isinstance(t, nn.Parameter) else t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fn()
    return total


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_saved_activations_are_half_the_bytes_of_bfloat16(recipe: str) -> None:
    layer = Float8Linear(512, 256, bias=False, recipe=recipe).bfloat16()
    x = torch.randn(512, 512, dtype=torch.bfloat16, requires_grad=True)
    assert saved_bytes(lambda: layer(x)) <= 0.55 * saved_bytes(lambda: F.linear(x, layer.weight))


class Stack(nn.Module):
    """Two layers with an exact operation between: any difference is float8's."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Float8Linear(72, 200, recipe=recipe)
        self.second = Float8Linear(200, 40, bias=False, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def outputs_and_grads(net: nn.Module, fn: Any) -> list[Tensor]:
    net.zero_grad()
    x = torch.randn(2, 50, 72, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    y = fn(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("recipe", RECIPES)
def test_eager_checkpointing_and_compile_give_the_same_bits(recipe: str) -> None:
    net = Stack(recipe)
    want = outputs_and_grads(net, net)
    for use_reentrant in (False, True):
        got = outputs_and_grads(net, lambda x, r=use_reentrant: checkpoint(net, x, use_reentrant=r))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    backend = "inductor" if recipe == "blockwise" else "aot_eager"  # inductor takes seconds for each
    got = outputs_and_grads(net, torch.compile(net, fullgraph=True, backend=backend))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_weight_is_cast_once_for_all_microbatches_of_a_step() -> None:
    layer = Float8Linear(128, 128, bias=False)
    x = torch.randn(128, 128)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def weight_casts() -> int:
        with Kernels() as kernels:
            layer(x).sum().backward()
        return sum("cast_weight" in name for name in kernels.names)

    assert [weight_casts() for _ in range(3)] == [1, 0, 0]
    optimizer.step()
    assert weight_casts() == 1  # the version counter has moved
    optimizer.step()
    optimizer.zero_grad()
    assert [weight_casts() for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_all_weights_are_cast_at_once_after_the_step(recipe: str) -> None:
    net = Stack(recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        with Kernels() as kernels:
            assert titan_fp8.precast_weights(net) == 2
        assert len(kernels.names) == (1 if recipe == "blockwise" else 2)
        weights_alone = [titan_fp8.cast_weight(m.weight, m.recipe) for m in (net.first, net.second)]
        with Kernels() as kernels:
            got = outputs_and_grads(net, net)
        assert sum("cast" in name for name in kernels.names) == 4  # two inputs, two gradients, no weight
        for module, alone in zip((net.first, net.second), weights_alone, strict=True):
            module.keep_cast(alone)
        assert all(torch.equal(a, b) for a, b in zip(outputs_and_grads(net, net), got, strict=True))
        optimizer.step()
    fresh = outputs_and_grads(net, net)  # after the step the kept casts are of older weights, and unused
    net.first.cache_weight = net.second.cache_weight = False
    assert all(torch.equal(a, b) for a, b in zip(outputs_and_grads(net, net), fresh, strict=True))


@pytest.mark.parametrize("update", ["step", "data", "assign", "load"])
def test_every_update_of_a_weight_is_seen(update: str) -> None:
    torch.manual_seed(0)
    layer = Float8Linear(64, 64, bias=False)
    x = torch.randn(16, 64)
    new = torch.randn(64, 64)
    layer(x).sum().backward()
    if update == "step":
        with torch.no_grad():
            layer.weight.copy_(new)
    elif update == "data":  # unseen by the version counter, as a collective that writes in place is
        layer.weight.data.copy_(new)
        layer.zero_grad()
    elif update == "assign":
        layer.weight = nn.Parameter(new)
    else:
        layer.load_state_dict({"weight": new})
    assert torch.equal(layer(x), titan_fp8.linear(x, new))


def test_cached_and_uncached_casts_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    layer = Float8Linear(64, 48)
    plain = copy.deepcopy(layer)
    plain.cache_weight = False
    for step in range(2):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        for module in (layer, plain):
            module(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_deferred_weight_gradients_are_the_same_gradients(recipe: str) -> None:
    x, w, g = draw(50, 72, 40)
    bias = torch.randn(40)
    want_bias = bias.clone().requires_grad_()
    want = run(lambda x, w: titan_fp8.linear(x, w, want_bias, recipe), x, w, g)
    weight, own_bias = nn.Parameter(w.clone()), nn.Parameter(bias.clone())
    notes: list[Any] = []
    x = x.clone().requires_grad_()
    anchor = torch.zeros((), requires_grad=True)
    y = titan_fp8.linear_deferred(x, weight, own_bias, recipe, anchor=anchor, defer=lambda *note: notes.append(note))
    y.backward(g)
    assert torch.equal(y.detach(), want[0])
    assert torch.equal(x.grad, want[1])
    assert weight.grad is None
    found = {id(parameter): compute(*given) for parameter, compute, *given in notes}
    assert torch.equal(found[id(weight)], want[2])
    assert torch.equal(found[id(own_bias)], want_bias.grad)


def test_a_layers_deferred_forward_shares_its_cached_cast() -> None:
    layer = Float8Linear(64, 48, bias=False)
    x = torch.randn(16, 64, requires_grad=True)
    layer(x).sum().backward()
    want, layer.weight.grad = layer.weight.grad, torch.zeros_like(layer.weight)
    notes: list[Any] = []
    with Kernels() as kernels:
        y = layer.forward_deferred(
            x, anchor=torch.zeros((), requires_grad=True), defer=lambda *note: notes.append(note)
        )
        y.sum().backward()
    assert not any("cast_weight" in name for name in kernels.names)
    ((parameter, compute, *given),) = notes
    assert parameter is layer.weight
    assert torch.equal(compute(*given), want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_run_apart(recipe: str) -> None:
    x, w, g = draw(50, 72, 40)
    want = run(lambda x, w: titan_fp8.linear(x, w, None, recipe), x, w, g)
    chosen = titan_fp8.Recipe.get(recipe)
    xq, wq, gq = (
        titan_fp8.cast_input(x, chosen),
        titan_fp8.cast_weight(w, chosen),
        titan_fp8.cast_grad(g, chosen),
    )
    kept = xq.for_weight_gradient()
    assert torch.equal(titan_fp8.forward_product(xq, wq, chosen), want[0])
    assert torch.equal(titan_fp8.input_gradient(gq, wq, chosen), want[1])
    assert torch.equal(titan_fp8.weight_gradient(gq, kept, chosen), want[2])


def test_master_weights_autocast_and_frozen_weights_keep_their_dtypes() -> None:
    layer = Float8Linear(64, 48)
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.detach().float())
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    layer.weight.requires_grad_(False)
    layer.zero_grad()
    x.grad = None
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    with torch.inference_mode():
        assert layer(x).shape == (16, 48)


def test_non_finite_values_stay_visible() -> None:
    """A diverged value must not turn into 448. What it touches is NaN, and nothing else is."""
    layer = Float8Linear(256, 128, bias=False)
    x = torch.randn(4, 256)
    x[1, 3] = float("inf")
    x[2, 200] = float("nan")
    y = layer(x)
    assert y[[1, 2]].isnan().all()
    assert y[[0, 3]].isfinite().all()


def test_operands_that_do_not_fit_are_refused() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 16)
    with pytest.raises(ValueError, match=r"\[out_features, in_features\]"):
        titan_fp8.linear(x, w)
    with pytest.raises(ValueError, match=r"it must be \[16\]"):
        titan_fp8.linear(x, w.t(), torch.zeros(8))
    with pytest.raises(ValueError, match="takes floating"):
        titan_fp8.linear(x.int(), w.t())
    with pytest.raises(ValueError, match="unknown; choose one of tensorwise"):
        titan_fp8.linear(x, w.t(), None, "delayed")
    with pytest.raises(ValueError, match="a cast takes a matrix"):
        titan_fp8.cast(torch.randn(2, 2, 2), titan_fp8.Scaling("row"))
    with pytest.raises(ValueError, match="one scale a tensor"):
        titan_fp8.cast(x, titan_fp8.Scaling("row"), amax=torch.ones(()))
