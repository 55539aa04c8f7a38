"""Latent attention and YaRN against naive references in float64; what the whole model refuses."""

import cmath
import math
from typing import Any

import pytest
import torch
from titan_testing import assert_close
from titan_train.models import DeepSeekArgs
from titan_train.models.common.attention import SequenceContext
from titan_train.models.common.moe.balance import set_aux_scale, update_expert_bias
from titan_train.models.common.rope import rope_frequencies
from titan_train.models.deepseek.args import DEEPSEEK_CONFIGS
from titan_train.models.deepseek.attention import LatentAttention, yarn_frequencies
from titan_train.models.deepseek.model import DeepSeek
from torch import Tensor

ARGS: dict[str, Any] = {
    "dim": 32, "num_layers": 2, "num_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "ffn_dim": 48, "vocab_size": 61, "num_experts": 8, "experts_per_token": 2,
    "expert_ffn_dim": 16,
}  # fmt: skip
STRETCHED = {"rope_factor": 40.0, "rope_original_seq_len": 64}


def make(**changes: object) -> tuple[DeepSeek, LatentAttention]:
    model = DeepSeek(DeepSeekArgs(**{**ARGS, **changes})).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).double()
            parameter.copy_(noise * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    attention = model.layers["0"].attention  # type: ignore[union-attr]
    assert isinstance(attention, LatentAttention)
    return model, attention


def yarn_frequency(pair: int, args: DeepSeekArgs) -> float:
    """Of one channel pair, from DeepSeek-V2's description (section 3.1.4) and the YaRN paper's equations."""
    dims, base = args.qk_rope_head_dim, args.rope_theta
    plain = base ** (-2 * pair / dims)
    if args.rope_factor == 1:
        return plain

    def pair_of(turns: float) -> float:
        return dims * math.log(args.rope_original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(pair_of(args.rope_beta_fast))), min(dims - 1, math.ceil(pair_of(args.rope_beta_slow)))
    slow = min(1.0, max(0.0, (pair - low) / max(high - low, 0.001)))
    return plain / args.rope_factor * slow + plain * (1 - slow)


def naive_attention(w: dict[str, Tensor], args: DeepSeekArgs, x: Tensor) -> Tensor:
    """Equations 37 to 47 of DeepSeek-V2, a token and a head at a time; rotation of neighbours as complex numbers."""

    def rms_norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / torch.sqrt((v * v).mean() + 1e-6) * weight

    def rotate(v: Tensor, position: int) -> Tensor:
        out = []
        for pair in range(args.qk_rope_head_dim // 2):
            turn = cmath.exp(1j * position * yarn_frequency(pair, args))
            a, b = v[2 * pair], v[2 * pair + 1]
            out += [a * turn.real - b * turn.imag, a * turn.imag + b * turn.real]
        return torch.stack(out)

    nope, rope, vd, heads = args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim, args.num_heads
    sharpen = (0.1 * args.rope_mscale * math.log(args.rope_factor) + 1) ** 2
    queries, keys, values = [], [], []
    for position, token in enumerate(x):
        if args.q_lora_rank:
            q = w["wq_b.weight"] @ rms_norm(w["wq_a.weight"] @ token, w["q_norm.weight"])
        else:
            q = w["wq.weight"] @ token
        down = w["wkv_a.weight"] @ token
        up = w["wkv_b.weight"] @ rms_norm(down[: args.kv_lora_rank], w["kv_norm.weight"])
        shared = rotate(down[args.kv_lora_rank :], position)
        of_head = [q[h * (nope + rope) : (h + 1) * (nope + rope)] for h in range(heads)]
        queries.append([torch.cat((h[:nope], rotate(h[nope:], position))) for h in of_head])
        parts = [up[h * (nope + vd) : (h + 1) * (nope + vd)] for h in range(heads)]
        keys.append([torch.cat((part[:nope], shared)) for part in parts])
        values.append([part[nope:] for part in parts])
    rows = []
    for s in range(len(x)):
        out = []
        for h in range(heads):
            scores = torch.stack([queries[s][h] @ keys[t][h] for t in range(s + 1)]) * sharpen / math.sqrt(nope + rope)
            weights = scores.softmax(0)
            out.append(sum(weights[t] * values[t][h] for t in range(s + 1)))
        rows.append(w["wo.weight"] @ torch.cat(out))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": 0}, STRETCHED, {"v_head_dim": 20}], ids=["v3", "no-q-latent", "yarn", "wide-values"]
)
def test_latent_attention_and_every_gradient_match_the_naive_reference(changes: dict[str, object]) -> None:
    model, attention = make(**changes)
    generator = torch.Generator().manual_seed(1)
    x, probe = (torch.randn(1, 9, 32, generator=generator).double() for _ in range(2))
    x.requires_grad_()
    positions = torch.arange(9)[None]
    got = attention(x, SequenceContext(positions=positions, rope=model.rope(positions)))
    (got * probe).sum().backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in attention.named_parameters()}
    again = x.detach().clone().requires_grad_()
    want = naive_attention(weights, model.args, again[0])
    (want * probe[0]).sum().backward()
    # all float64 but the cosines, stored in float32: 6e-8 relative to values of order 1
    assert float((got[0] - want).detach().abs().max()) < 1e-6
    pairs = [(name, p.grad, weights[name].grad) for name, p in attention.named_parameters()]
    for name, grad, expected in [*pairs, ("x", x.grad, again.grad)]:
        assert grad is not None
        assert expected is not None
        assert float((grad - expected).abs().max()) < 1e-6 * max(1.0, float(expected.abs().max())), name


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    v3 = DEEPSEEK_CONFIGS["deepseek_v3"]
    found = yarn_frequencies(v3)
    assert found.tolist() == pytest.approx([yarn_frequency(pair, v3) for pair in range(32)], rel=1e-12)
    ratios = found / rope_frequencies(v3.qk_rope_head_dim, v3.rope_theta)
    assert ratios[:10].tolist() == [1.0] * 10
    assert ratios[-8:].tolist() == pytest.approx([1 / 40] * 8)


def test_first_layers_are_dense_and_the_others_have_experts() -> None:
    model, _ = make(num_layers=3, num_dense_layers=2)
    kinds = [name.split(".")[2] for name, _ in model.named_parameters() if name.endswith(("w1.weight", "experts.w1"))]
    assert kinds == ["feed_forward", "feed_forward", "moe", "moe"]
    assert model(torch.randint(61, (2, 9))).shape == (2, 9, 61)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_dense_layers": 3}, ["num_dense_layers=3", "num_layers=2", "nearest valid choice is 2"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim=7", "8"]),
        ({"v_head_dim": 32}, ["v_head_dim=32", "= 20", "nearest valid choice is 20"]),
        ({"rope_factor": 0.5}, ["rope_factor=0.5"]),
        ({"rope_theta": 0.0}, ["rope_theta=0.0"]),
        ({"rope_beta_slow": 64.0}, ["rope_beta_slow=64.0", "rope_beta_fast=32.0"]),
        ({"q_lora_rank": -1}, ["q_lora_rank=-1"]),
        ({"kv_lora_rank": 0}, ["kv_lora_rank=0"]),
        ({"num_groups": 3}, ["num_groups=3", "num_experts=8"]),
    ],
)
def test_shapes_that_cannot_work_are_refused(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"model\.args") as caught:
        DeepSeekArgs(**{**ARGS, **changes})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_row_that_is_half_padding_balances_experts_as_its_documents_alone() -> None:
    ids = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(0))
    filled = torch.cat((ids, torch.zeros_like(ids)), 1)
    found = []
    for tokens, bounds, padding in (
        (ids, [[0, 5, 12, 12]], None),
        (filled, [[0, 5, 12, 24]], torch.arange(24)[None] >= 12),
    ):
        model, _ = make(balance_loss=0.3, z_loss=0.02)
        set_aux_scale(model, 1.0)
        logits = model(tokens, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), padding=padding)
        logits[:, :12].logsumexp(-1).sum().backward()
        (routing,) = update_expert_bias(model, None).values()
        assert sum(routing.load) == 2 * 12
        found.append(
            ({name: p.grad for name, p in model.named_parameters()}, dict(model.named_buffers()), routing.load)
        )
    (want, want_bias, want_load), (got, got_bias, got_load) = found
    assert got_load == want_load
    assert_close(got, want, atol=1e-10)  # float64 sums of 24 terms, of which half are zero
    assert_close(got_bias, want_bias)
    assert float(want["layers.1.moe.router.gate.weight"].abs().max()) > 0.01  # type: ignore[union-attr]
