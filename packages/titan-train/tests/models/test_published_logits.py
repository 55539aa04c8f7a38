"""Qwen3 and DeepSeek give transformers' logits from transformers' weights. Skipped where transformers is not installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_ckpt import DEEPSEEK, QWEN3, import_hf
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 640,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
}


def qwen3(**changes: Any) -> nn.Module:
    heads = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 16, "rope_theta": 1e6}
    if changes:
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **heads, **EXPERTS, **changes))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, **heads))


def deepseek_v3(rope: dict[str, Any]) -> nn.Module:
    config = transformers.DeepseekV3Config(
        **SMALL, **LATENT, **EXPERTS, q_lora_rank=32, n_shared_experts=1, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True, rope_parameters=rope,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def deepseek_v2() -> nn.Module:
    config = transformers.DeepseekV2Config(
        **SMALL, **LATENT, **EXPERTS, q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1,
        routed_scaling_factor=1.0, norm_topk_prob=False, topk_method="greedy",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    return transformers.DeepseekV2ForCausalLM(config)


V2 = {
    "q_lora_rank": 0, "scores": "softmax", "normalize_weights": False, "bias_rate": 0.0, "route_scale": 1.0,
    "num_shared_experts": 2, "num_groups": 1, "top_groups": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args", "published"),
    [
        ("qwen3_debug", {}, qwen3),
        ("qwen3_moe_debug", {}, lambda: qwen3(num_experts=8, norm_topk_prob=True)),
        ("deepseek_debug", {}, lambda: deepseek_v3({"rope_type": "default", "rope_theta": 1e4})),
        ("deepseek_debug", {"rope_factor": 40.0, "rope_original_seq_len": 16}, lambda: deepseek_v3(YARN)),
        ("deepseek_debug", V2, deepseek_v2),
    ],
    ids=["qwen3", "qwen3-moe", "deepseek-v3", "deepseek-v3-yarn", "deepseek-v2"],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, name: str, args: dict[str, Any], published: Callable[[], nn.Module]
) -> None:
    theirs = published().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():  # logits of order one, attention that looks somewhere
            scale = 0.1 if parameter.ndim > 1 else 0.3
            offset = 0.0 if parameter.ndim > 1 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + offset)
        for key, buffer in theirs.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    ours = build_model(ModelConfig(name=name, args=args), vocab_size=97, device="cpu")
    import_hf(tmp_path, ours, names=DEEPSEEK if name.startswith("deepseek") else QWEN3)

    tokens = torch.randint(97, (2, 40), generator=generator)
    with torch.no_grad():
        got, want = ours(tokens), theirs(tokens).logits
    assert float(want.std()) > 0.3
    # float32 rounding of 2 to 3 layers, in another order of summation
    assert float((got - want).abs().max()) < 1e-5 * float(want.abs().max())
