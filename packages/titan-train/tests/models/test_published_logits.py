"""Every family gives transformers' logits from transformers' weights, and refuses weights of another configuration.

Skipped where transformers is not installed.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_ckpt import import_hf
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.models.common.moe.router import Router
from titan_train.models.deepseek.hf import DEEPSEEK_HF
from titan_train.models.gpt.hf import GPT_HF
from titan_train.models.llama.hf import LLAMA_HF
from titan_train.models.qwen3.hf import QWEN3_HF
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
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
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


def deepseek_v3(rope: dict[str, Any], **changes: Any) -> nn.Module:
    config = transformers.DeepseekV3Config(
        **SMALL | changes, **LATENT, **EXPERTS, q_lora_rank=32, n_shared_experts=1, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True, rope_parameters=rope,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def deepseek_v2(groups: int = 1, **changes: Any) -> nn.Module:
    rope = PLAIN if groups == 1 else YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
    config = transformers.DeepseekV2Config(
        **SMALL | changes, **LATENT, **EXPERTS, q_lora_rank=None, n_shared_experts=2, n_group=groups,
        topk_group=max(1, groups // 2), routed_scaling_factor=1.0 if groups == 1 else 4.0, norm_topk_prob=False,
        topk_method="greedy" if groups == 1 else "group_limited_greedy", rope_parameters=rope,
    )  # fmt: skip
    return transformers.DeepseekV2ForCausalLM(config)


def llama(**rope: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, num_hidden_layers=2, num_key_value_heads=4, head_dim=16, max_position_embeddings=640,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5} | rope,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=512)
    return transformers.GPT2LMHeadModel(config)


STRETCHED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMA_ARGS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "norm_eps": 1e-6}
V2 = {
    "q_lora_rank": 0, "scores": "softmax", "normalize_weights": False, "bias_rate": 0.0, "route_scale": 1.0,
    "num_shared_experts": 2, "num_groups": 1, "top_groups": 1,
}  # fmt: skip
V2_GROUPS = V2 | {
    "num_groups": 4, "top_groups": 2, "group_score": "max", "route_scale": 4.0, "rope_factor": 40.0,
    "rope_original_seq_len": 16, "rope_mscale": 0.7,
}  # fmt: skip
KEY_MAPS = {
    "deepseek": DEEPSEEK_HF.key_map,
    "qwen3": QWEN3_HF.key_map,
    "llama3": LLAMA_HF.key_map,
    "gpt": GPT_HF.key_map,
}


def take_weights(ours: nn.Module, theirs: nn.Module, folder: Path, name: str) -> None:
    """From the published model's folder."""
    theirs.save_pretrained(folder)  # type: ignore[operator]
    import_hf(folder, ours, names=KEY_MAPS[name.split("_")[0]])


@pytest.mark.parametrize(
    ("name", "args", "published"),
    [
        ("qwen3_debug", {}, qwen3),
        ("qwen3_moe_debug", {}, lambda: qwen3(num_experts=8, norm_topk_prob=True)),
        ("deepseek_debug", {}, lambda: deepseek_v3(PLAIN)),
        ("deepseek_debug", {"rope_factor": 40.0, "rope_original_seq_len": 16}, lambda: deepseek_v3(YARN)),
        ("deepseek_debug", {"norm_eps": 1e-2}, lambda: deepseek_v3(PLAIN, rms_norm_eps=1e-2)),
        ("deepseek_debug", V2, deepseek_v2),
        ("deepseek_debug", V2 | {"norm_eps": 1e-2}, lambda: deepseek_v2(rms_norm_eps=1e-2)),
        ("deepseek_debug", V2_GROUPS, lambda: deepseek_v2(groups=4)),
        ("llama3_debug", LLAMA_ARGS, llama),
        ("llama3_debug", LLAMA_ARGS | {"rope_factor": 8.0, "rope_original_seq_len": 64}, lambda: llama(**STRETCHED)),
        ("gpt_debug", {}, gpt2),
    ],
    ids=[
        "qwen3", "qwen3-moe", "deepseek-v3", "deepseek-v3-yarn", "deepseek-v3-eps", "deepseek-v2", "deepseek-v2-eps",
        "deepseek-v2-groups-yarn", "llama", "llama-stretched", "gpt2",
    ],
)  # fmt: skip
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
    ours = build_model(ModelConfig(name=name, args=args), vocab_size=97, device="cpu")
    take_weights(ours, theirs, tmp_path, name)

    tokens = torch.randint(97, (2, 40), generator=generator)
    with torch.no_grad():
        got, want = ours(tokens), theirs(tokens).logits
    assert float(want.std()) > 0.3
    # float32 rounding of 2 to 3 layers, in another order of summation
    assert float((got - want).abs().max()) < 1e-5 * float(want.abs().max())


def test_a_v3_group_score_gives_other_logits_for_v2_weights(tmp_path: Path) -> None:
    """What the field decides: the same weights under V3's rule send tokens elsewhere."""
    theirs = deepseek_v2(groups=4).eval()
    with torch.no_grad():
        for i, parameter in enumerate(theirs.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.copy_(noise * 0.1 + (1.0 if parameter.ndim == 1 else 0.0))
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    ours = build_model(ModelConfig(name="deepseek_debug", args=V2_GROUPS), vocab_size=97, device="cpu")
    import_hf(tmp_path, ours, names=DEEPSEEK_HF.key_map)
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        right = ours(tokens)
        for layer in ours.modules():
            if isinstance(layer, Router):
                layer.args = dataclasses.replace(layer.args, group_score="top2_sum")
        wrong = ours(tokens)
    assert float((right - wrong).abs().max()) > 1e-2 * float(right.abs().max())
