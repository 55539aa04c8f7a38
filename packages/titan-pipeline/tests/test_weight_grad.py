"""The weight-gradient engine: bit-equal gradients, nothing twice, hooks once, and less memory between the passes.

Bits are compared with autograd's own backward of the same module in this process: both call the same kernels on the
same tensors, since the engine's products are those of autograd's formulas.
"""

import pytest

torch = pytest.importorskip("torch")

from titan_pipeline.runtime import NORM_RULES, TorchStage, WeightGradEngine, grouped_linear  # noqa: E402
from titan_pipeline.runtime.weight_grad.queue import accumulate, has_hooks  # noqa: E402
from titan_pipeline.runtime.weight_grad.rules import LinearHook, others_save  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


class SwiGlu(nn.Module):
    """A Transformer block: attention and a gated feed-forward layer."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block
        self.runs = 0

    def forward(self, x):
        return checkpoint(self._counted, x, use_reentrant=False)

    def _counted(self, x):
        self.runs += 1
        return self.block(x)


def plain_grads(module, x, grad):
    x = x.clone().requires_grad_(x.is_floating_point())
    module(x).backward(grad)
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return x.grad, grads


def split_grads(module, x, grad, index=1):
    stage = TorchStage(module, index, rules=NORM_RULES)
    stage.configure(True)
    stage.forward(0, (x,), None, {}, True)
    (grad_x,) = stage.backward(0, (grad,), True) or (None,)
    between = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    stage.backward_weight(0)
    return grad_x, [p.grad for p in module.parameters()], between


@pytest.mark.parametrize("index", [0, 1])  # a first input without and with a gradient
def test_complex_gradients_are_bit_equal_to_autograd(index):
    torch.manual_seed(0)
    first, second, third = (nn.Linear(n, n - 1, dtype=torch.complex64) for n in (4, 3, 2))
    module = nn.Sequential(first, second, Checkpointed(third))
    x, grad = (torch.randn(2, 6, n, dtype=torch.complex64) for n in (4, 1))
    expected_x = x.clone().requires_grad_()
    module(expected_x).backward(grad)
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    got_x, got, _ = split_grads(module, x, grad, index)
    assert index == 0 or torch.equal(got_x, expected_x.grad)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_split_gradients_are_bit_equal_to_autograd(dtype):
    torch.manual_seed(0)
    block = SwiGlu().to(dtype)
    x, grad = torch.randn(2, 7, 64, dtype=dtype), torch.randn(2, 7, 64, dtype=dtype)
    expected_x, expected = plain_grads(block, x, grad)
    got_x, got, between = split_grads(block, x, grad)
    assert torch.equal(got_x, expected_x)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert all(g is None for g in between)  # every weight of the block waits for W


def test_embeddings_norms_and_convolutions_are_right_deferred_or_not():
    torch.manual_seed(0)
    text = nn.Sequential(nn.Embedding(11, 8, padding_idx=2), nn.LayerNorm(8), nn.Linear(8, 3))
    tokens, grad = torch.randint(11, (4, 5)), torch.randn(4, 5, 3)
    _, expected = plain_grads(text, tokens, grad)
    _, got, between = split_grads(text, tokens, grad, index=0)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert all(g is None for g in between)
    image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    x, grad = torch.randn(2, 3, 8, 8), torch.randn(2, 5)
    _, expected = plain_grads(image, x, grad)
    _, got, between = split_grads(image, x, grad)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert [g is None for g in between] == [True, True, False, False, True, True]  # a norm's is cheap, and comes with I


def test_autocast_gradients_match_autograd():
    torch.manual_seed(0)
    block = SwiGlu()
    x, grad = torch.randn(2, 7, 64), torch.randn(2, 7, 64)

    def forward(module):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    forward(block).backward(grad)
    expected = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    engine = WeightGradEngine(block)
    with engine.recording():
        out = forward(block)
    with engine.deferring() as queue:
        out.backward(grad)
    queue.run()
    for p, e in zip(block.parameters(), expected, strict=True):
        assert p.grad.dtype == torch.float32
        # Two roundings to 8 bits differ: the engine sums a bias in bfloat16 rows, autograd may sum in float32.
        assert (p.grad - e).abs().max() <= 2 * 2.0**-8 * e.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_grouped_products_defer_and_match_one_product_a_group(dtype):
    torch.manual_seed(0)
    # double precision: a group's product may take another kernel than the reference's; 9 terms below 10, rounded by 2^-53 each
    bound = 9 * 10 * 2.0**-53
    x = torch.randn(9, 4, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(3, 4, 5, dtype=dtype))
    ends = torch.tensor([2, 2, 9])
    grad = torch.randn(9, 5, dtype=dtype)
    torch.cat([x[:2] @ weight[0], x[2:] @ weight[2]]).backward(grad)
    expected_x, expected = x.grad, weight.grad
    x.grad = weight.grad = None
    engine = WeightGradEngine(nn.Module())
    with engine.recording():
        out = grouped_linear(engine, x, weight, ends)
    with engine.deferring() as queue:
        out.backward(grad)
    assert weight.grad is None
    torch.testing.assert_close(x.grad, expected_x, rtol=0, atol=bound)
    queue.run()
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=bound)
    weight.grad = x.grad = None
    grouped_linear(None, x, weight, ends).backward(grad)
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=bound)


class CountedSquare(torch.autograd.Function):
    backwards = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        CountedSquare.backwards += 1
        return 2 * ctx.saved_tensors[0] * grad


class Squared(nn.Module):
    def forward(self, x):
        return CountedSquare.apply(x)


def test_a_custom_backward_runs_once():
    CountedSquare.backwards = 0
    split_grads(nn.Sequential(nn.Linear(4, 4), Squared(), nn.Linear(4, 4)), torch.randn(2, 4), torch.randn(2, 4))
    assert CountedSquare.backwards == 1


def test_a_checkpointed_block_is_recomputed_once():
    torch.manual_seed(0)
    block = SwiGlu()
    x, grad = torch.randn(1, 5, 64), torch.randn(1, 5, 64)
    expected_x, expected = plain_grads(block, x, grad)
    wrapped = nn.Sequential(Checkpointed(block))
    got_x, got, between = split_grads(wrapped, x, grad)
    assert wrapped[0].runs == 2  # the forward, and one recomputation
    assert torch.equal(got_x, expected_x)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert all(g is None for g in between)


def test_parameter_hooks_fire_once_a_microbatch():
    block = SwiGlu()
    calls = {}
    for name, p in block.named_parameters():
        p.register_hook(lambda g, n=name: calls.__setitem__(("tensor", n), calls.get(("tensor", n), 0) + 1))
        p.register_post_accumulate_grad_hook(
            lambda p, n=name: calls.__setitem__(("post", n), calls.get(("post", n), 0) + 1)
        )
    split_grads(block, torch.randn(1, 3, 64), torch.randn(1, 3, 64))
    assert len(calls) == 2 * len(list(block.parameters()))
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("turned", [False, True])
def test_a_first_gradient_gets_the_layout_of_its_parameter(turned):
    """A fused optimizer reads both as they lie in memory."""
    weight, grad = torch.randn(3, 5), torch.randn(5, 3).t()
    if turned:
        weight, grad = torch.randn(5, 3).t(), torch.randn(3, 5)
    deferred, plain = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    with torch.no_grad():
        accumulate([(deferred, grad)])
    plain.backward(grad)
    torch.optim.SGD([deferred, plain], lr=1.0, fused=True).step()
    assert torch.equal(deferred, plain)


def test_hooked_parameters_are_recognised():
    """Reads two undocumented attributes; fails if a torch release (checked: 2.11, 2.15) renames them."""
    plain, hooked, post = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    hooked.register_hook(lambda g: g)
    post.register_post_accumulate_grad_hook(lambda p: None)
    assert [has_hooks(p) for p in (plain, hooked, post)] == [False, True, True]


def test_active_saved_tensor_hooks_are_recognised():
    """Reads an undocumented function; fails if a torch release (checked: 2.11, 2.15) takes it away."""
    seen = [others_save()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        seen.append(others_save())
    x = torch.ones(1, requires_grad=True)
    checkpoint(lambda y: seen.append(others_save()) or y.sin(), x, use_reentrant=False).backward()
    assert seen == [False, True, True, True]


def test_offloaded_activations_stay_offloaded_until_the_backward():
    """With a saved-tensor hook of the user's, nothing holds the layer's input beside it."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    _, expected = plain_grads(layers, x, grad)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        _, got, _ = split_grads(layers, x, grad)
    assert packed.count((3, 4)) == 2
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_accumulation_through_autograd_reaches_the_nodes():
    layer = nn.Linear(2, 2)
    fired = []
    node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    handle = node.register_hook(lambda *args: fired.append(1))
    stage = TorchStage(layer, 1, through_autograd=True)
    stage.configure(True)
    stage.forward(0, (torch.randn(1, 2),), None, {}, True)
    stage.backward(0, (torch.randn(1, 2),), True)
    assert not fired
    stage.backward_weight(0)
    assert fired == [1]
    handle.remove()


class Hooked(nn.Module):
    """Scales the gradient of a layer's output, and clips that of its input."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        out = self.outer(hidden)
        for tensor, hook in ((hidden, lambda g: g.clamp(-0.1, 0.1)), (out, lambda g: 0.1 * g), (out, lambda g: g + 1)):
            if tensor.requires_grad:
                tensor.register_hook(hook)
        return out


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_tensor_hooks_act_on_deferred_gradients_too(shape):
    torch.manual_seed(0)
    module, x, grad = Hooked(), torch.randn(shape), torch.randn(shape)
    expected_x, expected = plain_grads(module, x, grad)
    got_x, got, between = split_grads(module, x, grad)
    assert torch.equal(got_x, expected_x)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert all(g is None for g in between)


class ChangesInput(nn.Module):
    """Changes a layer's input in place after the layer has run."""

    def __init__(self, freeze):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.weight.requires_grad_(not freeze)

    def forward(self, x):
        hidden = 2 * x
        out = self.inner(hidden)
        hidden.mul_(0.5)
        return out + hidden


def test_an_input_that_changes_after_its_layer_is_refused_as_by_autograd():
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    for run in (plain_grads, split_grads):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(ChangesInput(freeze=False), x, grad)
    frozen = ChangesInput(freeze=True)
    _, got, _ = split_grads(frozen, x, grad)
    assert torch.equal(got[1], grad.sum(0))


class Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


class Stops(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return Stopped.apply(self.inner(x)) + self.other(x)


@pytest.mark.parametrize("index", [0, 1])  # an input without and with a gradient
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_layers_whose_outputs_are_changed_in_place_keep_their_gradients(shape, index):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    x, grad = torch.randn(shape), torch.randn(shape)
    expected_x, expected = plain_grads(module, x, grad)
    got_x, got, between = split_grads(module, x, grad, index=index)
    assert index == 0 or torch.equal(got_x, expected_x)
    assert all(g is not None and torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert all(g is None for g in between)


def test_a_layer_whose_output_gets_no_gradient_gets_none():
    module, grad = Stops(), torch.randn(3, 4)
    _, got, _ = split_grads(module, torch.randn(3, 4), grad)
    assert got[:2] == [None, None]
    assert torch.equal(got[3], grad.sum(0))


class ByName(nn.Module):
    """Calls its layers with the name of their argument."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.layer = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, tokens):
        return self.layer(input=self.norm(input=self.table(input=tokens)))


def test_layers_may_be_called_by_name():
    module, tokens, grad = ByName(), torch.randint(5, (3,)), torch.randn(3, 4)
    _, expected = plain_grads(module, tokens, grad)
    _, got, _ = split_grads(module, tokens, grad, index=0)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_a_weight_used_twice_is_accumulated_once_with_the_sum():
    shared = nn.Linear(4, 4)
    twice = nn.Sequential(shared, nn.Tanh(), shared)
    fired = []
    shared.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    _, expected = plain_grads(twice, x, grad)
    fired.clear()
    _, got, _ = split_grads(twice, x, grad)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert len(fired) == 1


def test_frozen_weights_stay_without_gradient():
    block = SwiGlu()
    block.gate.weight.requires_grad_(False)
    split_grads(block, torch.randn(1, 3, 64), torch.randn(1, 3, 64))
    assert block.gate.weight.grad is None
    assert block.up.weight.grad is not None


def test_detach_gives_every_layer_its_own_forward_back():
    block = SwiGlu()
    engine = WeightGradEngine(block)
    assert "forward" in block.up.__dict__
    engine.detach()
    assert not any("forward" in m.__dict__ for m in block.modules())


class HalfPrecisionLinear(nn.Linear):
    """Stands for a layer that brings its own weight gradient (float8, tensor-parallel)."""


def test_a_layer_can_bring_its_own_rule():
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, x, weight, owner, engine):
            ctx.save_for_backward(x, weight)
            ctx.parameter, ctx.engine = owner[0], engine
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            ctx.engine.defer(ctx.parameter, lambda g: g.t() @ x, grad)
            seen.append(grad.shape)
            return None, grad @ weight, None, None, None

    layer = HalfPrecisionLinear(4, 4, bias=False)

    def rule(engine, module, plain, x):
        return Product.apply(engine.anchor, x, module.weight.detach(), [module.weight], engine)

    stage = TorchStage(layer, 1, rules={HalfPrecisionLinear: rule})
    stage.configure(True)
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    stage.forward(0, (x,), None, {}, True)
    stage.backward(0, (grad,), True)
    assert (seen, layer.weight.grad) == ([(3, 4)], None)
    stage.backward_weight(0)
    assert torch.equal(layer.weight.grad, grad.t() @ x)  # the product of the rule above, on the same tensors


def test_a_recorded_forward_refuses_a_backward_elsewhere():
    layer = nn.Linear(2, 2)
    engine = WeightGradEngine(layer)
    layer(torch.randn(1, 2)).sum().backward()  # outside a stage the layer is its plain self
    assert layer.weight.grad is not None
    with engine.recording():
        out = layer(torch.randn(1, 2))
    with pytest.raises(RuntimeError, match="weight gradients would be lost"):
        out.sum().backward()


def held_bytes(*roots):
    """Bytes of the distinct storages reachable from autograd nodes (saved tensors) and queued notes."""
    seen, sizes, stack = {}, {}, list(roots)
    while stack:
        thing = stack.pop()
        if thing is None or id(thing) in seen:
            continue
        seen[id(thing)] = thing  # kept alive, so that no other object gets its id
        if isinstance(thing, torch.Tensor):
            sizes[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, torch.autograd.graph.Node):
            stack += [node for node, _ in thing.next_functions]
            stack += list(getattr(thing, "saved_tensors", ()))
            stack += [getattr(thing, name) for name in dir(thing) if name.startswith("_saved_")]
        elif isinstance(thing, list | tuple):
            stack += thing
    return sizes


def test_memory_falls_between_the_two_passes(monkeypatch):
    """On the SwiGLU block torch keeps 1.60 of the forward's bytes after its I pass; the bound here is 0.80."""
    hooks, plain = [], LinearHook.__init__

    def noting(self, *args):
        plain(self, *args)
        hooks.append(self)

    monkeypatch.setattr(LinearHook, "__init__", noting)
    block = SwiGlu()
    stage = TorchStage(block, 1)
    stage.configure(True)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    stage.forward(0, (torch.randn(2, 64, 64),), None, {}, True)
    inputs, edges, _ = stage._kept[0]
    keeps = [held_bytes(inputs, *[e.node for e in edges], *[h.x for h in hooks])]
    stage.backward(0, (torch.randn(2, 64, 64),), True)
    keeps.append(held_bytes(*[given for _, _, given in stage._queues[0].notes]))
    before, after = (sum(n for p, n in sizes.items() if p not in weights) for sizes in keeps)
    assert before > 20 * 2 * 64 * 64  # it did find the activations
    assert 0.2 < after / before <= 0.80
    assert all(h.x is None for h in hooks)
    stage.backward_weight(0)
    assert not stage._kept
    assert not stage._queues
