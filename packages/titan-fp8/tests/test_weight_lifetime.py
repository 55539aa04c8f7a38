"""However a weight is changed, the next forward uses its new values; casts are kept only in declared blocks."""

import contextlib
import copy
import ctypes
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import titan_fp8
import torch
import torch.nn.functional as F
from titan_fp8 import ConstantWeights, Float8Linear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

N, K = 48, 64


def fill(generator_seed: int = 7) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(generator_seed))


def through_numpy(layer: nn.Linear, new: Tensor) -> None:
    layer.weight.detach().numpy()[...] = new.numpy()


def through_the_address(layer: nn.Linear, new: Tensor) -> None:
    """As another process does that maps the same memory, or a collective that writes in place."""
    ctypes.memmove(layer.weight.data_ptr(), new.data_ptr(), new.numel() * 4)


def in_inference_mode(layer: nn.Linear, new: Tensor) -> None:
    with torch.inference_mode():
        layer.weight.data.copy_(new)


def no_grad(write: Callable[[nn.Linear, Tensor], Any]) -> Callable[[nn.Linear, Tensor], None]:
    def run(layer: nn.Linear, new: Tensor) -> None:
        with torch.no_grad():
            write(layer, new)

    return run


def optimizer(**options: Any) -> Callable[[nn.Linear, Tensor], None]:
    def run(layer: nn.Linear, new: Tensor) -> None:
        layer.weight.grad = layer.weight.detach() - new  # a step of 1 lands on the new values, up to rounding
        torch.optim.SGD([layer.weight], lr=1.0, **options).step()

    return run


def swap(layer: nn.Linear, new: Tensor) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(new.clone()))


def moving_average(layer: nn.Linear, new: Tensor) -> None:
    average = torch.optim.swa_utils.AveragedModel(layer, multi_avg_fn=lambda averages, weights, _: None)
    average.module.weight.data.copy_(new)
    for own, mean in zip(layer.parameters(), average.module.parameters(), strict=True):
        own.data, mean.data = mean.data, own.data


def through_an_older_view(layer: nn.Linear, new: Tensor) -> None:
    layer.__dict__["view"].copy_(new.view(-1))


CHANGES: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "data.copy_": lambda layer, new: layer.weight.data.copy_(new),
    "data.add_": lambda layer, new: layer.weight.data.add_(new),
    "data = tensor": lambda layer, new: setattr(layer.weight, "data", new.clone()),
    "copy_": no_grad(lambda layer, new: layer.weight.copy_(new)),
    "set_": no_grad(lambda layer, new: layer.weight.set_(new.clone())),
    "index assignment": no_grad(lambda layer, new: layer.weight.__setitem__(slice(3, 20), new[3:20])),
    "detach().copy_": lambda layer, new: layer.weight.detach().copy_(new),
    "older view": through_an_older_view,
    "foreach on data": lambda layer, new: torch._foreach_add_([layer.weight.data], [new]),
    "foreach": no_grad(lambda layer, new: torch._foreach_mul_([layer.weight], 0.25)),
    "SGD": optimizer(foreach=False),
    "SGD foreach": optimizer(foreach=True),
    "SGD fused": optimizer(fused=True),
    "vector_to_parameters": lambda layer, new: nn.utils.vector_to_parameters(new.view(-1).clone(), [layer.weight]),
    "load_state_dict": lambda layer, new: layer.load_state_dict({"weight": new}),
    "load_state_dict assign": lambda layer, new: layer.load_state_dict({"weight": new.clone()}, assign=True),
    "another Parameter": lambda layer, new: setattr(layer, "weight", nn.Parameter(new.clone())),
    "swap_tensors": swap,
    "moving average": moving_average,
    "numpy": through_numpy,
    "address": through_the_address,
    "inference mode": in_inference_mode,
    "nn.init": lambda layer, new: nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(9)),
    "module.to": lambda layer, new: (layer.weight.data.mul_(3.0), layer.to(torch.float64).to(torch.float32)),
}


def pair(seed: int = 0) -> tuple[Float8Linear, nn.Linear]:
    """A float8 layer and a plain one with the same weight."""
    torch.manual_seed(seed)
    plain = nn.Linear(K, N, bias=False)
    plain.__dict__["view"] = plain.weight.data.view(-1)
    layer = Float8Linear.from_linear(copy.deepcopy(plain))
    layer.__dict__["view"] = layer.weight.data.view(-1)
    return layer, plain


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


# e4m3 has 4 significant bits: rounding moves a value by at most 2**-4 of itself. In a sum of products of random signs the
# errors of both operands add in quadrature: sqrt(2) * 2**-4 = 0.088 of the result's root mean square, below this bound.
# A stale weight is off by the whole change, which each test requires to be at least twice the bound.
FLOAT8_ERROR = 2.0**-3


@pytest.mark.parametrize("block", ["no block", "a block per step", "a block per step, precast"])
@pytest.mark.parametrize("grads", ["kept", "dropped"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_forward_follows_every_change_of_a_weight(change: str, grads: str, block: str) -> None:
    layer, plain = pair()
    x = torch.randn(16, K, generator=torch.Generator().manual_seed(1))
    constant = ConstantWeights(layer, precast="precast" in block) if block != "no block" else contextlib.nullcontext()

    def step() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with constant:
            for _ in range(2):  # microbatches
                xs = x.clone().requires_grad_()
                xp = x.clone().requires_grad_()
                y, want = layer(xs), F.linear(xp, plain.weight)
                y.sum().backward()
                want.sum().backward()
        return y, want, xs.grad, xp.grad

    before = step()[0]
    for module in (layer, plain):
        CHANGES[change](module, fill())
        module.zero_grad(set_to_none=grads == "dropped")
    y, want, dx, want_dx = step()
    assert relative_error(y, before) > 2 * FLOAT8_ERROR  # the change shows
    assert relative_error(y, want) < FLOAT8_ERROR
    assert relative_error(dx, want_dx) < FLOAT8_ERROR
    assert torch.equal(y, titan_fp8.linear(x, layer.weight))  # the same kernels on the same shapes


class DataWriter(torch.optim.Optimizer):
    """Writes ``p.data``, as many optimizers outside of torch do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-0.02)


def test_an_optimizer_that_writes_data_trains_while_gradients_are_kept() -> None:
    losses: dict[str, list[float]] = {}
    layer, plain = pair()
    x, target = torch.randn(32, K), torch.randn(32, N)
    for name, model in {"float8": layer, "plain": plain}.items():
        optim = DataWriter(model.parameters())
        losses[name] = []
        for _ in range(6):
            loss = F.mse_loss(model(x), target)
            loss.backward()
            losses[name].append(loss.item())
            optim.step()
            optim.zero_grad(set_to_none=False)
            for p in model.parameters():
                p.grad.zero_()
    assert losses["plain"][-1] < 0.9 * losses["plain"][0]
    # A loss is a mean over products whose relative error is below FLOAT8_ERROR.
    for got, want in zip(losses["float8"], losses["plain"], strict=True):
        assert abs(got - want) < FLOAT8_ERROR * want


class WeightCasts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "cast_weight" in func._schema.name
        return func(*args, **(kwargs or {}))


def casts_of(fn: Callable[[], Any]) -> int:
    with WeightCasts() as casts:
        fn()
    return casts.count


def test_a_weight_is_cast_once_in_a_declared_block_and_each_time_outside() -> None:
    layer, _ = pair()
    constant = ConstantWeights(layer)
    run = lambda: layer(torch.randn(8, K, requires_grad=True)).sum().backward()  # noqa: E731
    assert [casts_of(run) for _ in range(2)] == [2, 2]  # forward and backward
    for _ in range(2):
        with constant:
            assert [casts_of(run) for _ in range(3)] == [1, 0, 0]
    assert casts_of(run) == 2


def test_a_recomputed_layer_casts_once_too() -> None:
    layer, _ = pair()
    x = torch.randn(8, K, requires_grad=True)
    run = lambda: checkpoint(layer, x, use_reentrant=False).sum().backward()  # noqa: E731
    with ConstantWeights(layer):
        assert [casts_of(run) for _ in range(3)] == [1, 0, 0]


def test_weights_made_in_inference_mode_are_cast_at_each_use() -> None:
    """Nothing counts their versions, so nothing is kept of them, nor cast before."""
    with torch.inference_mode():
        layer = Float8Linear(K, N)
        with ConstantWeights(layer, precast=True):
            assert casts_of(lambda: layer(torch.randn(8, K))) == 1


def test_the_outermost_block_decides_and_frozen_weights_keep_their_casts_over_steps() -> None:
    layer, _ = pair()
    trained = Float8Linear(N, N, bias=False)
    model = nn.Sequential(layer, trained)
    layer.weight.requires_grad_(False)
    run = lambda: model(torch.randn(8, K, requires_grad=True)).sum().backward()  # noqa: E731
    step = ConstantWeights(model)
    counts: list[int] = []
    with ConstantWeights(model, frozen=True):
        for _ in range(3):
            with step:
                counts += [casts_of(run) for _ in range(2)]
        counts.append(casts_of(run))
    assert counts == [2, 0, 1, 0, 1, 0, 2]  # the trained weight once per step; outside of one, twice
    assert casts_of(run) == 4


def test_no_cast_outlives_its_block() -> None:
    layer, _ = pair()
    x = torch.randn(8, K, requires_grad=True)
    with ConstantWeights(layer):
        y = layer(x)
    layer.weight.data.mul_(-1.0)
    y.sum().backward()  # as nn.Linear, backward uses the weight that it finds
    want = F.linear(torch.ones(8, N), layer.weight.detach().t())
    assert relative_error(x.grad, want) < FLOAT8_ERROR


def test_a_change_inside_a_block_is_refused_where_it_can_be_seen() -> None:
    layer, _ = pair()
    model = nn.ModuleDict({"up": layer})
    x = torch.randn(8, K)
    with ConstantWeights(model):
        layer(x)
        with torch.no_grad():
            layer.weight.add_(1.0)
        with pytest.raises(RuntimeError, match=r"up\.weight was changed after it was cast"):
            layer(x)
    layer(x)  # the block is left: the weight is cast afresh


@pytest.mark.parametrize("change", ["data.copy_", "data.add_", "numpy", "address", "inference mode", "moving average"])
def test_the_debug_mode_sees_every_change_and_names_the_weight(change: str) -> None:
    layer, _ = pair()
    model = nn.ModuleDict({"up": layer})
    x = torch.randn(8, K)
    with ConstantWeights(model, check=True):
        layer(x)
        layer(x)
        CHANGES[change](layer, fill())
        with pytest.raises(RuntimeError, match=r"up\.weight was changed .* Leave the ConstantWeights"):
            layer(x)


def test_the_checksum_sees_a_single_bit_and_an_exchange_of_values() -> None:
    from titan_fp8.weights.cache import checksum

    for dtype in (torch.float32, torch.bfloat16):
        w = torch.randn(16, 16).to(dtype)
        seen = checksum(w)
        other = w.clone()
        other[3, 4] = torch.nextafter(w[3, 4].float(), torch.tensor(10.0)).to(dtype) if dtype == torch.float32 else 9.0
        assert checksum(other) != seen
        assert checksum(w.flip(0)) != seen
        assert checksum(w.clone()) == seen


def test_a_captured_graph_casts_weights_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast from outside of the capture would be frozen into every replay."""
    from titan_fp8.weights import cache as module

    capturing = False
    monkeypatch.setattr(module, "capturing", lambda: capturing)
    monkeypatch.setattr(module, "_on_device", lambda weight: True)
    layer, _ = pair()
    run = lambda: layer(torch.randn(8, K, requires_grad=True)).sum().backward()  # noqa: E731
    with ConstantWeights(layer):
        assert casts_of(run) == 1
        capturing = True
        assert casts_of(run) == 2
        capturing = False
        assert casts_of(run) == 0
    capturing = True
    with ConstantWeights(layer):
        assert [casts_of(run) for _ in range(2)] == [1, 0]


def test_a_cache_serves_functional_calls() -> None:
    w = fill().requires_grad_()
    x = torch.randn(8, K)
    cache = titan_fp8.WeightCache()
    run = lambda: titan_fp8.linear(x, w, cache=cache).sum().backward()  # noqa: E731
    assert casts_of(run) == 1  # x needs no gradient: rows alone, for the forward
    with cache:
        assert [casts_of(run) for _ in range(2)] == [1, 0]
        other = fill(8).requires_grad_()
        assert casts_of(lambda: titan_fp8.linear(x, other, cache=cache)) == 1  # another tensor is another weight
    assert pickle.loads(pickle.dumps(cache)).is_open is False


def test_casts_are_those_of_the_block_whatever_module_computes_them() -> None:
    """Deferred weight gradients and functional calls share the layer's cast."""
    layer, _ = pair()
    x = torch.randn(8, K, requires_grad=True)
    notes: list[Any] = []

    def run() -> None:
        y = layer.forward_deferred(
            x, anchor=torch.zeros((), requires_grad=True), defer=lambda *note: notes.append(note)
        )
        y.sum().backward()

    with ConstantWeights(layer):
        assert [casts_of(run) for _ in range(2)] == [1, 0]
        assert casts_of(lambda: titan_fp8.linears(x, [layer.weight], caches=[layer.weight_cache])) == 0
    assert casts_of(run) == 2
