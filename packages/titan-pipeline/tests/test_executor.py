"""Every schedule trains and evaluates exactly as one process does, whatever its microbatches look like.

Bits are compared where both sides call the same kernels on the same shapes: a microbatch has one shape in the pipeline
and in one process, each gradient is summed in the order of the microbatches, and both sides run with one thread (the
sizes here are below what a kernel splits over several).
"""

import contextlib
import copy
import functools
import time

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

from titan_pipeline import FAMILIES, Kind, Schedule, build_schedule  # noqa: E402
from titan_pipeline.runtime import (  # noqa: E402
    Executor,
    GlooTransport,
    PipelineAborted,
    ThreadHub,
    TorchStage,
    host_transport,
)
from titan_pipeline.runtime.program import compile_program  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

WIDTH, VOCABULARY = 8, 11


@pytest.fixture(autouse=True)
def one_thread():
    """One thread in the reference and in every rank: a kernel may sum in another order on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))  # a weight that no rule covers

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def build_layers(num_stages):
    torch.manual_seed(1)
    layers = [nn.Sequential(Block()) for _ in range(num_stages)]
    layers[0] = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers[0])
    layers[-1] = nn.Sequential(*layers[-1], nn.Linear(WIDTH, VOCABULARY, bias=False))
    return layers


def loss_sum(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def batch(m, shape):
    """Token microbatches: equal, with an uneven number of rows, or ragged in length."""
    generator = torch.Generator().manual_seed(2)
    sizes = {
        "even": [(2, 3)] * m,
        "uneven": [(1 + (k * 7) % 3, 3) for k in range(m)],
        "ragged": [(2, 2 + k % 4) for k in range(m)],
    }[shape]
    inputs = [torch.randint(VOCABULARY, size, generator=generator) for size in sizes]
    return inputs, [torch.randint(VOCABULARY, size, generator=generator) for size in sizes]


def reference(layers, inputs, targets, dtype=torch.float32):
    """One process, plain autograd, microbatch after microbatch."""
    model = nn.Sequential(*copy.deepcopy(layers)).to(dtype)
    denominator = float(sum(t.numel() for t in targets))
    total = 0.0
    for x, t in zip(inputs, targets, strict=True):
        loss = loss_sum(model(x), t)
        loss.backward(torch.tensor(1.0 / denominator, dtype=dtype))
        total += loss.item()
    return total / denominator, [[p.grad for p in stage.parameters()] for stage in model]


def train_on(transport, schedule, layers, inputs, targets, steps=1):
    """One rank: run steps, then an evaluation; returns losses and gradients by stage."""
    last = schedule.num_stages - 1
    stages = [
        TorchStage(layers[s], s, loss=loss_sum if s == last else None) for s in schedule.stages_of(transport.rank)
    ]
    executor = Executor(schedule, stages, transport, count_tokens=lambda t: t.numel(), deterministic=True)
    mine = inputs if schedule.placement[0] == transport.rank else None
    theirs = targets if schedule.placement[-1] == transport.rank else None
    result = None
    for _ in range(steps):
        for stage in stages:
            stage.module.zero_grad()
        result = executor.step(mine, theirs)
    evaluated = executor.evaluate(mine, theirs)
    outputs = executor.infer(mine)
    grads = {stage.index: [p.grad for p in stage.module.parameters()] for stage in stages}
    return result.loss, evaluated.loss, grads, outputs


class _Reads(TorchDispatchMode):
    """Counts how often the host waits for a value."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved_zb"])
def test_a_divisor_on_the_device_gives_the_same_bits_and_is_not_read_before_the_step_has_run(name):
    schedule = build_schedule(name, 2, 4)
    inputs, targets = batch(4, "ragged")
    labels = sum(t.numel() for t in targets)
    reads, made = [], build_layers(schedule.num_stages)

    def rank(transport, denominator):
        layers = copy.deepcopy(made)
        last = schedule.num_stages - 1
        stages = [
            TorchStage(layers[s], s, loss=loss_sum if s == last else None) for s in schedule.stages_of(transport.rank)
        ]
        executor = Executor(schedule, stages, transport, deterministic=True)
        mode = _Reads()

        @contextlib.contextmanager
        def around(action):
            before = mode.count
            yield
            if action is not None:
                reads.append(mode.count - before)

        executor.around = around
        mine = inputs if schedule.placement[0] == transport.rank else None
        theirs = targets if schedule.placement[-1] == transport.rank else None
        with mode:
            result = executor.step(mine, theirs, denominator=denominator)
        return result.loss, {s.index: [p.grad for p in s.module.parameters()] for s in stages}

    found = [
        ThreadHub(2).run(functools.partial(rank, denominator=given)) for given in (float(labels), torch.tensor(labels))
    ]
    assert reads
    assert not any(reads)
    for (loss, grads), (other, others) in zip(*found, strict=True):
        assert loss == other
        for index, tensors in grads.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, others[index], strict=True))


def cases(ranks):
    for name, family in FAMILIES.items():
        chunks = (None,) if family.chunks[1] is not None else (1, 2, 4)
        for v in chunks:
            for m in (ranks - 1, ranks, 2 * ranks + 3, 2 * ranks):
                try:
                    yield name, build_schedule(name, ranks, m, num_chunks=v)
                except ValueError:
                    continue  # m that the family refuses


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [(2, "even"), (2, "uneven"), (2, "ragged"), (4, "ragged")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((4, "even"), (4, "uneven"), (8, "even"), (8, "uneven"), (8, "ragged"))
    ],
)
def test_gradients_and_evaluation_are_bit_equal_to_one_process_for_every_family(ranks, shape):
    count = 0
    for name, schedule in cases(ranks):
        layers = build_layers(schedule.num_stages)
        inputs, targets = batch(schedule.num_microbatches, shape)
        loss, grads = reference(layers, inputs, targets)
        copies = copy.deepcopy(layers)
        ranks_out = ThreadHub(ranks).run(lambda t, s=schedule, c=copies, i=inputs, y=targets: train_on(t, s, c, i, y))
        case = f"{name} m={schedule.num_microbatches} v={schedule.num_chunks}"
        whole = nn.Sequential(*layers)
        for got_loss, evaluated, by_stage, outputs in ranks_out:
            assert got_loss == evaluated == pytest.approx(loss, rel=1e-12), case
            for stage, got in by_stage.items():
                for g, expected in zip(got, grads[stage], strict=True):
                    assert torch.equal(g, expected), f"{case} stage {stage}"
            for x, out in zip(inputs, outputs, strict=False):
                assert torch.equal(out, whole(x)), case
        count += 1
    assert count >= 20


def _gloo_rank(texts, shape, make):
    torch.set_num_threads(1)
    transport = make()
    results = []
    for text in texts:
        schedule = Schedule.from_text(text)
        inputs, targets = batch(schedule.num_microbatches, shape)
        results.append(train_on(transport, schedule, build_layers(schedule.num_stages), inputs, targets, steps=2))
    return results


@pytest.mark.parametrize(
    ("ranks", "shape", "make"),
    [(2, "ragged", GlooTransport), (4, "uneven", host_transport)]
    + [pytest.param(8, shape, GlooTransport, marks=pytest.mark.slow) for shape in ("even", "uneven", "ragged")],
)
def test_processes_reproduce_one_process_for_every_family(ranks, shape, make):
    schedules = [build_schedule(name, ranks, 2 * ranks) for name in FAMILIES]
    by_rank = testing.run_ranks(_gloo_rank, ranks, [s.to_text() for s in schedules], shape, make)
    for k, schedule in enumerate(schedules):
        layers = build_layers(schedule.num_stages)
        inputs, targets = batch(schedule.num_microbatches, shape)
        loss, grads = reference(layers, inputs, targets)
        for rank in range(ranks):
            got_loss, evaluated, by_stage, _ = by_rank[rank][k]
            assert got_loss == evaluated == pytest.approx(loss, rel=1e-12)
            for stage, got in by_stage.items():
                for g, expected in zip(got, grads[stage], strict=True):
                    assert torch.equal(g, expected), f"{schedule.name} stage {stage}"


class Failing(TorchStage):
    """A stage that raises in one action, once."""

    fail_at = None

    def forward(self, microbatch, *args):
        self._trip("F", microbatch)
        return super().forward(microbatch, *args)

    def backward(self, microbatch, grads, defer):
        self._trip("B", microbatch)
        return super().backward(microbatch, grads, defer)

    def _trip(self, kind, microbatch):
        if self.fail_at == (kind, microbatch):
            self.fail_at = None
            raise ArithmeticError("the stage broke")


def fail_and_recover(transport, schedule, layers, inputs, targets, culprit, at):
    last = schedule.num_stages - 1
    stages = [Failing(layers[s], s, loss=loss_sum if s == last else None) for s in schedule.stages_of(transport.rank)]
    if transport.rank == culprit:
        stages[0].fail_at = at
    executor = Executor(schedule, stages, transport, count_tokens=lambda t: t.numel())
    mine = inputs if schedule.placement[0] == transport.rank else None
    theirs = targets if schedule.placement[-1] == transport.rank else None
    began = time.monotonic()
    try:
        executor.step(mine, theirs)
        said = "nothing"
    except PipelineAborted as err:
        said = str(err)
    except ArithmeticError as err:
        said = f"own: {err}"
    took = time.monotonic() - began
    with pytest.raises(RuntimeError, match="reset"):
        executor.step(mine, theirs)
    executor.reset()
    for stage in stages:
        stage.module.zero_grad()
    loss = executor.step(mine, theirs).loss
    return said, took, loss, {s.index: [p.grad for p in s.module.parameters()] for s in stages}


def check_failure(results, culprit, loss, grads):
    for rank, (said, took, got_loss, by_stage) in enumerate(results):
        assert took < 2
        if rank == culprit:
            assert said == "own: the stage broke"
        else:
            assert f"rank {culprit} failed at action" in said
            assert "ArithmeticError: the stage broke" in said
        assert got_loss == pytest.approx(loss, rel=1e-12)
        for stage, got in by_stage.items():
            for g, expected in zip(got, grads[stage], strict=True):
                assert torch.equal(g, expected)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved_zb", "v_half"])
@pytest.mark.parametrize(("culprit", "at"), [(0, ("F", 3)), (1, ("B", 0)), (3, ("F", 0)), (2, ("B", 7))])
def test_a_failing_rank_is_named_everywhere_and_the_next_step_works(name, culprit, at):
    schedule = build_schedule(name, 4, 8)
    layers = build_layers(schedule.num_stages)
    inputs, targets = batch(8, "ragged")
    loss, grads = reference(layers, inputs, targets)
    copies = copy.deepcopy(layers)
    results = ThreadHub(4).run(lambda t: fail_and_recover(t, schedule, copies, inputs, targets, culprit, at))
    check_failure(results, culprit, loss, grads)


def _failing_process(text, make, culprit, at):
    torch.set_num_threads(1)
    schedule = Schedule.from_text(text)
    inputs, targets = batch(8, "ragged")
    layers = build_layers(schedule.num_stages)
    return fail_and_recover(make(), schedule, layers, inputs, targets, culprit, at)


@pytest.mark.parametrize(
    ("make", "name", "culprit", "at"),
    [
        (GlooTransport, "zb_h1", 2, ("B", 3)),
        (host_transport, "zbv", 0, ("F", 5)),
        (host_transport, "1f1b", 3, ("F", 0)),
    ],
)
def test_a_failing_process_is_named_everywhere_and_the_next_step_works(make, name, culprit, at):
    schedule = build_schedule(name, 4, 8)
    layers = build_layers(schedule.num_stages)
    loss, grads = reference(layers, *batch(8, "ragged"))
    results = testing.run_ranks(_failing_process, 4, schedule.to_text(), make, culprit, at, timeout_s=30)
    check_failure(results, culprit, loss, grads)


def test_wrong_batches_and_stages_are_refused_with_what_to_do():
    schedule = build_schedule("1f1b", 2, 4)
    layers = build_layers(2)
    stage = TorchStage(layers[0], 0, loss=loss_sum)
    with pytest.raises(ValueError, match=r"puts \[0\] on it"):
        ThreadHub(2).run(lambda transport: Executor(schedule, [TorchStage(layers[1], 1)], transport))
    with pytest.raises(ValueError, match="transport has 1"):
        Executor(schedule, [stage])
    one = build_schedule("gpipe", 1, 4)
    executor = Executor(one, [TorchStage(nn.Sequential(*layers), 0, loss=loss_sum)])
    inputs, targets = batch(3, "even")
    with pytest.raises(ValueError, match="got 3 inputs"):
        executor.step(inputs, targets)
    executor.reset()
    with pytest.raises(ValueError, match="needs 4 targets"):
        executor.step(batch(4, "even")[0], targets)


def test_an_evaluation_needs_targets_and_a_loss_one_number():
    inputs, targets = batch(4, "even")

    def executor(loss=loss_sum):
        return Executor(build_schedule("gpipe", 1, 4), [TorchStage(nn.Sequential(*build_layers(2)), 0, loss=loss)])

    with pytest.raises(ValueError, match="needs 4 targets, got none"):
        executor().evaluate(inputs)
    for run in ("step", "evaluate"):
        with pytest.raises(ValueError, match=r"targets of microbatches \[1, 3\] are None.*Give"):
            getattr(executor(), run)(inputs, [targets[0], None, targets[2], None])
        with pytest.raises(ValueError, match=r"loss of stage 0 has shape \[1\].*scalar"):
            getattr(executor(lambda output, target: loss_sum(output, target)[None]), run)(inputs, targets)
    assert len(executor().infer(inputs)) == 4


def test_a_stage_that_begins_in_place_is_refused_with_what_to_do():
    inputs, targets = batch(2, "even")
    modules = [build_layers(1)[0], nn.Sequential(nn.ReLU(inplace=True), *build_layers(1))]
    stages = [TorchStage(m, s, loss=loss_sum) for s, m in enumerate(modules)]
    with pytest.raises(ValueError, match=r"stage 1 changes its input or a parameter in place.*inplace=False"):
        Executor(build_schedule("looped_bfs", 1, 2), stages).step(inputs, targets)


@pytest.mark.parametrize("order", ["0B1 0B0", "0I1 0I0 0W0 0W1", "0I0 0I1 0W1 0W0", "0I0 0B1 0W0"])
def test_deterministic_refuses_an_order_that_one_process_would_not_have(order):
    text = build_schedule("gpipe", 1, 2).to_text().replace("0B0 0B1", order)
    with pytest.raises(ValueError, match="deterministic=True"):
        Executor(Schedule.from_text(text), [TorchStage(nn.Linear(1, 1), 0)], deterministic=True)


def test_finish_runs_once_a_step_after_the_last_gradient():
    seen = []
    layers = build_layers(1)
    stage = TorchStage(
        layers[0], 0, loss=loss_sum, finish=lambda m: seen.append([p.grad.clone() for p in m.parameters()])
    )
    inputs, targets = batch(3, "even")
    Executor(build_schedule("zb_h1", 1, 3), [stage], count_tokens=lambda t: t.numel()).step(inputs, targets)
    assert len(seen) == 1
    for grad, parameter in zip(seen[0], layers[0].parameters(), strict=True):
        assert torch.equal(grad, parameter.grad)


@pytest.mark.parametrize(("name", "last"), [("gpipe", Kind.B), ("1f1b", Kind.B), ("zb_h1", Kind.W)])
def test_a_stage_sends_its_last_gradient_before_it_is_reduced(name, last):
    program = compile_program(build_schedule(name, 2, 3), 1)
    kinds = [kind for kind, _, _ in program.actions]
    assert kinds[-2:] == [Kind.SEND_B if last is Kind.B else last, None]
    assert program.where(len(kinds) - 1)[1] == f"the reduction after 1{last.value}2"
    assert compile_program(build_schedule(name, 2, 3).for_evaluation(), 0).actions[-2:] == [
        (Kind.SEND_F, 0, 2),
        (None, 0, 2),
    ]


def test_a_trace_holds_every_action_of_the_rank_in_order():
    schedule = build_schedule("zb_h1", 1, 3)
    stage = TorchStage(build_layers(1)[0], 0, loss=loss_sum)
    executor = Executor(schedule, [stage], count_tokens=lambda t: t.numel(), trace=True)
    executor.step(*batch(3, "even"))
    assert [span.action for span in executor.spans] == list(schedule.ranks[0])
    times = [t for span in executor.spans for t in (span.start, span.end)]
    assert times == sorted(times)
    assert times[0] >= 0
