"""Muon in one process: torch's numbers, NorMuon's formula, what it takes, and who owns what."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from titan_testing import run_ranks
from titan_train.config.model import ModelConfig
from titan_train.config.optimizer import MuonConfig, OptimizerConfig
from titan_train.models import build_model
from titan_train.optim import build_optimizer, plan_groups
from titan_train.optim.build import check_restored
from titan_train.optim.newton_schulz import Rule, flops, orthogonalize, update_of
from titan_train.optim.ownership import Box, Stack, plan_ownership
from titan_train.optim.update import can_update, update
from torch import nn


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32, bias=False), nn.Linear(32, 16), nn.LayerNorm(16))


def train(model, *optimizers, steps=5):
    for step in range(steps):
        x = torch.randn(7, 24, generator=torch.Generator().manual_seed(step))
        (model(x).square() * torch.arange(16)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def muon(**settings):
    return OptimizerConfig(name="muon", lr=1e-2, muon=MuonConfig(**settings))


def taken(model, **settings):
    groups = plan_groups(model, OptimizerConfig(name="muon", muon=MuonConfig(**settings)))
    return [name for group in groups if group.kind == "muon" for name in group.fqns]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "theirs"), [("moonlight", "match_rms_adamw"), ("original", "original")])
def test_muon_is_that_of_torch(scale, theirs, nesterov):
    ours, reference = make(), make()
    train(ours, build_optimizer(ours, muon(scale=scale, nesterov=nesterov, dtype="bf16")))
    matrices = [p for p in reference.parameters() if p.ndim == 2]
    vectors = [p for p in reference.parameters() if p.ndim == 1]
    train(
        reference,
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=theirs),
        torch.optim.AdamW(vectors, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    )
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        assert float((a - b).detach().abs().max()) <= (0.0 if a.ndim == 2 else 1e-6)  # AdamW: another kernel


@pytest.mark.parametrize(
    ("dtype", "device", "units", "expected"),
    [("auto", None, [], torch.float32), ("auto", "cpu", ["avx512_f"], torch.float32),
     ("auto", "cpu", ["avx512_bf16"], torch.bfloat16), ("auto", "cpu", ["amx_bf16"], torch.bfloat16),
     ("auto", "cuda", [], torch.bfloat16), ("bf16", "cpu", [], torch.bfloat16), ("fp32", "cpu", ["amx_bf16"], torch.float32),
     ("fp32", "cuda", [], torch.float32)],
)  # fmt: skip
def test_newton_schulz_is_in_bf16_on_gpus_and_on_a_cpu_with_units_for_it(dtype, device, units, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(units, True))
    made = build_optimizer(make(), muon(dtype=dtype), device=None if device is None else torch.device(device))
    assert made._rule.dtype == expected


def build_beside_another_cpu():
    units = {"avx512_bf16": dist.get_rank() == 0}
    torch.cpu.get_capabilities = lambda: units
    return build_optimizer(make(), muon())._rule.dtype


def test_ranks_on_unlike_cpus_compute_in_one_dtype():
    assert run_ranks(build_beside_another_cpu, 2) == [torch.float32] * 2


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_cautious_decay_shrinks_what_the_update_shrinks_alone(name):
    """arXiv:2510.12402: with the update u, w - lr (u + decay * [u w >= 0] w)."""
    models = {decay: make() for decay in (0.0, 0.5)}
    optimizers = {
        decay: build_optimizer(model, OptimizerConfig(name=name, lr=1e-2, cautious=True, weight_decay=decay))
        for decay, model in models.items()
    }
    for step in range(4):
        before = [p.detach().clone() for p in models[0.5].parameters()]
        models[0.0].load_state_dict(models[0.5].state_dict())  # the same update, without decay
        for decay, model in models.items():
            x = torch.randn(7, 24, generator=torch.Generator().manual_seed(step))
            (model(x).square() * torch.arange(16)).sum().backward()
            if step and name == "adamw":  # as the trainer makes it, once there is state
                assert can_update(optimizers[decay], torch.device("cpu"))
                kept = [p.detach().clone() for p in model.parameters()]
                update(optimizers[decay], torch.ones(()))
                assert all(map(torch.equal, kept, model.parameters()))
                update(optimizers[decay], torch.zeros(()))
            else:
                optimizers[decay].step()
            optimizers[decay].zero_grad()
        for w, plain, found in zip(before, models[0.0].parameters(), models[0.5].parameters(), strict=True):
            mask = (w - plain) * w >= 0 if w.ndim == 2 else torch.zeros(())
            assert float((found - (plain - 1e-2 * 0.5 * mask * w)).detach().abs().max()) < 1e-6
            assert w.ndim != 2 or 0.1 < float(mask.float().mean()) < 0.9
    with pytest.raises(ValueError, match=r"optimizer.cautious with optimizer.name='sgd'"):
        OptimizerConfig(name="sgd", cautious=True)


@pytest.mark.parametrize("scale", ["moonlight", "original"])
def test_normuon_follows_its_paper(scale):
    """Algorithm 1 of arXiv:2510.05491 in float64; with the original scale, the authors' code, which keeps the norm."""
    rule = Rule("quintic", scale, torch.float64, beta2=0.95)
    generator = torch.Generator().manual_seed(3)
    mean, want_mean = torch.zeros(1, 12, 1), torch.zeros(12, 1, dtype=torch.float64)
    for _ in range(3):
        momentum = torch.randn(12, 20, generator=generator, dtype=torch.float64)
        update = update_of(momentum[None], mean, rule, (12,))[0]
        o = orthogonalize(momentum)
        want_mean = 0.95 * want_mean + 0.05 * o.square().mean(dim=1, keepdim=True)
        normalized = o / want_mean.sqrt()
        if scale == "moonlight":
            want = 0.2 * math.sqrt(12 * 20) / normalized.norm() * normalized / (0.2 * math.sqrt(20))
        else:
            want = o.norm() / normalized.norm() * normalized
        assert float((update - want).abs().max()) < 1e-6  # the means of rows are float32
        assert float((mean[0] - want_mean).abs().max()) < 1e-8


def test_the_coefficients_bring_singular_values_near_one():
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(16, 40, generator=generator, dtype=torch.float64), full_matrices=False)
    matrix = u @ torch.diag(torch.logspace(-2, 0, 16, dtype=torch.float64)) @ v
    for coefficients, error in (("quintic", 0.4), ("polar_express", 0.15)):
        for x, polar in ((matrix, u @ v), (matrix.mT, (u @ v).mT)):
            found = orthogonalize(x, coefficients)
            assert float((torch.linalg.svdvals(found) - 1).abs().max()) < error
            assert float((found - polar).norm() / polar.norm()) < error
    assert not orthogonalize(torch.zeros(3, 4)).any()


def test_heads_fused_parts_and_experts_are_matrices_of_their_own():
    rule = Rule(dtype=torch.float32, beta2=0.9)
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    for parts in ((4, 4, 4), (8, 2, 2), (12,)):
        mean = torch.rand(2, 12, 1, generator=torch.Generator().manual_seed(1))
        whole_mean = mean.clone()
        whole = update_of(x, whole_mean, rule, parts)
        for expert in range(2):
            pieces = zip(x[expert].split(parts), mean[expert].split(parts), strict=True)
            alone = torch.cat([update_of(piece[None], own[None], rule, (piece.shape[0],))[0] for piece, own in pieces])
            # a batch of products rounds otherwise than one, and small singular values are raised up to 485 times
            assert float((whole[expert] - alone).abs().max()) < 1e-5
            assert float((whole_mean[expert] - mean[expert]).abs().max()) < 1e-6


class Strange(nn.Module):
    """A module of a user: vectors, a stack, convolutions, a matrix with one row, a tied table."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.position = nn.Parameter(torch.randn(7, 6) * 0.1)
        self.stack = nn.Parameter(torch.randn(3, 6, 6) * 0.1)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.wide, self.one = nn.Linear(6, 12), nn.Linear(12, 1)
        self.back = nn.Linear(12, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        x = self.emb(tokens) + self.position[: tokens.shape[-1]]
        x = x + self.conv(x.mT).mT + torch.einsum("bti,eij->btj", x, self.stack)
        hidden = torch.relu(self.wide(x))
        return self.head(self.frozen(x + self.back(hidden) * self.scale + self.one(hidden)))


def test_a_strange_module_trains_and_muon_takes_its_matrices_alone():
    torch.manual_seed(0)
    model = Strange()
    assert taken(model) == ["position", "wide.weight", "back.weight"]
    assert taken(model, groups={"position": "adamw", "stack": "muon", "one": "muon"}) == [
        "stack", "wide.weight", "one.weight", "back.weight"
    ]  # fmt: skip
    config = muon(groups={"stack": "muon", "one": "muon"}, splits={"wide": (1, 2)}, normuon=True)
    optimizer = build_optimizer(model, config)
    tokens = torch.randint(10, (4, 7), generator=torch.Generator().manual_seed(0))
    losses = []
    for step in range(20):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if step == 10:
            model.back.weight.grad = None  # passed over, as in torch's optimizers
            kept = model.back.weight.detach().clone()
        optimizer.step()
        if step == 10:
            assert torch.equal(kept, model.back.weight)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


def test_a_gradient_that_is_not_finite_stays_in_its_matrix():
    model = make()
    optimizer = build_optimizer(model, muon())
    model(torch.ones(2, 24)).square().sum().backward()
    model[1].weight.grad[0, 0] = math.nan
    optimizer.step()
    assert model[1].weight.isnan().all()
    assert all(p.isfinite().all() for name, p in model.named_parameters() if name != "1.weight")


@pytest.mark.parametrize("name", ["llama3_debug", "gpt_debug", "qwen3_moe_debug", "deepseek_debug"])
def test_embeddings_heads_norms_and_routers_are_left_to_adamw_by_default(name):
    model = build_model(ModelConfig(name=name), vocab_size=300)
    found = set(taken(model))
    for fqn, parameter in model.named_parameters():
        other = "emb" in fqn or "lm_head" in fqn or "norm" in fqn or "router" in fqn or fqn.endswith("bias")
        assert (fqn in found) == (not other and parameter.ndim >= 2), fqn


def test_the_families_have_no_other_fused_matrices_than_the_guide_says():
    """docs/guides/optimizers.md: a name that is new here is one of them, or holds one matrix."""
    families = ("llama3", "gpt", "qwen3", "qwen3_moe", "qwen3_next", "deepseek")
    with torch.device("meta"):
        models = {name: build_model(ModelConfig(name=f"{name}_debug"), vocab_size=64) for name in families}
    names = {name.removesuffix(".weight").rpartition(".")[2] for model in models.values() for name in taken(model)}
    single = {"wq", "wk", "wv", "wo", "wq_a", "wq_b", "w1", "w2", "w3"}
    assert names - single == {"wkv_a", "wkv_b", "wqkvz", "wba"}
    parameters = {name: dict(model.named_parameters()) for name, model in models.items()}
    twice = {
        family
        for family, found in parameters.items()
        for name in found
        if name.endswith("attention.wq.weight") and len(found[name]) == 2 * found[name.replace("wq", "wo")].shape[1]
    }
    assert twice == {"qwen3_next"}  # each head's query and then its gate


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"groups": {"tok_embeddings": "muon"}}, "found in tok_embeddings.weight: it is an embedding"),
        ({"groups": {"atention": "muon"}}, r"optimizer.muon.groups has the pattern 'atention', which is found in none"),
        ({"heads": {"tok_embeddings": 4}}, "found in no matrix that Muon takes"),
        ({"heads": {"wq": 5}}, r"optimizer.muon.heads.wq=5: layers.0.attention.wq.weight has \d+ rows"),
        (
            {"splits": {"wq": (1, 2)}},
            r"splits.wq=\[1, 2\]: layers.0.attention.wq.weight has \d+ rows, which 3 does not divide",
        ),
        ({"splits": {"wq": (1, 1)}, "heads": {"w[qk]": 2}}, "both are found in layers.0.attention.wq.weight"),
    ],
)
def test_what_muon_cannot_do_is_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        taken(build_model(ModelConfig(), vocab_size=300), **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"splits": {"wq": (1,)}}, "optimizer.muon.splits.wq=[1] is not the proportions"),
        ({"heads": {"wq": 0}}, "optimizer.muon.heads.wq=0"),
        ({"momentum": 1.0}, "optimizer.muon.momentum=1.0"),
        ({"groups": {"(a+)+$": "muon"}}, "may not end"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        MuonConfig(**settings)


def test_state_of_another_optimizer_is_refused_by_the_parameter_s_name():
    model = make()
    optimizer = build_optimizer(model, muon())
    check_restored(optimizer, "muon")
    optimizer.state[model[0].weight] = {"exp_avg": torch.zeros(32, 24)}
    with pytest.raises(ValueError, match=r"updates 0.weight by 'muon', and the checkpoint holds the state of 'adamw'"):
        check_restored(optimizer, "muon")


def _sharded(shape, ranks):
    """The boxes of each rank where dimension 0 of a matrix, or of a stack, is cut as FSDP2 does."""
    dim = 0 if len(shape) == 3 else 1
    stack = (1, *shape)[-3:]
    size = -(-shape[0] // ranks)
    boxes = []
    for rank in range(ranks):
        at, length = [0, 0, 0], list(stack)
        at[dim] = min(rank * size, shape[0])
        length[dim] = min(size, shape[0] - at[dim])
        boxes.append([Box(*at, *length)] if length[dim] else [])
    return Stack(stack, (stack[1],)), boxes


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_an_8b_model_s_matrices_are_balanced_over_ranks(ranks):
    layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
    stacks, held = zip(*(_sharded(shape, ranks) for shape in layer * 32), strict=True)
    plan = plan_ownership(stacks, [[boxes[rank] for boxes in held] for rank in range(ranks)])
    total = sum(flops(*shape) for shape in layer * 32)
    assert sum(plan.loads) == pytest.approx(total)
    # LPT: 4/3 of the best; the best is at least the mean, and at least two large matrices where 96 meet 64 ranks
    best = max(total / ranks, flops(14336, 4096) * math.ceil(96 / ranks))
    assert max(plan.loads) <= 4 / 3 * best
    units = plan.local + [unit for bucket in plan.buckets for unit in bucket]
    assert sorted(unit.matrix for unit in units) == list(range(224))
    assert bool(plan.local) == (ranks == 1)
    if ranks == 64:
        assert len(plan.buckets) <= 4  # eight collectives in a step
        tokens = 4_194_304 / 64  # of a rank
        assert max(plan.loads) <= 0.05 * 6 * 8.03e9 * tokens
        sent = 4 * sum(rows * columns for rows, columns in layer * 32) / 64
        assert sent / 50e9 <= 0.05 * 6 * 8.03e9 * tokens / 400e12  # of the step's time


def test_a_stack_of_experts_is_local_where_experts_are_whole_and_divided_where_they_are_cut():
    whole, boxes = _sharded((8, 32, 16), 4)
    plan = plan_ownership([whole], [[b] for b in boxes])
    assert not plan.buckets
    assert sorted((unit.owner, unit.expert, unit.experts) for unit in plan.local) == [(r, 2 * r, 2) for r in range(4)]
    cut = [[[Box(0, 8 * rank, 0, 8, 8, 16)]] for rank in range(4)]
    plan = plan_ownership([whole], cut)
    (bucket,) = plan.buckets
    assert sorted((unit.owner, unit.experts) for unit in bucket) == [(rank, 2) for rank in range(4)]
