"""Names that Llama, Qwen3 and DeepSeek share in Hugging Face checkpoints, as pairs of titan-ckpt's key maps."""

from titan_ckpt import Pair

IGNORED = (r".*rotary_emb\.inv_freq",)
"""Tables in old checkpoints that models here compute."""

NATIVE_ONLY = (r"(?:.*\.)?(?:freqs_cis|rope_cache)", r".*\.moe\.tokens_per_expert")
"""Rotary tables of Meta's code and torchtitan, and torchtitan's counter: with the other names they share, in no checkpoint."""

DECODER = (
    Pair("tok_embeddings.weight", "model.embed_tokens.weight"),
    Pair("norm.weight", "model.norm.weight"),
    Pair("lm_head.weight", "lm_head.weight"),
    Pair("output.weight", "lm_head.weight"),  # the head's name in Meta's code and torchtitan
    Pair("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    Pair("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
)

ATTENTION = tuple(
    Pair(f"layers.{{i}}.attention.w{x}.{kind}", f"model.layers.{{i}}.self_attn.{x}_proj.{kind}", rotary=x in "qk")
    for x in "qkvo"
    for kind in ("weight", "bias")
)

PROJECTIONS = (("w1", "gate"), ("w2", "down"), ("w3", "up"))
"""The projections of `SwiGLU`, and their names."""

DENSE = tuple(
    Pair(f"layers.{{i}}.feed_forward.{native}.weight", f"model.layers.{{i}}.mlp.{hf}_proj.weight")
    for native, hf in PROJECTIONS
)

_EXPERTS = "model.layers.{i}.mlp.experts"

EXPERTS = (
    # stacked here: w1, w3 [E, F, D] and w2 [E, D, F]; there one tensor per expert, or gate and up in one
    *(Pair(f"layers.{{i}}.moe.experts.{w}", f"{_EXPERTS}.{{j}}.{x}_proj.weight") for w, x in PROJECTIONS),
    Pair("layers.{i}.moe.experts.w1", f"{_EXPERTS}.gate_up_proj", part=(0, 2, 1)),
    Pair("layers.{i}.moe.experts.w3", f"{_EXPERTS}.gate_up_proj", part=(1, 2, 1)),
    Pair("layers.{i}.moe.experts.w2", f"{_EXPERTS}.down_proj"),
    *(Pair(f"layers.{{i}}.moe.experts.{{j}}.{w}.weight", f"{_EXPERTS}.{{j}}.{x}_proj.weight") for w, x in PROJECTIONS),
    Pair("layers.{i}.moe.router.gate.weight", "model.layers.{i}.mlp.gate.weight"),
)
