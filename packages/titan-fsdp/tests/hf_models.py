"""Small models of Hugging Face's transformers, one for each way a family builds its tables and names its blocks."""

from collections.abc import Callable
from typing import Any

import pytest

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()

DECODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TWO_TOWERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
ENCODER_DECODER = {"d_model": 32, **TWO_TOWERS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
LATENT = {
    "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip
IMAGES = {"image_size": 16, "patch_size": 4}


def _build(model: str, config: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def _decoder(name: str, **options: Any) -> Callable[[], Any]:
    return _build(f"{name}ForCausalLM", f"{name}Config", **DECODER, **TOKENS, **options)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _decoder("Llama", num_key_value_heads=2),
    "llama3-rope": _decoder("Llama", num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
    "gemma": _decoder("Gemma", num_key_value_heads=2, head_dim=8),
    "qwen3": _decoder("Qwen3", num_key_value_heads=2, head_dim=8),
    "gpt-neox": _decoder("GPTNeoX"),
    "mixtral": _decoder("Mixtral", num_key_value_heads=2, num_local_experts=4),
    "deepseek-v3": _decoder("DeepseekV3", num_key_value_heads=4, **LATENT),
    "falcon": _decoder("Falcon"),
    "gpt2": _build("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, **TOKENS),
    "gpt-j": _build("GPTJForCausalLM", "GPTJConfig", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **TOKENS),
    "bert": _build("BertForMaskedLM", "BertConfig", **DECODER, vocab_size=60),
    "albert": _build("AlbertForMaskedLM", "AlbertConfig", **DECODER, embedding_size=16, vocab_size=60),
    "t5": _build(
        "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=60
    ),
    "bart": _build("BartForConditionalGeneration", "BartConfig", **ENCODER_DECODER, **TOKENS),
    "whisper": _build(
        "WhisperForConditionalGeneration", "WhisperConfig", **ENCODER_DECODER, **TOKENS, max_source_positions=30,
        max_target_positions=20, num_mel_bins=8, decoder_start_token_id=1,
    ),
    "vit": _build("ViTForImageClassification", "ViTConfig", **DECODER, **IMAGES),
    "resnet": _build(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2],
        layer_type="basic",
    ),
    "clip": _build(
        "CLIPModel", "CLIPConfig", text_config={**DECODER, **TOKENS}, vision_config={**DECODER, **IMAGES}
    ),
}  # fmt: skip
