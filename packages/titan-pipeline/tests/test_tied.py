"""Tied weights get the gradient of one process, wherever their copies are: on several ranks, or twice on one."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")

from titan_pipeline import FAMILIES, build_schedule  # noqa: E402
from titan_pipeline.runtime import (  # noqa: E402
    Executor,
    PipelineAborted,
    ThreadHub,
    TiedWeight,
    TorchStage,
    clip_grad_norm,
    find_tied_weights,
    split_layers,
)
from titan_pipeline.runtime.stage.tied import tied_parameter  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402

WIDTH, VOCABULARY = 8, 11
V_SCHEDULES = [name for name, family in FAMILIES.items() if family.chunks == (2, 2)]

# Everything runs in float64. The pipeline adds the gradients of a tied weight in another order than one process: 2 x 8
# terms of at most 50 here, each addition rounded by at most 2^-53 of the sum.
ORDER_OF_SUMMATION = 16 * 50 * 2.0**-53


class TiedHead(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class Mixing(nn.Module):
    """A layer in the middle of the model that uses the embedding too."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.inner = weight, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.inner(x) + self.weight.mean(0))


def loss_sum(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def batch(m):
    generator = torch.Generator().manual_seed(2)
    return [[torch.randint(VOCABULARY, (2, 3), generator=generator) for _ in range(m)] for _ in range(2)]


def build_model(num_stages, shared):
    """Stages of a model whose embedding is also used by the stages ``shared``."""
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    stages = [[nn.Linear(WIDTH, WIDTH), nn.Tanh()] for _ in range(num_stages)]
    stages[0].insert(0, embedding)
    for s in shared:
        if 0 < s < num_stages - 1:
            stages[s].append(Mixing(embedding.weight))
    last = num_stages - 1
    stages[-1].append(TiedHead(embedding.weight) if last in shared else nn.Linear(WIDTH, VOCABULARY, bias=False))
    return [nn.Sequential(*stage).double() for stage in stages]


def one_process(stages, inputs, targets, denominator):
    for x, t in zip(inputs, targets, strict=True):
        y = x
        for stage in stages:
            y = stage(y)
        (loss_sum(y, t) / denominator).backward()
    return [{n: p.grad for n, p in stage.named_parameters()} for stage in stages]


def pipelined(schedule, stages, tied, inputs, targets, num_steps=1, measure=True):
    """Every rank as a thread with a copy of its stages: one copy, so that what is one object stays one."""

    def work(transport):
        held = schedule.stages_of(transport.rank)
        mine = copy.deepcopy([stages[s] for s in held])
        parts = [TorchStage(m, s, loss=loss_sum) for s, m in zip(held, mine, strict=True)]
        executor = Executor(schedule, parts, transport, count_tokens=lambda t: t.numel(), tied=tied)
        for _ in range(num_steps):
            executor.step(inputs, targets)
        if not measure:
            return {(s, n): p.grad for s, m in zip(held, mine, strict=True) for n, p in m.named_parameters()}
        norm = clip_grad_norm(executor, math.inf)
        before = [p.grad.clone() for m in mine for p in m.parameters()]
        clip_grad_norm(executor, norm / 2)
        after = [p.grad.clone() for m in mine for p in m.parameters()]
        named = [(s, n) for s, m in zip(held, mine, strict=True) for n, _ in m.named_parameters()]
        return dict(zip(named, zip(before, after, strict=True), strict=True)), norm

    return ThreadHub(schedule.num_ranks).run(work)


@pytest.mark.parametrize("name", [*V_SCHEDULES, "1f1b", "interleaved_zb"])
@pytest.mark.parametrize("where", ["both ends", "all stages", "middle and last"])
def test_tied_gradients_are_those_of_one_process(name, where):
    schedule = build_schedule(name, 2, 8)
    last = schedule.num_stages - 1
    shared = {"both ends": [0, last], "all stages": range(last + 1), "middle and last": [0, 1, last]}[where]
    stages = build_model(schedule.num_stages, shared)
    tied = find_tied_weights(stages)
    assert [set(weight.names) for weight in tied] == [set(shared)]
    inputs, targets = batch(8)
    expected = one_process(copy.deepcopy(stages), inputs, targets, sum(t.numel() for t in targets))
    expected_norm = math.sqrt(sum(float(g.square().sum()) for g in unique(expected, tied)))
    for grads, norm in pipelined(schedule, stages, tied, inputs, targets):
        assert norm == pytest.approx(expected_norm, rel=1e-12)
        for (stage, parameter), (grad, clipped) in grads.items():
            case = f"stage {stage} {parameter}"
            wanted = expected[stage][parameter]
            torch.testing.assert_close(grad, wanted, rtol=0, atol=ORDER_OF_SUMMATION, msg=lambda t, c=case: f"{c}: {t}")
            # scaled once, even if two stages of the rank hold it: norm/2 over norm + 1e-6
            torch.testing.assert_close(clipped, grad * (norm / 2 / (norm + 1e-6)), rtol=1e-14, atol=0)


def unique(grads, tied):
    """One gradient for each parameter of the model."""
    copies = {(s, weight.names[s]) for weight in tied for s in sorted(weight.names)[1:]}
    return [g for s, stage in enumerate(grads) for n, g in stage.items() if (s, n) not in copies]


def test_ties_by_hand_with_copies_on_one_rank_are_summed():
    """Copies that are no longer one object, as after FSDP2 has wrapped the stages, are summed within the rank too."""
    schedule = build_schedule("zbv", 2, 8)
    stages = build_model(4, [0, 3])
    inputs, targets = batch(8)
    expected = one_process(copy.deepcopy(stages), inputs, targets, sum(t.numel() for t in targets))
    copies = [copy.deepcopy(stage) for stage in stages]
    assert find_tied_weights(copies) == []
    tied = [TiedWeight({0: "0.weight", 3: "2.weight"})]
    for grads, _ in pipelined(schedule, copies, tied, inputs, targets):
        for (stage, parameter), (grad, _) in grads.items():
            torch.testing.assert_close(grad, expected[stage][parameter], rtol=0, atol=ORDER_OF_SUMMATION)


class Replica(nn.Module):
    """Names parameters as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def recomputed(module):
    for name, child in module.named_children():
        module.set_submodule(name, checkpoint_wrapper(child))
    return module


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), recomputed, Replica])
def test_ties_that_were_found_before_the_stages_were_wrapped_hold(wrap):
    schedule = build_schedule("1f1b", 2, 2)
    stages = build_model(2, [0, 1])
    tied = find_tied_weights(stages)
    inputs, targets = batch(2)
    expected = one_process(copy.deepcopy(stages), inputs, targets, sum(t.numel() for t in targets))
    wrapped = [wrap(stage) for stage in stages]
    assert tied[0].names[0] not in dict(wrapped[0].named_parameters())
    for grads, norm in pipelined(schedule, wrapped, tied, inputs, targets):
        assert norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in unique(expected, tied))), rel=1e-12)
        for (stage, parameter), (grad, _) in grads.items():
            plain = [p for p in parameter.split(".") if p not in ("_orig_mod", "_checkpoint_wrapped_module", "module")]
            wanted = expected[stage][".".join(plain)]
            torch.testing.assert_close(grad, wanted, rtol=0, atol=ORDER_OF_SUMMATION)


def test_a_name_that_two_parameters_have_inside_wrappers_is_refused():
    stage = Replica(nn.ModuleDict({"a": nn.Linear(2, 2), "module": nn.ModuleDict({"a": nn.Linear(2, 2)})}))
    weight = TiedWeight({0: "a.weight", 1: "a.weight"})
    with pytest.raises(ValueError, match="stage 0 has more than one parameter"):
        tied_parameter(weight, 0, stage)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@pytest.mark.parametrize(
    "where", [lambda last: [0, last], lambda last: range(last + 1)], ids=["both ends", "all stages"]
)
def test_earlier_gradients_of_a_tied_weight_count_once(name, where):
    """Two steps on one batch, one optimizer step: twice the gradient of one."""
    schedule = build_schedule(name, 2, 4)
    last = schedule.num_stages - 1
    stages = build_model(schedule.num_stages, where(last))
    tied = find_tied_weights(stages)
    after = [pipelined(schedule, stages, tied, *batch(4), num_steps=n, measure=False) for n in (1, 2)]
    for one, two in zip(*after, strict=True):
        for parameter, grad in two.items():
            torch.testing.assert_close(grad, 2 * one[parameter], rtol=0, atol=4 * ORDER_OF_SUMMATION)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_frozen_tied_weights_get_no_gradient(name):
    schedule = build_schedule(name, 2, 4)
    stages = build_model(schedule.num_stages, range(schedule.num_stages))
    stages[0][0].weight.requires_grad_(False)
    tied = find_tied_weights(stages)
    grads = pipelined(schedule, stages, tied, *batch(4), measure=False)
    of_ties = [grads[schedule.placement[s]][s, n] for s, n in tied[0].names.items()]
    assert len(of_ties) == schedule.num_stages
    assert all(grad is None for grad in of_ties)


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_of_which_some_are_frozen_are_refused(ranks):
    schedule = build_schedule("1f1b" if ranks == 2 else "looped_bfs", ranks, 2)
    stages = [copy.deepcopy(stage) for stage in build_model(2, [0, 1])]
    stages[0][0].weight.requires_grad_(False)
    tied = [TiedWeight({0: "0.weight", 1: "2.weight"})]
    with pytest.raises(
        (ValueError, PipelineAborted), match=r"stages \[0\] are frozen.*those of stages \[1\] are not"
    ) as got:
        pipelined(schedule, stages, tied, *batch(2))
    assert "requires_grad_" in str(got.value)


class Gpt2Stage(nn.Module):
    """Some layers of a GPT-2 of Hugging Face's transformers, as its own forward calls them."""

    def __init__(self, layers, positions=None):
        super().__init__()
        self.layers, self.positions = layers, positions

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Embedding):
                x = x + self.positions(torch.arange(x.shape[1]))
        return x


@pytest.mark.parametrize("name", [*V_SCHEDULES, "zb_h1"])
def test_a_gpt2_of_transformers_trains_like_in_one_process(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=WIDTH, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    gpt = transformers.GPT2LMHeadModel(config).double()
    assert gpt.lm_head.weight is gpt.transformer.wte.weight
    schedule = build_schedule(name, 2, 8)
    inputs, targets = batch(8)
    alone = copy.deepcopy(gpt)
    for x, t in zip(inputs, targets, strict=True):
        (loss_sum(alone(x).logits, t) / sum(t.numel() for t in targets)).backward()
    expected = {n: p.grad for n, p in alone.named_parameters()}
    body = gpt.transformer
    layers = split_layers([body.wte, *body.h, body.ln_f, gpt.lm_head], schedule.num_stages)
    stages = [Gpt2Stage(part, body.wpe if s == 0 else None) for s, part in enumerate(layers)]
    names = {id(p): n for n, p in gpt.named_parameters()}
    by_stage = [{n: names[id(p)] for n, p in stage.named_parameters()} for stage in stages]
    tied = find_tied_weights(stages)
    assert len(tied) == 1
    for grads, _ in pipelined(schedule, stages, tied, inputs, targets):
        for (stage, parameter), (grad, _) in grads.items():
            whole = by_stage[stage][parameter]
            torch.testing.assert_close(
                grad, expected[whole], rtol=0, atol=ORDER_OF_SUMMATION, msg=lambda t, w=whole: f"{w}: {t}"
            )


def test_ties_that_do_not_fit_are_refused_with_what_to_do():
    stage = TorchStage(build_model(1, [])[0], 0, loss=loss_sum)
    schedule = build_schedule("gpipe", 1, 2)
    with pytest.raises(ValueError, match=r"names stages \[3\], but the schedule has stages 0 to 0"):
        Executor(schedule, [stage], tied=[TiedWeight({0: "0.weight", 3: "1.weight"})])
    two = build_model(2, [0, 1])
    schedule = build_schedule("looped_bfs", 1, 2)
    stages = [TorchStage(m, s, loss=loss_sum) for s, m in enumerate(two)]
    with pytest.raises(ValueError, match=r"stage 1 has no parameter 'wte.weight'"):
        Executor(schedule, stages, tied=[TiedWeight({0: "0.weight", 1: "wte.weight"})])
    with pytest.raises(ValueError, match="at least two stages"):
        TiedWeight({0: "0.weight"})


def test_ddp_stages_that_share_a_parameter_are_refused():
    wrap = nn.parallel.DistributedDataParallel
    modules = build_model(2, [0, 1])
    stages = []
    for s, module in enumerate(modules):
        module.__class__ = type("Wrapped", (wrap,), {"__init__": lambda self: None, "forward": lambda self, x: x})
        stages.append(type("Stage", (), {"module": module, "index": s, "configure": lambda self, split: None})())
    with pytest.raises(ValueError, match="both would reduce its gradient"):
        Executor(build_schedule("looped_bfs", 1, 2), stages)
