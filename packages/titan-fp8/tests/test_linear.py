"""Linear layers in float8: how exact, how many kernels, and the same bits however they are run."""

import copy
import os
import pickle
from typing import Any

import pytest
import titan_fp8
import torch
import torch.nn.functional as F
from titan_fp8 import Float8Linear
from torch import Tensor, nn
from torch.nn.utils import prune
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
    with titan_fp8.ConstantWeights(layer), Kernels() as kernels:
        layer(x).backward(g)
    # One cast each of x, w and the gradient, and three products.
    casts = [n for n in kernels.names if "cast" in n]
    products = [n for n in kernels.names if n.endswith("scaled_mm") or n == "aten::mm"]
    assert len(casts) == len(products) == 3
    assert len(kernels.names) <= want + 1  # what autograd does to store a gradient
    layer.zero_grad()
    with Kernels() as kernels:
        layer(x).backward(g)
    assert len(kernels.names) <= want + 2  # the weight is cast in both directions


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
    # inductor takes seconds for each; without vector instructions it writes C++ that does not compile (torch 2.15)
    inductor = recipe == "blockwise" and os.environ.get("ATEN_CPU_CAPABILITY") != "default"
    backend = "inductor" if inductor else "aot_eager"
    got = outputs_and_grads(net, torch.compile(net, fullgraph=True, backend=backend))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_all_weights_are_cast_at_once_where_a_block_is_entered(recipe: str) -> None:
    net = Stack(recipe)
    constant = titan_fp8.ConstantWeights(net, precast=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        with Kernels() as kernels, constant:
            pass
        assert len(kernels.names) == (1 if recipe == "blockwise" else 2)
        with constant, Kernels() as kernels:
            got = outputs_and_grads(net, net)
        assert sum("cast" in name for name in kernels.names) == 4  # two inputs, two gradients, no weight
        want = outputs_and_grads(net, net)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        optimizer.step()


def test_kept_and_fresh_casts_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    layer = Float8Linear(64, 48)
    plain = copy.deepcopy(layer)
    with titan_fp8.ConstantWeights(layer):
        for seed in range(2):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
            for module in (layer, plain):
                module(x).square().sum().backward()
        again = pickle.loads(pickle.dumps(layer))
        assert torch.equal(again(x), layer(x))
    assert torch.equal(layer.weight.grad, plain.weight.grad)


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
    computed = 1 * x  # as the layer before makes it: with a graph
    y = titan_fp8.linear_deferred(
        computed, weight, own_bias, recipe, anchor=anchor, defer=lambda *note: notes.append(note)
    )
    y.backward(g)
    assert torch.equal(y.detach(), want[0])
    assert torch.equal(x.grad, want[1])
    assert weight.grad is None
    found = {id(parameter): compute(*given) for parameter, compute, *given in notes}
    assert not any(gradient.requires_grad for gradient in found.values())
    assert torch.equal(found[id(weight)], want[2])
    assert torch.equal(found[id(own_bias)], want_bias.grad)


def packed_row_by_row(saved: Tensor) -> Tensor:
    """What ``save_on_cpu(pin_memory=True)`` makes of a saved tensor's strides."""
    return torch.empty(saved.size(), dtype=saved.dtype).copy_(saved)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_tensors_may_come_back_in_another_memory_order(recipe: str, deferred: bool) -> None:
    x, w, g = draw(300, 200, 256)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(packed_row_by_row, torch.clone):
            if not deferred:
                return titan_fp8.linear(x, w, None, recipe)

            def now(parameter: Tensor, compute: Any, *given: Any) -> None:
                parameter.grad = compute(*given)

            anchor = torch.zeros((), requires_grad=True)
            return titan_fp8.linear_deferred(x, w, None, recipe, anchor=anchor, defer=now)

    want = run(lambda x, w: titan_fp8.linear(x, w, None, recipe), x, w, g)
    with Kernels():  # through the ops, which refuse strides that CUDA's kernels do not read
        got = run(layer, x, w, g)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


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


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    ],
    ids=["weight_norm", "spectral_norm", "parametrized_weight_norm", "parametrized_spectral_norm", "prune"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_may_be_computed_from_other_parameters(change: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48)
    layer = Float8Linear(64, 48)
    layer.load_state_dict(plain.state_dict())
    for module in (plain, layer):
        torch.manual_seed(1)
        change(module)
    assert list(layer.state_dict()) == list(plain.state_dict())
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(32, 64)
    with titan_fp8.ConstantWeights(layer):
        for _ in range(2):
            for module in (plain, layer):
                module(x).sum().backward()
    for (name, got), (_, want) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
        assert sqnr(got.grad, want.grad) > 20, name


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
    with pytest.raises(ValueError, match="takes a floating-point"):
        titan_fp8.linear(x.int(), w.t())
    with pytest.raises(ValueError, match="unknown; choose one of tensorwise"):
        titan_fp8.linear(x, w.t(), None, "delayed")
    with pytest.raises(ValueError, match="a cast takes a matrix"):
        titan_fp8.cast(torch.randn(2, 2, 2), titan_fp8.Scaling("row"))
    with pytest.raises(ValueError, match="one scale per tensor"):
        titan_fp8.cast(x, titan_fp8.Scaling("row"), amax=torch.ones(()))
