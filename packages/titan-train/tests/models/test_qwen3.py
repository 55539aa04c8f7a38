"""Qwen3, dense and with experts, against a naive reference in float64: logits and every gradient."""

import math

import pytest
import torch
from naive import assert_matches, shaken
from titan_train.models import Qwen3, Qwen3Args
from titan_train.models.common.moe.balance import set_aux_scale
from torch import Tensor

ARGS = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 61}
DENSE = {"ffn_dim": 48}
SPARSE = {"num_experts": 8, "experts_per_token": 3, "expert_ffn_dim": 16, "balance_loss": 0.0}


def make(**changes: object) -> Qwen3:
    return shaken(Qwen3(Qwen3Args(**{**ARGS, **changes})))  # type: ignore[arg-type]


def naive_qwen3(w: dict[str, Tensor], args: Qwen3Args, tokens: Tensor) -> Tensor:
    """Token by token, head by head, expert by expert, from the definitions; nothing shared with the package."""

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + args.norm_eps) * weight

    def rotate(x: Tensor, position: int) -> Tensor:
        half = args.head_dim // 2
        out = []
        for i in range(2 * half):
            angle = position * args.rope_theta ** (-2 * (i % half) / (2 * half))
            other = -x[i + half] if i < half else x[i - half]
            out.append(x[i] * math.cos(angle) + other * math.sin(angle))
        return torch.stack(out)

    def attention(x: Tensor, layer: str) -> Tensor:
        hd, groups = args.head_dim, args.num_heads // args.num_kv_heads
        q, k, v = (x @ w[f"{layer}.attention.{n}.weight"].T for n in ("wq", "wk", "wv"))
        q_norm, k_norm = w[f"{layer}.attention.q_norm.weight"], w[f"{layer}.attention.k_norm.weight"]
        rows = []
        for s in range(x.shape[0]):
            heads = []
            for h in range(args.num_heads):
                mine, shared = slice(h * hd, (h + 1) * hd), slice(h // groups * hd, (h // groups + 1) * hd)
                query = rotate(rms_norm(q[s, mine], q_norm), s)
                keys = [rotate(rms_norm(k[t, shared], k_norm), t) for t in range(s + 1)]
                weights = torch.stack([query @ key / math.sqrt(hd) for key in keys]).exp()
                heads.append(sum(weights[t] / weights.sum() * v[t, shared] for t in range(s + 1)))
            rows.append(torch.cat(heads))
        return torch.stack(rows) @ w[f"{layer}.attention.wo.weight"].T

    def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        gate = w1 @ x
        return w2 @ (gate / (1 + (-gate).exp()) * (w3 @ x))

    def experts(x: Tensor, layer: str) -> Tensor:
        probabilities = (w[f"{layer}.moe.router.gate.weight"] @ x).exp()
        probabilities = probabilities / probabilities.sum()
        chosen = sorted(range(args.num_experts), key=lambda e: -float(probabilities[e].detach()))[
            : args.experts_per_token
        ]
        total = sum(probabilities[e] for e in chosen)
        names = ("w1", "w2", "w3")
        out = [probabilities[e] / total * swiglu(x, *(w[f"{layer}.moe.experts.{n}"][e] for n in names)) for e in chosen]
        return torch.stack(out).sum(0)

    def inner(x: Tensor, layer: str) -> Tensor:
        if args.num_experts > 0:
            return torch.stack([experts(row, layer) for row in x])
        weights = [w[f"{layer}.feed_forward.{n}.weight"] for n in ("w1", "w2", "w3")]
        return torch.stack([swiglu(row, *weights) for row in x])

    logits = []
    for row in tokens:
        x = w["tok_embeddings.weight"][row]
        for i in range(args.num_layers):
            x = x + attention(rms_norm(x, w[f"layers.{i}.attention_norm.weight"]), f"layers.{i}")
            x = x + inner(rms_norm(x, w[f"layers.{i}.ffn_norm.weight"]), f"layers.{i}")
        logits.append(rms_norm(x, w["norm.weight"]) @ w.get("lm_head.weight", w["tok_embeddings.weight"]).T)
    return torch.stack(logits)


@pytest.mark.parametrize("changes", [DENSE, {**DENSE, "tied_embeddings": True}, SPARSE], ids=["dense", "tied", "moe"])
def test_logits_and_every_gradient_match_the_naive_reference(changes: dict[str, object]) -> None:
    # all float64 but the cosines, stored in float32: 6e-8 relative to values of order 10
    assert_matches(make(**changes), naive_qwen3, 1e-6)


def test_the_future_does_not_reach_the_past() -> None:
    model = make(**SPARSE)
    tokens = torch.randint(61, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 61
    assert torch.allclose(model(tokens)[:, :8], model(changed)[:, :8], atol=1e-12)


def test_a_small_mixture_learns_and_its_auxiliary_loss_changes_its_gradient() -> None:
    tokens = torch.randint(61, (4, 33), generator=torch.Generator().manual_seed(0))
    gates = []
    for coefficient in (0.0, 0.5):
        model = make(**{**SPARSE, "balance_loss": coefficient}).float()
        set_aux_scale(model, 1 / 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(12):
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]
        gates.append(model.layers["0"].moe.router.gate.weight.detach())  # type: ignore[union-attr]
    assert not torch.equal(gates[0], gates[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({**DENSE, "num_kv_heads": 3}, ["num_kv_heads=3", "nearest valid choice is 2"]),
        ({**DENSE, "head_dim": 5}, ["head_dim=5", "6"]),
        ({}, ["ffn_dim=0", "num_experts=0"]),
        ({**SPARSE, "experts_per_token": 9}, ["experts_per_token=9", "8"]),
        ({**SPARSE, "expert_ffn_dim": 0}, ["expert_ffn_dim=0"]),
        ({**DENSE, "num_experts": -1}, ["num_experts=-1"]),
        ({**DENSE, "rope_theta": 1.0}, ["rope_theta=1.0"]),
    ],
)
def test_shapes_that_cannot_work_are_refused(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"model\.args") as caught:
        Qwen3Args(**{**ARGS, **changes})  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
