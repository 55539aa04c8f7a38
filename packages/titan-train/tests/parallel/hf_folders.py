"""Tiny folders as transformers writes them, one for each family, with weights that are not their initial ones."""

from pathlib import Path
from typing import Any

import torch

_BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "head_dim": 8,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GATED_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}  # fmt: skip
_LATENT_HEADS = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                 "v_head_dim": 8}  # fmt: skip
_LATENT = _LATENT_HEADS | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
                           "n_group": 1, "topk_group": 1}  # fmt: skip
_INDEXED = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 8}
_LIKE_LLAMA: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "vaultgemma": {"sliding_window": 6, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "attention_bias": True},
    "granite_swa": {"sliding_window": 6, "logits_scaling": 2.0},
    "olmo": {"clip_qkv": 0.5},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5, "tie_word_embeddings": True},
    "cohere2": {"sliding_window": 6, "logit_scale": 0.5, "tie_word_embeddings": True},
    "starcoder2": {"sliding_window": 7},
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "glm": {},
    "glm4": {},
    "exaone4": {"sliding_window": 6, "sliding_window_pattern": 2},
    "arcee": {"mlp_bias": True},
    "apertus": {},
    "nemotron": {},
    "phi": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "qk_layernorm": True},
    "persimmon": {"num_key_value_heads": 4},
    "helium": {},
    "nanochat": {},
    "cwm": {"sliding_window": 7},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "hyperclovax": {},
    "minicpm3": _LATENT_HEADS,
    "youtu": _LATENT_HEADS,
}  # fmt: skip
_LIKE_LLAMA_ROUTED: dict[str, dict[str, Any]] = {
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "granitemoe_swa": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "axk1": _LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
              "first_k_dense_replace": 1, "norm_topk_prob": True},
    "mellum": _ROUTED | {"sliding_window": 6},
    "solar_open": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "exaone_moe": _ROUTED | {"sliding_window": 6, "sliding_window_pattern": 2},
    "hy_v3": _ROUTED,
    "kolibri1": _ROUTED | {"shared_expert_intermediate_size": 16, "sliding_window": 6},
    "afmoe": _ROUTED | {"sliding_window": 6, "global_attn_every_n_layers": 2},
    "laguna": _ROUTED | {"shared_expert_intermediate_size": 16, "sliding_window": 6,
                         "num_attention_heads_per_layer": [4, 8, 4, 8],
                         "layer_types": ["full_attention", "sliding_attention"] * 2},
    "flint": _ROUTED | {"shared_expert_intermediate_size": 16, "sliding_window": 6, "mlp_only_layers": [0]},
    "mimo_v2_flash": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "v_head_dim": 4,
                      "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "beam": _ROUTED | {"sliding_window": 6, "n_group": 2, "topk_group": 1},
}  # fmt: skip
FOLDERS: dict[str, dict[str, Any]] = {
    **_LIKE_LLAMA,
    **_LIKE_LLAMA_ROUTED,
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
    "mistral": {"sliding_window": 7},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 9},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
                    "layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmo2": {},
    "phi3": {"tie_word_embeddings": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "sliding_window": 11},
    "gpt_neox": {"rotary_pct": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _ROUTED | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
    "qwen3_moe": _ROUTED | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
                    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
                    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
                                        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16}},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "initializer_range": 0.02},
    "qwen3_next": _GATED_DELTA | _ROUTED | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA | _ROUTED | {"shared_expert_intermediate_size": 16},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
                 "n_shared_experts": 1, "use_qk_norm": True},
    "glm4_moe_lite": _LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "glm_moe_dsa": _LATENT | _INDEXED | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "deepseek_v32": _LATENT | _INDEXED,
    "deepseek_v4": {"num_key_value_heads": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16,
                    "o_groups": 2, "o_lora_rank": 8, "hc_mult": 3, "index_n_heads": 16, "index_head_dim": 8,
                    "index_topk": 2, "sliding_window": 7, "swiglu_limit": 0.5, "partial_rotary_factor": 0.5,
                    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                                    "compressed_sparse_attention"],
                    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
                    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"]},
    "olmo3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 4,
                    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "granitemoehybrid": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
                         "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 8,
                         "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8, "embedding_multiplier": 3.0,
                         "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
                   "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8, "n_routed_experts": 4,
                   "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
    "kimi_linear": _LATENT | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
                              "linear_head_dim": 8, "linear_num_heads": 4, "num_experts": 4, "num_experts_per_token": 2,
                              "first_k_dense_replace": 0},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
                    "attention_chunk_size": 40, "floor_scale": 40, "no_rope_layers": [1, 0, 1, 1]},
    "ministral": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "ministral3": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
                                       "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                       "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}},
    "gemma4_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16,
                    "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0},
    "gemma3n_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
                     "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "laurel_rank": 8,
                     "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0], "tie_word_embeddings": True},
    "mistral4": _LATENT | {"first_k_dense_replace": 1,
                           "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
                                               "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                               "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}},
    "ernie4_5": {"tie_word_embeddings": True},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
                     "moe_layer_start_index": 1},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    # without a plan
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "bloom": {"n_layer": 4, "n_head": 4},
    # masks are made without positions
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0},
    "biogpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.0},
    # states and convolutions run over the end of a document
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 8},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
              "mamba_chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
                  "mamba_chunk_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "jamba": {"mamba_dt_rank": 4, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_offset": 1, "attn_layer_period": 2,
              "use_mamba_kernels": False},
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8,
                "layer_types": ["full_attention", "linear_attention"] * 2},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


LIKE_LLAMA, LIKE_LLAMA_ROUTED = tuple(_LIKE_LLAMA), tuple(_LIKE_LLAMA_ROUTED)
"""Families of Llama's structure with small changes; those with experts."""
SHARP = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid", "gemma4_text")
"""Whose scores are not scaled down, or whose state answers keys of length 1: larger weights make rounding grow each step."""


PUBLISHED = {
    "deepseek_v4": {
        "model.embed_tokens.": "embed.",
        "model.hc_head.hc_": "hc_head_",
        "model.": "",
        ".attn.norm.": ".attn.kv_norm.",
    }
}
"""Parts of names as transformers writes them to those that a family is published with, which transformers reads."""


def auto_class(kind: str) -> Any:
    """transformers' class that makes and reads such a model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # where transformers has this decoder, which sees nothing
    return AutoModelForImageTextToText if kind == "mistral4" else AutoModelForCausalLM


def make(folder: Path, kind: str, *, vocab_size: int = 96, seed: int = 0, **changes: Any) -> Path:
    """Write a folder with transformers' own ``save_pretrained``."""
    from transformers import CONFIG_MAPPING

    base = {key: value for key, value in _BASE.items() if "kv_lora_rank" not in FOLDERS[kind] or key != "head_dim"}
    config = CONFIG_MAPPING[kind](**base | FOLDERS[kind] | {"vocab_size": vocab_size} | changes)
    torch.manual_seed(seed)
    model = auto_class(kind).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        share = 0.5 if kind in SHARP else 1.0
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.1) * share
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += torch.randn_like(buffer) * 0.1
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), 4).argsort(dim=1)[:, : buffer.shape[1]])
    model.save_pretrained(folder)
    if kind in PUBLISHED:
        rename(folder / "model.safetensors", PUBLISHED[kind])
    return folder


SEEING: dict[str, dict[str, Any]] = {
    "qwen3_5": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
                "num_position_embeddings": 16, "patch_size": 4},
    "llama4": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
               "vision_output_dim": 16, "image_size": 8, "patch_size": 4, "projector_input_dim": 16,
               "projector_output_dim": 16},
}  # fmt: skip
"""Models that also see, whose decoders have plans: what sees."""
SEEING["qwen3_5_moe"] = SEEING["qwen3_5"]


def make_seeing(folder: Path, kind: str, *, vocab_size: int = 96) -> Path:
    """Write a folder of a model that also sees, by the names of its modules, with stacked experts as it is published."""
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    text = _BASE | FOLDERS[f"{kind}_text"] | {"vocab_size": vocab_size}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=SEEING[kind])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.15 if parameter.ndim == 1 else 0.05)
    model.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return folder


def rename(file: Path, parts: dict[str, str]) -> None:
    """Change names of the tensors of a file."""
    from safetensors.torch import load_file, save_file

    def renamed(name: str) -> str:
        for theirs, published in parts.items():
            name = name.replace(theirs, published)
        return name

    save_file({renamed(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
