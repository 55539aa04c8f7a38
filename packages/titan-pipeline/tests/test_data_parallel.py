"""Stages wrapped by FSDP2 or DistributedDataParallel: one reduction a step, and the gradients of one process."""

import copy
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

from titan_pipeline import Schedule, build_schedule  # noqa: E402
from titan_pipeline.runtime import (  # noqa: E402
    Executor,
    GlooTransport,
    PipelineAborted,
    TiedWeight,
    TorchStage,
    clip_grad_norm,
)
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

WIDTH, VOCABULARY, MICROBATCHES = 8, 12, 4

# The reference is one process in float64, and so are the stages, unless they compute in bfloat16.
# Replicas and microbatches are summed in another order: fewer than 100 terms of order one, each addition rounded by at
# most 2^-53 = 1.1e-16, through three optimizer steps.
FLOAT64 = 1e-12
# Parameters, activations and gradients each keep 8 bits (2^-9 relative); the longest path through the model and back has
# 24 of them (6 products of 2 factors, both ways). Entries near zero are judged by a twentieth of that.
BF16 = 24 * 2.0**-9


class Block(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.recompute = recompute

    def forward(self, x):
        if self.recompute and torch.is_grad_enabled():
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def build_layers(num_stages, recompute=False, dtype=torch.float64):
    torch.manual_seed(1)
    layers = [[Block(recompute), Block(recompute)] for _ in range(num_stages)]
    layers[0].insert(0, nn.Embedding(VOCABULARY, WIDTH))
    layers[-1].append(nn.Linear(WIDTH, VOCABULARY, bias=False))
    return [nn.Sequential(*stage).to(dtype) for stage in layers]


def loss_sum(output, target):
    logits = (output.float() if output.dtype is torch.bfloat16 else output).flatten(0, 1)
    return nn.functional.cross_entropy(logits, target.flatten(), reduction="sum")


def batch(replica):
    """Ragged microbatches, each replica its own, the same number of tokens for both."""
    generator = torch.Generator().manual_seed(10 + replica)
    sizes = [(2, 2 + k) for k in range(MICROBATCHES)]
    make = [[torch.randint(VOCABULARY, size, generator=generator) for size in sizes] for _ in range(2)]
    return make[0], make[1]


def reference(num_stages):
    """Mean over the replicas of the gradients of one process, by stage and name; and the mean loss."""
    layers = build_layers(num_stages)
    model = nn.Sequential(*layers)
    total = 0.0
    for replica in range(2):
        inputs, targets = batch(replica)
        tokens = 2 * sum(t.numel() for t in targets)
        for x, t in zip(inputs, targets, strict=True):
            loss = loss_sum(model(x), t)
            (loss / tokens).backward()
            total += loss.item() / tokens
    return total, [{n: p.grad for n, p in stage.named_parameters()} for stage in layers]


class CollectiveCounter(TorchDispatchMode):
    """Counts c10d operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def wrap(stage, how, mesh):
    if how == "ddp":
        return DistributedDataParallel(stage, process_group=mesh["dp"].get_group())
    if how == "ddp-unused":
        stage.register_parameter("spare", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
        return DistributedDataParallel(stage, process_group=mesh["dp"].get_group(), find_unused_parameters=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how == "fsdp-bf16" else MixedPrecisionPolicy()
    for layer in stage:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    return fully_shard(stage, mesh=mesh["dp"], mp_policy=policy)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def grads_of(stage):
    return {n.removeprefix("module."): whole(p.grad) for n, p in stage.module.named_parameters()}


def build(text, how, gather="step", recompute=False, **options):
    """Stages of this rank and their executor, on a mesh of pipelines x replicas."""
    schedule = Schedule.from_text(text)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    transport = GlooTransport(mesh["pp"].get_group())
    dtype = torch.float32 if how == "fsdp-bf16" else torch.float64
    layers = build_layers(schedule.num_stages, recompute, dtype)
    last = schedule.num_stages - 1
    stages = [
        TorchStage(wrap(layers[s], how, mesh), s, loss=loss_sum if s == last else None, gather=gather)
        for s in schedule.stages_of(transport.rank)
    ]
    executor = Executor(schedule, stages, transport, count_tokens=lambda t: t.numel(), **options)
    return executor, stages, mesh["dp"].get_local_rank()


def _train(text, how, gather, recompute):
    executor, stages, replica = build(text, how, gather, recompute)
    inputs, targets = batch(replica)
    results = []
    for _ in range(2):  # the second shows that nothing of the first is left
        for stage in stages:
            stage.module.zero_grad()
        with CollectiveCounter() as counter:
            loss = executor.step(inputs, targets).loss
        evaluated = executor.evaluate(inputs, targets).loss
        results.append((loss, evaluated, dict(counter.counts), {s.index: grads_of(s) for s in stages}))
    norm = clip_grad_norm(executor, float("inf"))
    return results, norm, {s.index: s.not_deferred for s in stages}


def check(results, expected_loss, expected, rtol, atol):
    for replica in range(2):
        losses = [r[replica] for r in ([rank[0][0] for rank in results[pp * 2 :][:2]] for pp in range(2))]
        assert losses[0] == losses[1]
    assert (results[0][0][0] + results[1][0][0]) / 2 == pytest.approx(expected_loss, rel=rtol)
    for steps in results:
        for loss, evaluated, _, grads in steps:
            assert evaluated == pytest.approx(loss, rel=rtol)
            for stage, by_name in grads.items():
                assert set(by_name) == set(expected[stage])
                for name, grad in by_name.items():
                    torch.testing.assert_close(grad.double(), expected[stage][name], rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("name", "how", "gather", "recompute"),
    [
        ("1f1b", "fsdp", "step", False),
        ("zb_h1", "fsdp", "step", True),
        ("zbv", "fsdp", "microbatch", False),
        ("zbv", "fsdp", "microbatch", True),
        ("zb_h1", "fsdp-bf16", "step", False),
        ("1f1b", "fsdp-bf16", "microbatch", False),
        ("1f1b", "ddp", "step", False),
        ("zbv", "ddp", "step", True),
    ],
)
def test_wrapped_stages_reduce_once_a_step_and_match_one_process(name, how, gather, recompute):
    schedule = build_schedule(name, 2, MICROBATCHES)
    returned = testing.run_ranks(_train, 4, schedule.to_text(), how, gather, recompute)
    loss, expected = reference(schedule.num_stages)
    rtol, atol = (BF16, BF16 / 20) if how == "fsdp-bf16" else (FLOAT64, FLOAT64)
    check([r[0] for r in returned], loss, expected, rtol, atol)
    norm = sum(float(g.double().square().sum()) for stage in expected for g in stage.values()) ** 0.5
    chunks = schedule.num_chunks
    for steps, got_norm, not_deferred in returned:
        assert got_norm == pytest.approx(norm, rel=rtol)
        counts = steps[1][2]
        if how == "ddp":
            assert counts["allreduce_"] == chunks  # one bucket a stage
        else:
            groups = 3 * chunks if chunks == 2 else 3  # two blocks and the rest of the stage
            groups -= sum(s not in (0, schedule.num_stages - 1) for s in not_deferred)  # middle stages have no rest
            assert counts["_reduce_scatter_base_"] == groups
            gathers = counts["_allgather_base_"]
            if gather == "step":
                assert gathers == groups
            else:
                assert gathers > 2 * groups
        if schedule.splits_backward:
            assert all(
                reason == "no rule for LayerNorm" for stage in not_deferred.values() for reason in stage.values()
            )


def _train_tied(text, how):
    schedule = Schedule.from_text(text)
    last = schedule.num_stages - 1
    prefix = "module." if how == "ddp" else ""
    tied = [TiedWeight({0: f"{prefix}0.weight", last: f"{prefix}2.weight"})]
    executor, stages, replica = build(text, how, tied=tied)
    executor.step(*batch(replica))
    return {s.index: grads_of(s) for s in stages}


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_tied_weights_of_wrapped_stages_get_the_sum_of_their_gradients(how):
    schedule = build_schedule("zb_h1", 2, MICROBATCHES)
    _, expected = reference(2)
    total = expected[0]["0.weight"] + expected[1]["2.weight"]
    for grads in testing.run_ranks(_train_tied, 4, schedule.to_text(), how):
        for stage, by_name in grads.items():
            torch.testing.assert_close(by_name["0.weight" if stage == 0 else "2.weight"], total, rtol=0, atol=FLOAT64)


def _train_unused(text):
    executor, stages, replica = build(text, "ddp-unused")
    for _ in range(2):  # the second shows that nothing of the first is left
        for stage in stages:
            stage.module.zero_grad()
        executor.step(*batch(replica))
    return {s.index: grads_of(s) for s in stages}


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_ddp_that_finds_unused_parameters_reduces_the_others(name):
    _, expected = reference(2)
    for grads in testing.run_ranks(_train_unused, 4, build_schedule(name, 2, MICROBATCHES).to_text()):
        for stage, by_name in grads.items():
            assert by_name.pop("spare") is None
            for parameter, grad in by_name.items():
                torch.testing.assert_close(grad, expected[stage][parameter], rtol=0, atol=FLOAT64)


class Breaking(nn.Module):
    """Raises in one forward."""

    def __init__(self):
        super().__init__()
        self.countdown = -1

    def forward(self, x):
        self.countdown -= 1
        if self.countdown == 0:
            raise ArithmeticError("the layer broke")
        return x


def _fail_and_recover(text, how, gather):
    executor, stages, replica = build(text, how, gather)
    breaking = Breaking()
    stages[0].module.register_forward_hook(lambda m, args, out: breaking(out))
    if executor.rank == 1:
        breaking.countdown = 3
    inputs, targets = batch(replica)
    try:
        executor.step(inputs, targets)
        said = "nothing"
    except (PipelineAborted, ArithmeticError) as err:
        said = str(err)
    executor.reset()
    for stage in stages:
        stage.module.zero_grad()
    loss = executor.step(inputs, targets).loss
    return said, [(loss, loss, {}, {s.index: grads_of(s) for s in stages})]


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_a_step_after_a_failed_one_is_right_if_replicas_fail_alike(how):
    """Both replicas break in one microbatch, after the step's only all-gathers. With ``gather="microbatch"`` the other
    ranks of the two pipelines may stop at different ones, and their collectives no longer match: see the limits."""
    schedule = build_schedule("zb_h1", 2, MICROBATCHES)
    returned = testing.run_ranks(_fail_and_recover, 4, schedule.to_text(), how, "step")
    assert all("the layer broke" in said for said, _ in returned)
    loss, expected = reference(2)
    check([steps for _, steps in returned], loss, expected, FLOAT64, FLOAT64)


def _sgd(text, how):
    executor, stages, replica = build(text, how)
    optimizer = torch.optim.SGD([p for s in stages for p in s.module.parameters()], lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        executor.evaluate(*batch(replica))  # gathers, and must let go before the step
        losses.append(executor.step(*batch(replica)).loss)
        optimizer.step()
    return losses


def test_training_sees_the_updated_parameters():
    schedule = build_schedule("zbv", 2, MICROBATCHES)
    runs = {how: testing.run_ranks(_sgd, 4, schedule.to_text(), how) for how in ("fsdp", "ddp")}
    model = nn.Sequential(*build_layers(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = []
        for replica in range(2):
            inputs, targets = batch(replica)
            tokens = sum(t.numel() for t in targets)
            parts = [loss_sum(model(x), t) / tokens for x, t in zip(inputs, targets, strict=True)]
            (sum(parts) / 2).backward()
            losses.append(sum(p.item() for p in parts))
        optimizer.step()
        expected.append(losses)
    for run in runs.values():
        for k, losses in enumerate(expected):
            assert [rank[k] for rank in run] == pytest.approx(losses * 2, rel=FLOAT64)


class Counts(nn.Linear):
    """A layer with a buffer that each rank has its own values for."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.full((2,), float(torch.distributed.get_rank())))


def _buffers(text):
    schedule = Schedule.from_text(text)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    stage = TorchStage(wrap(Counts(), "ddp", mesh), 0, loss=lambda o, t: o.sum())
    executor = Executor(schedule, [stage], GlooTransport(mesh["pp"].get_group()))
    x = [torch.zeros(1, WIDTH, dtype=torch.float64)] * 2
    found = []
    for _ in range(2):
        executor.step(x, x)
        found.append(stage.module.module.seen.tolist())
        stage.module.module.seen.add_(1 + torch.distributed.get_rank())
    return found


def test_ddp_gives_every_step_the_buffers_of_the_first_replica():
    first, second = testing.run_ranks(_buffers, 2, build_schedule("gpipe", 1, 2).to_text())
    assert first == second == [[0, 0], [1, 1]]


def _alone(text):
    """Between steps and evaluations the stage's module runs by itself, with other weights."""
    executor, stages, replica = build(text, "fsdp")
    losses = []
    for run in (executor.step, executor.step, executor.evaluate):
        losses.append(run(*batch(replica)).loss)
        for stage in stages:
            hidden = torch.zeros(1, 1, WIDTH, dtype=torch.float64)
            shards = list(stage.module.parameters())
            with torch.no_grad():
                torch._foreach_mul_(shards, 2)
                stage.module(hidden if stage.index else torch.zeros(1, 1, dtype=torch.long))
                torch._foreach_div_(shards, 2)
    return losses


def test_weights_that_a_forward_outside_of_the_stage_gathered_are_not_used():
    for losses in testing.run_ranks(_alone, 4, build_schedule("1f1b", 2, MICROBATCHES).to_text()):
        assert losses == pytest.approx([losses[0]] * 3, rel=FLOAT64)


def test_ddp_inside_a_stage_is_refused():
    layer = copy.copy(nn.Linear(2, 2))
    layer.__class__ = type("Wrapped", (DistributedDataParallel,), {"__init__": lambda self: None})
    with pytest.raises(ValueError, match="Wrap the whole stage"):
        TorchStage(nn.Sequential(layer), 0)


def test_an_unknown_gather_is_refused():
    with pytest.raises(ValueError, match="'step' or 'microbatch'"):
        TorchStage(nn.Linear(2, 2), 0, gather="never")
