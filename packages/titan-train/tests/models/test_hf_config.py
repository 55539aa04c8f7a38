"""Weights are refused where their ``config.json`` describes another model, field by field, before a weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_ckpt import import_hf
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.models.llama.hf import LLAMA_HF
from torch import nn

LLAMA_JSON: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 192, "vocab_size": 97, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 512, "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GPT_JSON: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 97,
    "activation_function": "gelu_new", "attn_pdrop": 0.1, "summary_use_proj": True,
}  # fmt: skip
QWEN_JSON: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 192, "moe_intermediate_size": 96, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "vocab_size": 97, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False, "max_window_layers": 2,
}  # fmt: skip
V3_JSON: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "intermediate_size": 192, "vocab_size": 97, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 96, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": None, "attention_bias": False,
    "num_nextn_predict_layers": 1, "hidden_act": "silu", "ep_size": 1,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3_debug", LLAMA_JSON),
    "gpt": ("gpt_debug", GPT_JSON),
    "qwen3": ("qwen3_moe_debug", QWEN_JSON),
    "deepseek": ("deepseek_debug", V3_JSON),
}


def check(family: str, config: dict[str, Any], **args: Any) -> None:
    model: Any = build_model(ModelConfig(name=MODELS[family][0], args=args), vocab_size=97)
    model.check_hf_config(config)


@pytest.mark.parametrize("family", MODELS)
def test_the_configuration_of_the_model_itself_is_accepted(family: str) -> None:
    check(family, MODELS[family][1])


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"rope_theta": 10000.0}, ["rope_theta=500000.0 should be 10000.0"]),
        ("llama", {"rope_scaling": LLAMA3_SCALING}, ["rope_factor=1.0 should be 8.0"]),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type='linear'"]),
        ("llama", {"rms_norm_eps": 1e-6}, ["norm_eps=1e-05 should be 1e-06"]),
        ("llama", {"tie_word_embeddings": True}, ["tied_embeddings=False should be True"]),
        ("llama", {"attention_bias": True}, ["attention_bias=True"]),
        ("llama", {"mlp_bias": True}, ["mlp_bias=True"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ("llama", {"num_key_value_heads": 4}, ["num_kv_heads=2 should be 4"]),
        ("llama", {"head_dim": 32}, ["head_dim=16 should be 32"]),
        ("llama", {"sliding_window": 4096}, ["sliding_window=4096"]),
        ("llama", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping=30.0"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ("llama", {"model_type": "qwen3"}, ["model_type='qwen3'", "'llama' or 'mistral'"]),
        ("llama", {"hidden_size": None}, ["hidden_size is missing"]),
        ("gpt", {"activation_function": "gelu"}, ["activation_function='gelu'"]),
        ("gpt", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx=True"]),
        ("gpt", {"layer_norm_epsilon": 1e-6}, ["norm_eps=1e-05 should be 1e-06"]),
        ("gpt", {"tie_word_embeddings": False}, ["tied_embeddings=True should be False"]),
        ("gpt", {"n_positions": 1024}, ["max_seq_len=512 should be 1024"]),
        ("gpt", {"n_inner": 64}, ["ffn_dim=256 should be 64"]),
        ("qwen3", {"norm_topk_prob": False}, ["normalize_weights=True should be False"]),
        ("qwen3", {"num_experts_per_tok": 4}, ["experts_per_token=2 should be 4"]),
        ("qwen3", {"mlp_only_layers": [0]}, ["mlp_only_layers=[0]"]),
        ("qwen3", {"decoder_sparse_step": 2}, ["decoder_sparse_step=2"]),
        ("qwen3", {"use_sliding_window": True}, ["use_sliding_window=True"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias=True"]),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "rope_theta": None}, ["rope_theta"]),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
        ("deepseek", {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "group_limited_greedy",
                      "norm_topk_prob": False}, ["group_score='top2_sum' should be 'max'", "scores='sigmoid' should be"]),
        ("deepseek", {"topk_group": 3}, ["top_groups=2 should be 3"]),
        ("deepseek", {"n_group": 8}, ["num_groups=4 should be 8"]),
        ("deepseek", {"routed_scaling_factor": 1.0}, ["route_scale=2.5 should be 1.0"]),
        ("deepseek", {"norm_topk_prob": False}, ["normalize_weights=True should be False"]),
        ("deepseek", {"scoring_func": "softmax"}, ["scoring_func='softmax'"]),
        ("deepseek", {"rope_scaling": YARN}, ["rope_factor=1.0 should be 40.0"]),
        ("deepseek", {"rope_scaling": YARN | {"mscale": 0.707}}, ["mscale=0.707 and mscale_all_dim=1.0"]),
        ("deepseek", {"rope_interleave": False}, ["rope_interleave=False"]),
        ("deepseek", {"moe_layer_freq": 2}, ["moe_layer_freq=2"]),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_every_setting_that_changes_the_logits_is_compared_by_name(
    family: str, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        check(family, MODELS[family][1] | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_both_spellings_of_rotary_settings_mean_the_same() -> None:
    args = {"rope_factor": 8.0, "rope_original_seq_len": 8192}
    check("llama", LLAMA_JSON | {"rope_scaling": LLAMA3_SCALING}, **args)
    newer = {key: value for key, value in LLAMA_JSON.items() if key != "rope_theta"}
    check("llama", newer | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}}, **args)


def test_what_only_training_uses_may_differ() -> None:
    older = {"predict_special_tokens": True, "n_special": 0, "output_past": True, "_num_labels": 1, "n_ctx": 512}
    check("gpt", GPT_JSON | older)  # gpt2-medium, -large and -xl, distilgpt2
    check("deepseek", V3_JSON, balance_loss=0.5, bias_rate=0.1, z_loss=0.1)


def folder_of(path: Path, config: dict[str, Any] | None) -> Path:
    from safetensors.torch import save_file

    model = build_model(ModelConfig(name="llama3_debug"), vocab_size=97, device="cpu")
    path.mkdir()
    save_file(
        {LLAMA_HF.key_map.to_hf(name): p.detach().contiguous() for name, p in model.named_parameters()},
        path / "model.safetensors",
    )
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def test_importing_weights_compares_first_and_leaves_a_refusing_model_untouched(tmp_path: Path) -> None:
    model: nn.Module = build_model(ModelConfig(name="llama3_debug"), vocab_size=97, device="cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"rope_theta=500000\.0 should be 10000\.0"):
        import_hf(folder_of(tmp_path / "other", LLAMA_JSON | {"rope_theta": 10000.0}), model, names=LLAMA_HF.key_map)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    import_hf(folder_of(tmp_path / "same", LLAMA_JSON), model, names=LLAMA_HF.key_map)
    assert not torch.equal(model.get_parameter("lm_head.weight"), before["lm_head.weight"])


def test_a_folder_without_config_is_imported_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build_model(ModelConfig(name="llama3_debug"), vocab_size=97, device="cpu")
    import_hf(folder_of(tmp_path / "bare", None), model, names=LLAMA_HF.key_map)
    assert "no config.json" in caplog.text
