"""Key maps of Llama, Qwen 3 and DeepSeek, as a package of model families has them."""

from titan_ckpt import KeyMap, Pair

_ROTARY_TABLES = (r".*rotary_emb\.inv_freq",)

# Meta's and torchtitan's rotary tables, and torchtitan's counter of tokens per expert.
_NATIVE_ONLY = (r"(?:.*\.)?(?:freqs_cis|rope_cache)", r".*\.moe\.tokens_per_expert")

_COMMON = (
    Pair("tok_embeddings.weight", "model.embed_tokens.weight"),
    Pair("norm.weight", "model.norm.weight"),
    Pair("lm_head.weight", "lm_head.weight"),
    Pair("output.weight", "lm_head.weight"),  # the head's name in Meta's code and torchtitan's models
    Pair("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    Pair("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
)

_ATTENTION = tuple(
    Pair(f"layers.{{i}}.attention.w{x}.{kind}", f"model.layers.{{i}}.self_attn.{x}_proj.{kind}", rotary=x in "qk")
    for x in "qkvo"
    for kind in ("weight", "bias")
)

_PROJECTIONS = (("w1", "gate"), ("w2", "down"), ("w3", "up"))

_DENSE = tuple(
    Pair(f"layers.{{i}}.feed_forward.{native}.weight", f"model.layers.{{i}}.mlp.{hf}_proj.weight")
    for native, hf in _PROJECTIONS
)

_HF_EXPERTS = "model.layers.{i}.mlp.experts"

_EXPERTS = (
    # Stacked in the native model: w1, w3 [E, F, D] and w2 [E, D, F].
    *(Pair(f"layers.{{i}}.moe.experts.{w}", f"{_HF_EXPERTS}.{{j}}.{x}_proj.weight") for w, x in _PROJECTIONS),
    Pair("layers.{i}.moe.experts.w1", f"{_HF_EXPERTS}.gate_up_proj", part=(0, 2, 1)),
    Pair("layers.{i}.moe.experts.w3", f"{_HF_EXPERTS}.gate_up_proj", part=(1, 2, 1)),
    Pair("layers.{i}.moe.experts.w2", f"{_HF_EXPERTS}.down_proj"),
    # One module per expert in the native model.
    *(
        Pair(f"layers.{{i}}.moe.experts.{{j}}.{w}.weight", f"{_HF_EXPERTS}.{{j}}.{x}_proj.weight")
        for w, x in _PROJECTIONS
    ),
    Pair("layers.{i}.moe.router.gate.weight", "model.layers.{i}.mlp.gate.weight"),
)

_HEAD_NORMS = tuple(
    Pair(f"layers.{{i}}.attention.{x}_norm.weight", f"model.layers.{{i}}.self_attn.{x}_norm.weight", rotary=True)
    for x in "qk"
)

_LATENT_ATTENTION = tuple(
    Pair(f"layers.{{i}}.attention.{name}.weight", f"model.layers.{{i}}.self_attn.{hf}.weight")
    for name, hf in (
        ("wq", "q_proj"),
        ("wq_a", "q_a_proj"),
        ("q_norm", "q_a_layernorm"),
        ("wq_b", "q_b_proj"),
        ("wkv_a", "kv_a_proj_with_mqa"),
        ("kv_norm", "kv_a_layernorm"),
        ("wkv_b", "kv_b_proj"),
        ("wo", "o_proj"),
    )
)

_SHARED_EXPERTS = (
    *(
        Pair(
            f"layers.{{i}}.moe.shared_experts.{native}.weight",
            f"model.layers.{{i}}.mlp.shared_experts.{hf}_proj.weight",
        )
        for native, hf in _PROJECTIONS
    ),
    Pair("layers.{i}.moe.expert_bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),
)

LLAMA = KeyMap("llama", (*_COMMON, *_ATTENTION, *_DENSE), _ROTARY_TABLES, _NATIVE_ONLY)
"""Llama 1 to 3.3 and what shares their layout (Mistral, for one)."""

QWEN3 = KeyMap("qwen3", (*_COMMON, *_ATTENTION, *_HEAD_NORMS, *_DENSE, *_EXPERTS), _ROTARY_TABLES, _NATIVE_ONLY)
"""Qwen 3, dense and mixture of experts."""

DEEPSEEK = KeyMap(
    "deepseek", (*_COMMON, *_LATENT_ATTENTION, *_DENSE, *_EXPERTS, *_SHARED_EXPERTS), _ROTARY_TABLES, _NATIVE_ONLY
)
"""DeepSeek V2 and V3, float8 weights with block scales too. V3's extra prediction layer is left out with
``DEEPSEEK.ignoring(r"model\\.layers\\.61\\..*")``."""

KEY_MAPS = {key_map.family: key_map for key_map in (LLAMA, QWEN3, DEEPSEEK)}
