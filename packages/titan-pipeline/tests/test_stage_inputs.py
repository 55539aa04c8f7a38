"""What a stage may contain and be given: collectives of its own, recomputation, compiled blocks, keyword tensors and
auxiliary losses."""

import copy

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

import torch.distributed as dist  # noqa: E402
from titan_pipeline import Schedule, build_schedule  # noqa: E402
from titan_pipeline.runtime import Executor, GlooTransport, ThreadHub, TorchStage, split_backend  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

WIDTH = 8

# Everything runs in float64 and is compared with one process. Sums over ranks and microbatches come in another order:
# at most 4 x 16 terms below 100, each addition rounded by at most 2^-53 of the sum.
FLOAT64 = 64 * 100 * 2.0**-53


class Gather(torch.autograd.Function):
    """All-gather rows; reduce-scatter their gradients: the border into a tensor-parallel region."""

    @staticmethod
    def forward(ctx, x, group, log):
        ctx.group, ctx.log = group, log
        log.append("gather")
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("scatter")
        total = grad.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None, None


class Scatter(torch.autograd.Function):
    """Reduce-scatter rows; all-gather their gradients: the border out of it."""

    @staticmethod
    def forward(ctx, x, group, log):
        ctx.group, ctx.log = group, log
        log.append("scatter")
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("gather")
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None, None


class ParallelBlock(nn.Module):
    """A feed-forward block, its hidden features cut over a group and its rows outside of it."""

    def __init__(self, whole, group, log):
        super().__init__()
        rank, size = group.rank(), group.size()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH // size), nn.Linear(2 * WIDTH // size, WIDTH, bias=False)
        self.double()
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight.chunk(size)[rank])
            self.up.bias.copy_(whole.up.bias.chunk(size)[rank])
            self.down.weight.copy_(whole.down.weight.chunk(size, 1)[rank])
        self.group, self.log = group, log

    def forward(self, x):
        hidden = torch.tanh(self.up(Gather.apply(x, self.group, self.log)))
        return x + Scatter.apply(self.down(hidden), self.group, self.log)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def blocks(n):
    torch.manual_seed(3)
    return [Block().double() for _ in range(n)]


def data(m, rows=4):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(m)]


def square_sum(output, target):
    return ((output - target) ** 2).sum()


def _tensor_parallel(text):
    schedule = Schedule.from_text(text)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    transport = GlooTransport(mesh["pp"].get_group())
    group, log = mesh["tp"].get_group(), []
    modules = [ParallelBlock(b, group, log) for b in blocks(schedule.num_stages)]
    mine = data(schedule.num_microbatches)
    mine = [x.chunk(2)[group.rank()] for x in mine]
    stages = [TorchStage(modules[s], s, loss=square_sum) for s in schedule.stages_of(transport.rank)]
    executor = Executor(schedule, stages, transport)
    loss = executor.step(mine, mine).loss
    return loss, log, {s.index: [p.grad for p in s.module.parameters()] for s in stages}


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_zb", "zbv"])
def test_collectives_inside_a_stage_come_in_one_order_on_all_ranks_of_their_group(name):
    schedule = build_schedule(name, 2, 4)
    returned = testing.run_ranks(_tensor_parallel, 4, schedule.to_text())
    layers = blocks(schedule.num_stages)
    total = 0.0
    for x in data(4):
        loss = square_sum(nn.Sequential(*layers)(x), x)
        (loss / 4).backward()
        total += loss.item() / 4
    for pp in range(2):
        (loss0, log0, grads0), (loss1, log1, grads1) = returned[2 * pp : 2 * pp + 2]
        assert log0 == log1
        # four a microbatch and stage; the gradient of the model's own input is not needed
        assert len(log0) == 4 * (4 * len(grads0) - (0 in grads0))
        assert loss0 + loss1 == pytest.approx(total, rel=FLOAT64)
        for s, block in enumerate(layers):
            if s in grads0:
                for part, p in enumerate((block.up.weight, block.up.bias, block.down.weight)):
                    got = torch.cat([grads0[s][part], grads1[s][part]], dim=1 if part == 2 else 0)
                    torch.testing.assert_close(got, p.grad, rtol=0, atol=FLOAT64)


def _torch_tensor_parallel(text):
    schedule = Schedule.from_text(text)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    transport = GlooTransport(mesh["pp"].get_group())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    stages = []
    for s, block in enumerate(blocks(schedule.num_stages)):
        if s in schedule.stages_of(transport.rank):
            stages.append(TorchStage(parallelize_module(block, mesh["tp"], plan), s, loss=square_sum))
    executor = Executor(schedule, stages, transport)
    between = []
    for stage in stages:
        after = stage.backward

        def backward(*args, after=after, module=stage.module):
            out = after(*args)
            between.append([p.grad is None for p in module.parameters()])
            return out

        stage.backward = backward
    mine = data(schedule.num_microbatches)
    executor.step(mine, mine)
    grads = {s.index: [p.grad.full_tensor() for p in s.module.parameters()] for s in stages}
    return grads, between[0], {s.index: s.not_deferred for s in stages}


def test_tensor_parallel_weights_of_torch_are_deferred():
    returned = testing.run_ranks(_torch_tensor_parallel, 4, build_schedule("zb_h1", 2, 4).to_text())
    expected = plain(blocks(2), data(4), data(4))
    for grads, none_yet, not_deferred in returned:
        assert all(none_yet)
        assert not any(not_deferred.values())
        for s, got in grads.items():
            for g, e in zip(got, expected[s], strict=True):
                torch.testing.assert_close(g, e, rtol=0, atol=FLOAT64)


class Selective(nn.Module):
    """A block under selective recomputation: every second product is saved."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        self.runs = 0

    def forward(self, x):
        return checkpoint(self.counted, x, use_reentrant=False, context_fn=self.contexts)

    def counted(self, x):
        self.runs += 1
        return self.block(x)

    def contexts(self):
        count = {True: 0, False: 0}

        def policy(ctx, op, *args, **kwargs):
            if op not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                return CheckpointPolicy.PREFER_RECOMPUTE
            count[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if count[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


def train(schedule, modules, inputs, targets, extras=None, **options):
    """All ranks as threads; returns rank 0's result and every stage."""
    stages = [TorchStage(m, s, **{"loss": square_sum, **options}) for s, m in enumerate(modules)]

    def work(transport):
        mine = [stages[s] for s in schedule.stages_of(transport.rank)]
        return Executor(schedule, mine, transport).step(inputs, targets, extras=extras)

    return ThreadHub(schedule.num_ranks).run(work)[0], stages


def plain(modules, inputs, targets):
    copies = copy.deepcopy(modules)
    for x, t in zip(inputs, targets, strict=True):
        (square_sum(nn.Sequential(*copies)(x), t) / len(inputs)).backward()
    return [[p.grad for p in m.parameters()] for m in copies]


def test_selective_recomputation_survives_a_split_backward():
    """torch's own split backward raises here: "Trying to backward an extra time"."""
    inputs = data(4)
    layers = blocks(4)
    expected = plain(layers, inputs, inputs)
    wrapped = [Selective(b) for b in layers]
    train(build_schedule("zbv", 2, 4), wrapped, inputs, inputs)
    for layer, grads in zip(layers, expected, strict=True):
        for p, e in zip(layer.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, e, rtol=0, atol=FLOAT64)
    assert [w.runs for w in wrapped] == [4 * 2] * 4  # a microbatch: the forward, and one recomputation


@pytest.mark.parametrize("how", ["in place", "wrapper"])
def test_compiled_blocks_are_not_split_and_say_why(how):
    inputs = data(4)
    layers = blocks(2)
    expected = plain(layers, inputs, inputs)
    calls = []

    def backend(graph, example_inputs):
        calls.append(graph)
        return graph.forward

    torch._dynamo.reset()
    modules = []
    for layer in layers:
        head = nn.Linear(WIDTH, WIDTH).double()
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
        if how == "in place":
            layer.compile(backend=backend)
        modules.append(nn.Sequential(layer if how == "in place" else torch.compile(layer, backend=backend), head))
    schedule = build_schedule("zb_h1", 1, 4)
    stage = TorchStage(nn.Sequential(*modules), 0, loss=square_sum)
    Executor(schedule, [stage]).step(inputs, inputs)
    assert calls
    for layer, grads in zip(layers, expected, strict=True):
        for p, e in zip(layer.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, e, rtol=0, atol=FLOAT64)
    names = {n for n, _ in stage.module.named_parameters() if n.split(".")[1] != "1"}
    assert set(stage.not_deferred) == names
    assert all("split_backend" in why for why in stage.not_deferred.values())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_defer_with_the_split_backend(backend):
    inputs = data(4)
    layers = blocks(2)
    expected = plain(layers, inputs, inputs)
    torch._dynamo.reset()
    layers[1].compile(backend=split_backend(backend))
    modules = [torch.compile(layers[0], backend=split_backend(backend)), layers[1]]
    stage = TorchStage(nn.Sequential(*modules), 0, loss=square_sum)
    seen = []

    def between(*args, after=stage.backward):
        result = after(*args)
        seen.append([n for n, p in stage.module.named_parameters() if p.dim() > 1 and p.grad is not None])
        return result

    stage.backward = between
    Executor(build_schedule("gpipe", 1, 4), [stage]).step(inputs, inputs)  # as any compiled block, unsplit
    first = [[p.grad for p in layer.parameters()] for layer in layers]
    stage.module.zero_grad()
    seen.clear()
    executor = Executor(build_schedule("zb_h2", 1, 4), [stage])
    assert executor.deferred.shares == (1,)  # known before the first step
    executor.step(inputs, inputs)
    assert stage.not_deferred == {}
    assert stage.deferred_share == 1
    assert seen[0] == []
    for layer, grads, unsplit in zip(layers, expected, first, strict=True):
        for p, e, u in zip(layer.parameters(), grads, unsplit, strict=True):
            torch.testing.assert_close(p.grad, e, rtol=0, atol=FLOAT64)
            torch.testing.assert_close(u, e, rtol=0, atol=FLOAT64)


class Counting(torch.autograd.Function):
    """Identity, whose backward counts rows in a buffer, as routing does for its experts."""

    @staticmethod
    def forward(ctx, x, counts):
        ctx.counts = counts
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.counts.add_(grad.shape[0])
        return grad, None


class Counted(nn.Module):
    """A linear layer that counts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("counts", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return Counting.apply(self.linear(x), self.counts)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_a_compiled_backward_changes_is_changed_once(backend):
    inputs = data(4)
    layers = [Counted(), Counted()]
    expected = plain(layers, inputs, inputs)
    torch._dynamo.reset()
    for layer in layers:
        layer.compile(backend=split_backend(backend))
    stage = TorchStage(nn.Sequential(*layers), 0, loss=square_sum)
    Executor(build_schedule("zb_h2", 1, 4), [stage]).step(inputs, inputs)
    assert stage.not_deferred == {}
    assert [float(layer.counts) for layer in layers] == [sum(len(x) for x in inputs)] * 2
    for layer, grads in zip(layers, expected, strict=True):
        for p, e in zip(layer.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, e, rtol=0, atol=FLOAT64)


def test_a_backend_that_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="aot_eager"):
        split_backend("eager")


class Positioned(nn.Module):
    """Adds a positional term, and remembers a balance loss, as a mixture of experts does."""

    def __init__(self, block):
        super().__init__()
        self.block, self.table, self.gate = block, nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 3)
        self.balance = None

    def forward(self, x, positions):
        y = self.block(x + self.table(positions))
        self.balance = self.gate(y).softmax(-1).mean(0).square().sum()
        return y


def positioned(n):
    torch.manual_seed(5)
    return [Positioned(b).double() for b in blocks(n)]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv"])
def test_keyword_tensors_reach_every_stage_and_auxiliary_losses_join_the_backward(name):
    schedule = build_schedule(name, 2, 4)
    inputs = data(4)
    extras = [{"positions": (torch.arange(4) + k) % 6, "unused": torch.zeros(1)} for k in range(4)]
    copies = positioned(schedule.num_stages)
    total = balance = 0.0
    for x, extra in zip(inputs, extras, strict=True):
        y = x
        for m in copies:
            y = m(y, extra["positions"])
        loss, extra_loss = square_sum(y, x) / 4, sum(0.1 * m.balance for m in copies) / 4
        (loss + extra_loss).backward()
        total, balance = total + loss.item(), balance + extra_loss.item()
    modules = positioned(schedule.num_stages)
    result, _ = train(
        schedule, modules, inputs, inputs, extras, keywords=("positions",), aux_loss=lambda m: 0.1 * m.balance
    )
    assert result.loss == pytest.approx(total, rel=FLOAT64)
    assert result.aux_loss == pytest.approx(balance, rel=FLOAT64)
    for m, c in zip(modules, copies, strict=True):
        for (n, p), e in zip(m.named_parameters(), c.parameters(), strict=True):
            torch.testing.assert_close(p.grad, e.grad, rtol=0, atol=FLOAT64, msg=lambda t, n=n: f"{n}: {t}")


def test_a_module_in_a_second_stage_counts_its_auxiliary_loss_once():
    inputs = data(2)
    module = positioned(1)[0]
    extras = [{"positions": torch.arange(4)}] * 2
    seen = []
    for _ in range(2):
        result, _ = train(build_schedule("gpipe", 1, 2), [module], inputs, inputs, extras, aux_loss=lambda m: m.balance)
        seen.append((result.aux_loss, [p.grad for p in module.parameters()]))
        module.zero_grad()
    (first, expected), (second, grads) = seen
    assert first == second > 0
    for grad, e in zip(grads, expected, strict=True):
        assert torch.equal(grad, e)


class Several(nn.Module):
    """Returns whole numbers first, then a tensor that nobody uses, then what the next one takes."""

    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, unused=None, hidden=None):
        hidden = self.inner(x.float() if hidden is None else hidden)
        self.balance = self.gate(hidden).square().mean()
        return x, hidden.exp(), hidden


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_an_auxiliary_loss_trains_whichever_output_gets_a_gradient(name):
    torch.manual_seed(0)
    modules, inputs = [Several(), Several()], [torch.arange(6).view(2, 3)] * 4

    def loss(output, target):
        return output[2].square().sum()

    copies = copy.deepcopy(modules)
    for x in inputs:
        middle = copies[0](x)
        end = copies[1](*middle)
        ((loss(end, x) + copies[0].balance + copies[1].balance) / 4).backward()
    train(build_schedule(name, 2, 4), modules, inputs, inputs, None, loss=loss, aux_loss=lambda m: m.balance)
    for module, expected in zip(modules, copies, strict=True):
        for p, e in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.grad, e.grad)


def _sharded_aux(text, gather):
    schedule = Schedule.from_text(text)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    transport = GlooTransport(mesh["pp"].get_group())
    modules = positioned(schedule.num_stages)
    inputs = data(4)
    stages = []
    for s in schedule.stages_of(transport.rank):
        fully_shard(modules[s].block, mesh=mesh["dp"])
        module = fully_shard(modules[s], mesh=mesh["dp"])
        stages.append(TorchStage(module, s, loss=square_sum, aux_loss=lambda m: 0.1 * m.balance, gather=gather))
    executor = Executor(schedule, stages, transport)
    extras = [{"positions": (torch.arange(4) + k) % 6} for k in range(4)]
    executor.step(inputs, inputs, extras=extras)
    return {s.index: [p.grad.full_tensor() for p in s.module.parameters()] for s in stages}


@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_auxiliary_losses_of_sharded_stages_match_those_of_one_process(gather):
    schedule = build_schedule("zb_h1", 2, 4)
    modules = positioned(2)
    extras = [{"positions": (torch.arange(4) + k) % 6} for k in range(4)]
    train(schedule, modules, data(4), data(4), extras, aux_loss=lambda m: 0.1 * m.balance)
    for grads in testing.run_ranks(_sharded_aux, 4, schedule.to_text(), gather):
        for s, got in grads.items():
            for p, g in zip(modules[s].parameters(), got, strict=True):
                torch.testing.assert_close(g, p.grad, rtol=0, atol=FLOAT64)


def test_wrong_extras_and_auxiliary_losses_are_refused_with_what_to_do():
    inputs = data(2)
    executor = Executor(build_schedule("gpipe", 1, 2), [TorchStage(positioned(1)[0], 0, loss=square_sum)])
    with pytest.raises(ValueError, match="1 extras"):
        executor.step(inputs, inputs, extras=[{}])
    stage = TorchStage(positioned(1)[0], 0, loss=square_sum, keywords=("positions",))
    executor = Executor(build_schedule("gpipe", 1, 2), [stage])
    with pytest.raises(ValueError, match=r"extra inputs \['positions'\]"):
        executor.step(inputs, inputs)
    stage = TorchStage(blocks(1)[0], 0, loss=square_sum, aux_loss=lambda m: torch.zeros(2))
    with pytest.raises(ValueError, match="differentiable scalar"):
        Executor(build_schedule("gpipe", 1, 2), [stage]).step(inputs, inputs)
