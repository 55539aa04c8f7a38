"""Any operation on a parameter defers its weight gradient; what cannot is right, and is reported."""

import copy
import re
import runpy
from pathlib import Path
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from titan_pipeline import Schedule, build_schedule  # noqa: E402
from titan_pipeline.runtime import Executor, ThreadHub, TorchStage  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

MODELS = ["GPT-2", "CNN", "ViT", "Whisper", "Mixtral", "Mamba"]

# Everything runs in float64. Where an activation feeds several operations, or a weight is used several times, the sum of
# their gradients may come in another order: fewer than 64 terms below 100, each addition rounded by at most 2^-53.
ORDER = 64 * 100 * 2.0**-53


def plain(module, x, grad):
    """Gradient of the input, and of each parameter by name."""
    module = copy.deepcopy(module)
    x = x.clone().requires_grad_(x.is_floating_point())
    module(x).backward(grad)
    return x.grad, {n: p.grad for n, p in module.named_parameters()}


def split(module, x, grad, index=1):
    """The same in two halves, and the names of the parameters that had a gradient between them."""
    module = copy.deepcopy(module)
    stage = TorchStage(module, index)
    stage.configure(True)
    stage.forward(0, (x,), None, {}, True)
    grads = stage.backward(0, (grad,), True)
    early = {n for n, p in module.named_parameters() if p.grad is not None}
    stage.backward_weight(0)
    return grads[0] if grads else None, {n: p.grad for n, p in module.named_parameters()}, early, stage


def check(module, x, early=(), index=1):
    module, x = module.double(), x.double() if x.is_floating_point() else x
    torch.manual_seed(1)
    grad = torch.randn_like(module(x))
    expected_x, expected = plain(module, x, grad)
    got_x, got, found, stage = split(module, x, grad, index)
    if index:
        torch.testing.assert_close(got_x, expected_x, rtol=0, atol=ORDER)
    for name, e in expected.items():
        if e is None:
            assert got[name] is None
        else:
            torch.testing.assert_close(got[name], e, rtol=0, atol=ORDER, msg=lambda t, n=name: f"{n}: {t}")
    assert found == set(early)
    return stage


class Product(nn.Module):
    """One own parameter, used as ``use`` says."""

    def __init__(self, use, *shape):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(shape))
        self.use = use

    def forward(self, x):
        return self.use(x, self.weight)


def by_expert(x, w):
    parts = [torch.nn.functional.linear(x, w[torch.tensor(i)]).relu() @ w[i] for i in range(3)]
    return sum(parts)


class Listed(nn.Module):
    """Parameters in a list."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(2)])

    def forward(self, x):
        return (x @ self.weights[0]).sigmoid() * (x @ self.weights[1])


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


def parametrized():
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv1d(3, 4, 2), (2, 3, 6)),
        (lambda: nn.Conv2d(3, 4, 2, groups=1, stride=2), (2, 3, 6, 6)),
        (lambda: nn.ConvTranspose2d(3, 4, 2), (2, 3, 6, 6)),
        (lambda: nn.Bilinear(4, 4, 3), None),
        (lambda: Subclass(4, 3), (2, 4)),
        (Listed, (2, 4)),
        (parametrized, (2, 4)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4)),
        (lambda: Product(lambda x, w: x @ w, 4, 3), (2, 5, 4)),
        (lambda: Product(lambda x, w: torch.einsum("bd,df->bf", x, w), 4, 3), (2, 4)),
        (lambda: Product(lambda x, w: torch.baddbmm(x, x, w), 2, 4, 4), (2, 4, 4)),
        (lambda: Product(lambda x, w: nn.functional.linear(x, w.to(torch.float64).t()), 4, 3), (2, 4)),
        (lambda: Product(by_expert, 3, 4, 4), (2, 4)),
        (lambda: Product(lambda x, w: torch.tanh(x @ w) @ w.T, 4, 4), (2, 4)),
        (lambda: Product(lambda x, w: (x @ w).chunk(2, -1)[0].contiguous().add_(1), 4, 4), (2, 4)),
    ],
)
def test_the_weight_gradient_of_any_product_waits(layer, shape):
    torch.manual_seed(0)
    module = layer()
    if shape is None:

        class Twice(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return self.inner(x, x.sin())

        module, shape = Twice(module), (2, 4)
    stage = check(module, torch.randn(shape))
    assert stage.not_deferred == {}
    assert stage.deferred_share == 1


def test_the_first_stage_defers_without_an_input_gradient():
    torch.manual_seed(0)
    check(nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), Subclass(100, 3)), torch.randn(2, 3, 6, 6), index=0)


@pytest.mark.parametrize("name", MODELS)
def test_six_models_defer_at_least_95_percent_of_the_flops(name):
    pytest.importorskip("transformers")
    bench = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/bench_split.py"))
    torch.manual_seed(0)
    module, x = bench["MODELS"][name](16, 8, 1)
    assert bench["deferred_share"](module, x) >= 0.95
    x = x.double()
    module = module.double()
    for key, value in getattr(module, "options", {}).items():
        if isinstance(value, tuple):
            module.options[key] = tuple(v.double() for v in value)
    grad = torch.randn_like(module(x))
    expected_x, expected = plain(module, x, grad)
    got_x, got, _, stage = split(module, x, grad)
    torch.testing.assert_close(got_x, expected_x, rtol=0, atol=ORDER)
    for n, e in expected.items():
        if e is not None:
            torch.testing.assert_close(got[n], e, rtol=0, atol=ORDER, msg=lambda t, n=n: f"{n}: {t}")
    assert stage.deferred_share >= 0.9


class Attends(nn.Module):
    """``nn.MultiheadAttention`` as ``use`` calls it."""

    def __init__(self, use, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, **options)
        self.use = use

    def forward(self, x):
        return self.use(self.attention, x)[0]


ATTENTIONS = {
    "self": Attends(lambda a, x: a(x, x, x, need_weights=False), batch_first=True),
    "self, weights": Attends(lambda a, x: a(x, x, x)),
    "causal": Attends(
        lambda a, x: a(
            x, x, x, need_weights=False, is_causal=True,
            attn_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[0], dtype=x.dtype),
        )
    ),
    "across": Attends(lambda a, x: a(x, 2 * x, x.flip(0), average_attn_weights=False), bias=False, add_bias_kv=True),
    "other widths": Attends(lambda a, x: a(x, x[..., :8], x[..., :4]), kdim=8, vdim=4, add_zero_attn=True),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_torchs_attention_is_cut_at_its_products(name):
    """As one operation it would be right too, but its attention would run backward in both halves."""
    module = copy.deepcopy(ATTENTIONS[name])
    vectors = {n for n, p in module.named_parameters() if n.endswith(("bias_k", "bias_v"))}  # concatenated: cheap
    stage = check(module, torch.randn(6, 3, 16), early=vectors)
    assert stage.deferred_share == 1
    x = torch.randn(6, 3, 16, dtype=torch.float64)
    grad = torch.ones_like(module(x))

    def flops(run):
        with FlopCounterMode(display=False) as counter:
            run(module, x, grad)
        return counter.get_total_flops()

    assert flops(split) == flops(plain)


class CustomProduct(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        CustomProduct.runs += 1
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Asking(CustomProduct):
    """Computes what is asked for."""

    halves: ClassVar = []

    @staticmethod
    def forward(ctx, x, scale, weight):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return scale * x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        Asking.halves.append((ctx.needs_input_grad[0], ctx.needs_input_grad[2]))
        need_x, _, need_weight = ctx.needs_input_grad
        return (
            ctx.scale * grad @ weight.t() if need_x else None,
            None,
            ctx.scale * x.t() @ grad if need_weight else None,
        )


@pytest.mark.parametrize("use", [lambda x, w: Asking.apply(x, 2, w), lambda x, w: Asking.apply(x, 2, w.t()[:, :3])])
def test_a_custom_function_that_asks_what_is_wanted_runs_half_and_half(use):
    Asking.halves.clear()
    stage = check(nn.Sequential(Product(use, 4, 4), nn.Tanh()), torch.randn(2, 4))
    assert Asking.halves == [(True, True), (True, False), (False, True)]  # one process, I, W
    assert stage.not_deferred == {}
    assert stage.deferred_share == 1
    assert check(Product(use, 4, 4), torch.randn(2, 4), index=0).deferred_share == 1


class Shifted(torch.autograd.Function):
    """A sum whose gradients are the gradient that it is given, or a view of it."""

    @staticmethod
    def forward(ctx, x, shift, turned):
        return x + shift + turned.t()

    @staticmethod
    def backward(ctx, grad):
        need_x, need_shift, need_turned = ctx.needs_input_grad
        return grad if need_x else None, grad if need_shift else None, grad.t() if need_turned else None


class Shifts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.first, self.second, self.turned = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x):
        return Shifted.apply(Shifted.apply(self.inner(x), self.first, self.turned), self.second, self.turned)


def test_parameters_that_get_one_gradient_keep_their_own_copies_of_it():
    module = Shifts().double()
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    grads = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    expected = copy.deepcopy(module)
    for x, grad in zip(inputs, grads, strict=True):
        expected(x).backward(grad)
    stage = TorchStage(module, 1)
    stage.configure(True)
    given = [grad.clone() for grad in grads]
    for microbatch, (x, grad) in enumerate(zip(inputs, given, strict=True)):
        stage.forward(microbatch, (x,), None, {}, True)
        stage.backward(microbatch, (grad,), True)
        stage.backward_weight(microbatch)
    assert stage.not_deferred == {}
    for p, e in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, e.grad)
    assert all(torch.equal(g, e) for g, e in zip(given, grads, strict=True))


def test_a_custom_function_that_does_not_ask_runs_once_and_is_reported():
    CustomProduct.runs = 0
    module = nn.Sequential(Product(CustomProduct.apply, 4, 4), Subclass(4, 4))
    check(module, torch.randn(2, 4), {"0.weight"})
    assert CustomProduct.runs == 2  # one process, and the split
    stage = TorchStage(module, 1)
    stage.configure(True)
    for microbatch in range(2):
        stage.forward(microbatch, (torch.randn(2, 4, dtype=torch.float64),), None, {}, True)
        stage.backward(microbatch, (torch.ones(2, 4, dtype=torch.float64),), True)
        stage.backward_weight(microbatch)
    assert CustomProduct.runs == 4
    assert list(stage.not_deferred) == ["0.weight"]
    assert "ctx.needs_input_grad" in stage.not_deferred["0.weight"]
    assert stage.deferred_share == 0.5


class Rounded(torch.autograd.Function):
    """A fake quantization, straight through."""

    @staticmethod
    def forward(ctx, weight):
        return (8 * weight).round() / 8

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_product_with_a_weight_from_a_custom_function_waits():
    stage = check(nn.Sequential(Product(lambda x, w: x @ Rounded.apply(w), 4, 4), nn.Tanh()), torch.randn(2, 4))
    assert stage.deferred_share == 1


def test_custom_functions_in_a_checkpoint_and_with_hooked_weights_are_right():
    def use(x, w):
        return Asking.apply(x, 2, w)

    stage = check(Recomputed(Product(use, 4, 4)), torch.randn(2, 4), {"inner.weight"})
    assert "checkpoint" in stage.not_deferred["inner.weight"]
    module, calls = Product(use, 4, 4), []
    module.weight.register_hook(lambda g: calls.append(g is not None))
    stage = TorchStage(module, 1)
    stage.configure(True)
    stage.forward(0, (torch.randn(2, 4),), None, {}, True)
    stage.backward(0, (torch.ones(2, 4),), True)
    stage.backward_weight(0)
    assert calls == [True]
    assert "hook" in stage.not_deferred["weight"]


@pytest.mark.parametrize("split_stages", [[range(4)], [[2, 3], range(4)], [[0, 1]]])
def test_a_layer_of_two_stages_of_a_rank_survives_a_change_of_schedule(split_stages):
    shared = nn.Linear(4, 4)
    modules = [nn.Sequential(m) for m in (shared, nn.Linear(4, 4), shared, nn.Linear(4, 4))]
    whole = build_schedule("interleaved_1f1b", 1, 4, num_chunks=4)
    stages = [TorchStage(m, s, loss=nn.functional.mse_loss) for s, m in enumerate(modules)]
    data = torch.randn(4, 2, 4).unbind()
    executor = Executor(build_schedule("interleaved_zb", 1, 4, num_chunks=4), stages)
    partly = []
    for chosen in split_stages:
        text = whole.to_text()
        for s in chosen:
            text = re.sub(rf"\b{s}B(\d)", rf"{s}I\1 {s}W\1", text)
        partly.append(Schedule.from_text(text))
    grads = []
    for schedule in (whole, *partly, whole):
        executor.step(data, data)
        grads.append([p.grad for m in modules for p in m.parameters()])
        for m in modules:
            m.zero_grad()
        executor.swap(schedule)
    assert all(torch.equal(g, e) for other in grads[1:] for g, e in zip(other, grads[0], strict=True))
    assert not any("forward" in m.__dict__ for module in modules for m in module.modules())
    assert [stage.deferred_share for stage in stages] == [0] * 4


@pytest.mark.parametrize(
    "layer",
    [
        nn.Embedding(5, 4, scale_grad_by_freq=True),
        nn.Embedding(5, 4, sparse=True),
        nn.Embedding(5, 4, max_norm=1.0),
        prune.random_unstructured(nn.Linear(5, 4), "weight", amount=0.5),
    ],
    ids=["frequency", "sparse", "norm", "pruned"],
)
def test_layers_that_the_rules_leave_alone_count_as_not_deferred(layer):
    stage = TorchStage(nn.Sequential(layer, nn.Linear(4, 5)), 0)
    stage.configure(True)
    assert stage.deferred_share == 0.5
    assert set(stage.not_deferred) == {f"0.{name}" for name, _ in layer.named_parameters()}
    stage.forward(0, (torch.arange(3) if isinstance(layer, nn.Embedding) else torch.randn(3, 5),), None, {}, True)
    stage.backward(0, (torch.ones(3, 5),), True)
    assert all(p.grad is not None for p in layer.parameters())


class Tied(nn.Module):
    """An output layer that is the embedding's weight, which it uses itself."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.unused = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x) @ self.embed.weight.t()


def test_a_weight_that_is_used_outside_of_its_layer_counts_as_not_deferred():
    stage = check(Tied(), torch.randn(2, 4), {"embed.weight"})
    assert "outside of its layer's forward" in stage.not_deferred["embed.weight"]
    assert stage.deferred_share == 0.5


class LastState(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def test_a_recurrence_is_right_and_counts_as_not_deferred():
    names = {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}
    stage = check(LastState(4, 4), torch.randn(3, 2, 4), names)
    assert stage.deferred_share == 0
    assert "recurrence" in stage.not_deferred["weight_hh_l0"]


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_what_a_checkpoint_recomputes_is_right_and_not_cut():
    torch.manual_seed(0)
    layers = nn.Sequential(Subclass(4, 4), nn.Tanh(), Subclass(4, 4))
    stage = check(nn.Sequential(Recomputed(layers), Subclass(4, 4)), torch.randn(2, 4), {
        "0.inner.0.weight", "0.inner.0.bias", "0.inner.2.weight", "0.inner.2.bias",
    })  # fmt: skip
    assert stage.deferred_share == pytest.approx(1 / 3)


def test_parameter_hooks_fire_once_and_frozen_parameters_stay_without_gradient():
    layer = Product(by_expert, 3, 4, 4)
    frozen = nn.Conv1d(2, 2, 1)
    frozen.bias.requires_grad_(False)
    calls = []
    layer.weight.register_hook(lambda g: calls.append("tensor"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append("post"))
    for module, x in ((layer, torch.randn(2, 4)), (frozen, torch.randn(1, 2, 3))):
        stage = TorchStage(module, 1)
        stage.configure(True)
        stage.forward(0, (x,), None, {}, True)
        stage.backward(0, (torch.ones_like(module(x)),), True)
        assert all(p.grad is None for p in module.parameters())
        stage.backward_weight(0)
    assert sorted(calls) == ["post", "tensor"]
    assert frozen.bias.grad is None
    assert frozen.weight.grad is not None


def test_detaching_leaves_a_forward_that_another_library_replaced():
    layer = Subclass(4, 4)
    replaced = layer.forward
    layer.forward = replaced
    stage = TorchStage(nn.Sequential(layer, Product(lambda x, w: x @ w, 4, 4)), 1)
    stage.configure(True)
    assert layer.forward is not replaced
    stage.configure(False)
    assert layer.__dict__["forward"] is replaced
    assert "forward" not in stage.module[1].__dict__


@pytest.mark.parametrize("name", ["zbv", "zb_h1", "dualpipe_v"])
def test_a_cnn_trains_like_in_one_process(name):
    schedule = build_schedule(name, 2, 4)
    torch.manual_seed(0)
    modules = [
        nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()).double() for _ in range(schedule.num_stages)
    ]  # fmt: skip
    data = [torch.randn(2, 3, 6, 6, dtype=torch.float64) for _ in range(4)]
    alone = copy.deepcopy(modules)
    for x in data:
        (nn.functional.mse_loss(nn.Sequential(*alone)(x), x) / 4).backward()

    def work(transport):
        stages = [TorchStage(modules[s], s, loss=nn.functional.mse_loss) for s in schedule.stages_of(transport.rank)]
        Executor(schedule, stages, transport).step(data, data)
        return [s.deferred_share for s in stages]

    assert all(share == 1 for shares in ThreadHub(2).run(work) for share in shares)
    for module, other in zip(modules, alone, strict=True):
        for p, e in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, e.grad, rtol=0, atol=ORDER)
