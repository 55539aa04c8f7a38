"""Small models of Hugging Face's transformers, with random weights, for the tests that cut whole models."""

import torch
import transformers as hf

_TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_BERT = {**_TEXT, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SEQ2SEQ = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "dropout_rate": 0.0}
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2}

FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
            bos_token_id=1, eos_token_id=2,
        )
    ),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_GROUPED, tie_word_embeddings=True, sliding_window=4, query_pre_attn_scalar=8)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, tie_word_embeddings=True)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_EXPERTS, num_local_experts=4)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_SEQ2SEQ, max_position_embeddings=32)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**_VISION, num_labels=5)),
    # the rest runs in slow tests
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_GROUPED, tie_word_embeddings=True, sliding_window=4)),
    "gemma3n": lambda: hf.Gemma3nForCausalLM(
        hf.Gemma3nTextConfig(
            **{**_GROUPED, "intermediate_size": [48] * 4}, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
            num_kv_shared_layers=0, laurel_rank=4, altup_num_inputs=2, sliding_window=4,
            layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.0] * 4,
        )
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GROUPED | {"head_dim": 8})),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_EXPERTS, num_experts=4, moe_intermediate_size=16, decoder_sparse_step=1)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**_EXPERTS, num_local_experts=4, sliding_window=4)),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{k: v for k, v in _EXPERTS.items() if k not in ("head_dim", "num_key_value_heads")}, num_key_value_heads=4,
            moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
            first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        )
    ),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, state_size=4, pad_token_id=0)
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_TEXT, num_key_value_heads=2)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_TEXT, hidden_dropout=0.0, attention_dropout=0.0)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0, pad_token_id=1, bos_token_id=1, eos_token_id=2,
        )
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_BERT)),
    "deberta_v2": lambda: hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(**_BERT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    ),
    "modernbert": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(**_TEXT, max_position_embeddings=32, cls_token_id=1, sep_token_id=2)
    ),
    "mt5": lambda: hf.MT5ForConditionalGeneration(hf.MT5Config(**_T5)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**_SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=16)
    ),
    "dinov2": lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**_VISION, num_labels=5)),
    "swin": lambda: hf.SwinForImageClassification(
        hf.SwinConfig(
            embed_dim=16, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2], image_size=32, patch_size=2, window_size=2,
            num_labels=5, hidden_dropout_prob=0.0, drop_path_rate=0.0,
        )
    ),
    "convnext": lambda: hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1], image_size=32, num_labels=5)
    ),
    "clip": lambda: hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**_TEXT, "num_hidden_layers": 3, "max_position_embeddings": 16},
            vision_config={**_VISION, "num_hidden_layers": 3}, projection_dim=16,
        )
    ),
    "llava": lambda: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**{**_VISION, "image_size": 8}, projection_dim=16),
            text_config=hf.LlamaConfig(**_GROUPED), image_token_id=60,
        )
    ),
}  # fmt: skip
FEW = ["llama", "gpt2", "gemma2", "qwen3", "mixtral", "t5", "bart", "vit"]


def build(name):
    """The model in float64, its experts on a path that has it, and 8 microbatches with their targets."""
    torch.manual_seed(0)
    model = FAMILIES[name]().double()
    for config in (getattr(m, "config", None) for m in model.modules()):
        if config is not None:
            config._experts_implementation = "eager"
    ids = [torch.randint(3, 60, (2, 7)) for _ in range(8)]
    if name in ("clip", "llava"):
        size = model.config.vision_config.image_size
        images = [torch.randn(2, 3, size, size, dtype=torch.float64) for _ in ids]
        if name == "llava":
            for i in ids:
                i[:, 1:5] = 60
        more = {"return_loss": True} if name == "clip" else {}
        return model, [{"input_ids": i, "pixel_values": x, **more} for i, x in zip(ids, images, strict=True)], ids
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 32)
        images = [{"pixel_values": torch.randn(2, 3, size, size, dtype=torch.float64)} for _ in ids]
        return model, images, [torch.randint(5, (2,)) for _ in ids]
    if model.main_input_name == "input_features":
        sounds = [torch.randn(2, 8, 32, dtype=torch.float64) for _ in ids]
        return model, [{"input_features": x, "decoder_input_ids": i} for i, x in zip(ids, sounds, strict=True)], ids
    inputs = [{"input_ids": i} for i in ids]
    if name != "mamba":
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[1, -2:] = 0
        inputs = [{**x, "attention_mask": mask} for x in inputs]
    if model.config.is_encoder_decoder:
        inputs = [{**x, "decoder_input_ids": x["input_ids"].flip(1)} for x in inputs]
    return model, inputs, ids


def loss(output, target):
    """The model's own loss, or cross-entropy."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    logits = output.logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1) if logits.dim() == 3 else logits, target.flatten())
