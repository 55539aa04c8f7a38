"""The router against its definition, token by token."""

import math

import pytest
import torch
from titan_train.models.common.args import MoEArgs
from titan_train.models.common.moe.router import Router
from torch import Tensor

ARGS = {"dim": 16, "expert_ffn_dim": 16, "num_experts": 8, "experts_per_token": 2}

KINDS = {
    "softmax": {"scores": "softmax"},
    "sigmoid-k3": {"scores": "sigmoid", "experts_per_token": 3},
    "raw-weights": {"normalize_weights": False, "route_scale": 2.5},
    "groups": {"scores": "sigmoid", "num_groups": 4, "top_groups": 2, "experts_per_token": 3},
    "groups-of-one": {"num_groups": 8, "top_groups": 4},
    "groups-v2": {"num_groups": 4, "top_groups": 2, "group_score": "max", "normalize_weights": False},
}


def reference(logits: list[float], bias: list[float], args: MoEArgs) -> tuple[list[int], list[float]]:
    """The chosen experts and weights of one token, written from DeepSeek-V3's equations 12 to 16."""
    counted = 1 if args.group_score == "max" else 2  # DeepSeek-V2's section 2.2.2, or V3's 2.1.2
    if args.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    preference = [s + b for s, b in zip(scores, bias, strict=True)]
    size = args.num_experts // args.num_groups
    groups = [preference[g * size : (g + 1) * size] for g in range(args.num_groups)]
    best = sorted(range(args.num_groups), key=lambda g: -sum(sorted(groups[g])[-counted:]))[: args.top_groups]
    allowed = [e for e in range(args.num_experts) if e // size in best]
    chosen = sorted(allowed, key=lambda e: -preference[e])[: args.experts_per_token]
    weights = [scores[e] for e in chosen]
    total = sum(weights) if args.normalize_weights else 1.0
    return chosen, [args.route_scale * w / total for w in weights]


def route(kind: str, seed: int = 0) -> tuple[Router, Tensor, Tensor]:
    router = Router(MoEArgs(**{**ARGS, **KINDS[kind]}))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    router.gate.weight.data.normal_(std=0.5, generator=generator)
    return router.double(), torch.randn(50, 16, generator=generator).double(), torch.randn(8, generator=generator) * 0.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_choices_and_weights_follow_the_definition(kind: str, biased: bool) -> None:
    router, x, bias = route(kind)
    routing = router(x, bias.double() if biased else None)
    for t in range(len(x)):
        logits = (router.gate.weight @ x[t]).tolist()
        chosen, weights = reference(logits, bias.double().tolist() if biased else [0.0] * 8, router.args)
        assert routing.experts[t].tolist() == chosen
        assert routing.weights[t].tolist() == pytest.approx(weights, abs=1e-12)


def test_the_best_two_and_the_maximum_of_a_group_choose_differently() -> None:
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.1, 0.1, 0.1, 0.1]])
    found = {}
    for kind in ("max", "top2_sum"):
        router = Router(MoEArgs(**ARGS, num_groups=4, top_groups=1, group_score=kind))  # type: ignore[arg-type]
        found[kind] = router._choose(scores).tolist()
    assert found == {"max": [[0, 1]], "top2_sum": [[2, 3]]}


def test_the_bias_changes_choices_but_gets_and_gives_no_weight() -> None:
    router, x, bias = route("softmax")
    plain, biased = router(x), router(x, bias.double())
    assert not torch.equal(plain.experts, biased.experts)
    assert torch.equal(plain.scores, biased.scores)
    assert torch.allclose(biased.weights.sum(-1), torch.ones(50).double())


def test_a_bfloat16_model_routes_in_float32() -> None:
    router, x, _ = route("softmax")
    low = router.bfloat16()(x.bfloat16())
    exact = router.float()(x.bfloat16().float())
    assert low.logits.dtype == low.weights.dtype == torch.float32
    assert torch.equal(low.logits, exact.logits)


def test_confident_rejection_of_all_experts_stays_finite() -> None:
    router = Router(MoEArgs(**ARGS, scores="sigmoid"))  # type: ignore[arg-type]
    router.gate.weight.data.fill_(-100.0)
    routing = router(torch.ones(3, 16).requires_grad_())
    routing.weights.sum().backward()
    assert routing.weights.isfinite().all()
    assert router.gate.weight.grad is not None
    assert router.gate.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, ["num_experts=0", "1"]),
        ({"experts_per_token": 9}, ["experts_per_token=9", "nearest valid choice is 8"]),
        ({"num_groups": 3}, ["num_groups=3", "num_experts=8", "nearest valid choice is 2"]),
        ({"num_groups": 2, "top_groups": 3}, ["top_groups=3", "nearest valid choice is 2"]),
        ({"num_groups": 8, "top_groups": 1}, ["experts_per_token=2", "the 1 experts", "nearest valid choice is 1"]),
        ({"group_score": "mean"}, ["group_score='mean'", "'max'", "'top2_sum'"]),
        ({"scores": "tanh"}, ["scores='tanh'", "'softmax', 'sigmoid'"]),
        ({"route_scale": 0.0}, ["route_scale=0.0"]),
        ({"bias_rate": -1.0}, ["bias_rate=-1.0"]),
    ],
)
def test_layers_that_cannot_work_are_refused(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"model\.args") as caught:
        MoEArgs(**{**ARGS, **changes})  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), str(caught.value)
