"""The plans of transformers' families, by ``model_type``, and those that installed packages add.

An installed package adds a plan by an entry point of the group ``titan_train.hf_plans``, named for the ``model_type``; it
comes before a plan here for the same family:

    [project.entry-points."titan_train.hf_plans"]
    doge = "my_package.plans:DOGE"
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from titan_train.models.common.tensor_styles import Style, StyleTable
from titan_train.models.hf.plan import STACKED, Count, HFPlan

ENTRY_POINT_GROUP = "titan_train.hf_plans"
_logger = logging.getLogger(__name__)


def _decoder(attention: StyleTable, **more: Style) -> StyleTable:
    """The table of a family in Llama's names, with these styles inside its attention."""
    return {
        "model.embed_tokens": "embedding",
        "model.layers.*.*layernorm": "replicated",
        "model.layers.*.self_attn": "region",
        **{f"model.layers.*.self_attn.{name}": style for name, style in attention.items()},
        "model.layers.*.self_attn.o_proj": "rowwise",
        **_swiglu("model.layers.*.mlp"),
        "model.norm": "replicated",
        "lm_head": "head",
        **{f"model.layers.*.mlp.{name}": style for name, style in more.items()},
    }


def _swiglu(name: str) -> StyleTable:
    return {
        name: "region",
        f"{name}.gate_proj": "colwise",
        f"{name}.up_proj": "colwise",
        f"{name}.down_proj": "rowwise",
    }


def _separate(prefix: str, gate: str, down: str, up: str) -> Mapping[str, str]:
    return {
        "w1": f"{prefix}.{{j}}.{gate}.weight",
        "w2": f"{prefix}.{{j}}.{down}.weight",
        "w3": f"{prefix}.{{j}}.{up}.weight",
    }


_QKV: StyleTable = {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"}
_HEAD_NORMS: StyleTable = {"[qk]_norm": "replicated"}
_WIDE_NORMS: StyleTable = {"q_norm": "heads_norm", "k_norm": "kv_heads_norm"}
_LATENT: StyleTable = {
    "q_proj": "heads",
    "q_a_proj": "replicated",
    "q_a_layernorm": "replicated",
    "q_b_proj": "heads",
    "kv_a_proj_with_mqa": "replicated",
    "kv_a_layernorm": "replicated",
    "kv_b_proj": "heads",
}
_NEOX: StyleTable = {
    "gpt_neox.embed_in": "embedding",
    "gpt_neox.layers.*.*layernorm": "replicated",
    "gpt_neox.layers.*.attention": "region",
    "gpt_neox.layers.*.attention.query_key_value": "heads",  # rows are q, k and v of one head after the other
    "gpt_neox.layers.*.attention.dense": "rowwise",
    "gpt_neox.layers.*.mlp": "region",
    "gpt_neox.layers.*.mlp.dense_h_to_4h": "colwise",
    "gpt_neox.layers.*.mlp.dense_4h_to_h": "rowwise",
    "gpt_neox.final_layer_norm": "replicated",
    "lm_head": "head",
}
_PHI: StyleTable = {
    **_decoder({"qkv_proj.q": "heads", "qkv_proj.[kv]": "kv_heads"}),
    "model.layers.*.mlp.gate_up_proj.*": "colwise",
}
_ROUTED: Mapping[str, Style] = {"gate": "replicated", "experts": "replicated"}
_SHARED = _swiglu("model.layers.*.mlp.shared_experts")

_LLAMA = HFPlan(styles=_decoder(_QKV))
_DROPPING = replace(_LLAMA, drops_keywords=True)
_EACH_EXPERT = _separate("mlp.experts", "gate_proj", "down_proj", "up_proj")
_MIXTRAL_EXPERTS = _separate("block_sparse_moe.experts", "w1", "w2", "w3")
_DEEPSEEK = HFPlan(styles={**_decoder(_LATENT, **_ROUTED), **_SHARED}, experts=_EACH_EXPERT)
_SPARSE = HFPlan(
    styles={**_decoder({**_LATENT, "indexer": "replicated"}, **_ROUTED), **_SHARED},
    experts=_EACH_EXPERT,
    own_attention=True,
    lacks={"cp": "each token of its sparse attention chooses its keys among all of the row"},
)
_DEEPSEEK_V4: StyleTable = {
    **_decoder({
        "q_a_proj": "replicated", "q_a_norm": "replicated", "q_b_proj": "heads", "kv_proj": "replicated", "kv_norm": "replicated",
        "sinks": "heads", "compressor": "replicated", "o_a_proj": "groups", "o_b_proj": "rowwise",
    }, gate="positions", experts="replicated"),
    **_SHARED,
    "model.layers.*.*_hc": "replicated",
    "model.hc_head": "replicated",
}  # fmt: skip
_DEEPSEEK_V4_NAMES = {
    "lm_head.": "head.", ".input_layernorm.": ".attn_norm.", ".post_attention_layernorm.": ".ffn_norm.",
    ".attn_hc.": ".hc_attn_", ".ffn_hc.": ".hc_ffn_", ".self_attn.": ".attn.", ".attn.sinks": ".attn.attn_sink",
    ".compressor.indexer.scorer.": ".indexer.", ".compressor.indexer.q_b_proj.": ".indexer.wq_b.",
    ".compressor.indexer.": ".indexer.compressor.", ".compressor.kv_norm.": ".compressor.norm.",
    ".compressor.gate_proj.": ".compressor.wgate.", ".position_bias": ".ape", ".kv_proj.": ".wkv.", ".q_a_norm.": ".q_norm.",
    **{f".{name}_proj.": f".w{name}." for name in ("q_a", "q_b", "o_a", "o_b")}, ".mlp.": ".ffn.",
    ".gate.e_score_correction_bias": ".gate.bias", ".shared_experts.gate_proj.": ".shared_experts.w1.",
    ".shared_experts.down_proj.": ".shared_experts.w2.", ".shared_experts.up_proj.": ".shared_experts.w3.",
}  # fmt: skip
_GATED_DELTA = _decoder({**_QKV, **_HEAD_NORMS})
_GATED_DELTA_ROUTED: StyleTable = {
    **_decoder({**_QKV, **_HEAD_NORMS}, **_ROUTED, shared_expert_gate="replicated"),
    **_swiglu("model.layers.*.mlp.shared_expert"),
}
_LLAMA4: StyleTable = {
    **{name.replace(".mlp", ".feed_forward"): style for name, style in _decoder(_QKV).items()},
    "model.layers.*.feed_forward.router": "replicated",
    "model.layers.*.feed_forward.experts": "replicated",
    **_swiglu("model.layers.*.feed_forward.shared_expert"),
}
_GEMMA4: StyleTable = {
    **_decoder({**_QKV, **_HEAD_NORMS}),
    "model.layers.*.*layernorm_[12]": "replicated",
    "model.layers.*.per_layer_*": "replicated",
    "model.layers.*.post_per_layer_input_norm": "replicated",
    "model.layers.*.router": "replicated",
    "model.layers.*.experts": "replicated",
    "model.embed_tokens_per_layer": "embedding",
    "model.per_layer_*": "replicated",
}
_GEMMA3N: StyleTable = {
    **{
        name: style
        for name, style in _decoder({**_QKV, "[qkv]_norm": "replicated"}).items()
        if ".mlp" not in name  # whole: it keeps what stands out of all of a token's channels
    },
    **{f"model.layers.*.{name}": "replicated" for name in ("mlp", "altup", "laurel", "per_layer_*")},
    "model.layers.*.post_per_layer_input_norm": "replicated",
    "model.embed_tokens_per_layer": "embedding",
    "model.per_layer_*": "replicated",
    "model.altup_*": "replicated",
}
_NEMOTRON_H: StyleTable = {
    "model.embeddings": "embedding",
    "model.layers.*.norm": "replicated",
    **{f"model.layers.*.mixer.{name}": style for name, style in _QKV.items()},
    "model.layers.*.mixer.o_proj": "rowwise",
    "model.layers.*.mixer.up_proj": "colwise",
    "model.layers.*.mixer.down_proj": "rowwise",
    "model.layers.*.mixer.gate": "replicated",
    "model.layers.*.mixer.fc[12]_latent_proj": "replicated",
    "model.layers.*.mixer.experts": "replicated",
    "model.layers.*.mixer.shared_experts": "region",
    "model.layers.*.mixer.shared_experts.up_proj": "colwise",
    "model.layers.*.mixer.shared_experts.down_proj": "rowwise",
    "model.norm_f": "replicated",
    "lm_head": "head",
}
_FINAL_LAYERNORM: StyleTable = {"model.final_layernorm": "replicated"}
_ROUTED_SHARED: StyleTable = {**_decoder({**_QKV, **_HEAD_NORMS}, **_ROUTED), **_SHARED}
_GATE_UP: Mapping[str, Mapping[str, Count]] = {"mlp.gate_up_proj": {"gate": "ffn", "up": "ffn"}}
_GLM = HFPlan(styles={**_decoder(_QKV), "model.layers.*.mlp.gate_up_proj.*": "colwise"}, fused=_GATE_UP)
_APART = {f".conv1d.{part}.": f".{part}_conv1d." for part in "qkv"}
_GRANITE_HYBRID: StyleTable = {
    **_decoder(_QKV),
    "model.layers.*.block_sparse_moe.router": "replicated",
    "model.layers.*.block_sparse_moe.experts": "replicated",
    "model.layers.*.shared_mlp": "region",
    "model.layers.*.shared_mlp.input_linear.*": "colwise",
    "model.layers.*.shared_mlp.output_linear": "rowwise",
}
_GRANITE_MOE = HFPlan(
    styles=_GRANITE_HYBRID,
    feed_forward="block_sparse_moe",
    experts=STACKED,
    fused={"shared_mlp.input_linear": {"gate": "ffn", "up": "ffn"}},
    renamed={
        ".experts.gate_up_proj": ".input_linear.weight",
        ".experts.down_proj": ".output_linear.weight",
        ".router.weight": ".router.layer.weight",
    },
)
_WIDE_ROUTED = HFPlan(styles=_decoder({**_QKV, **_WIDE_NORMS}, **_ROUTED), experts=_EACH_EXPERT)
_CAPPED = HFPlan(
    styles=_decoder(_QKV),
    own_attention=True,
    lacks={"cp": "the scores of its attention are capped, which attention over a cut sequence does not do"},
)

HF_PLANS: Mapping[str, HFPlan] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": HFPlan(styles=_decoder({**_QKV, **_HEAD_NORMS})),
    "gemma3_text": HFPlan(styles=_decoder({**_QKV, **_HEAD_NORMS})),
    "olmo2": HFPlan(styles=_decoder({**_QKV, **_WIDE_NORMS})),
    "phi3": HFPlan(
        styles=_PHI,
        fused={
            "self_attn.qkv_proj": {"q": "query", "k": "key_value", "v": "key_value"},
            **_GATE_UP,
        },
    ),
    "gpt_neox": HFPlan(
        styles=_NEOX, layers="gpt_neox.layers", embedding="gpt_neox.embed_in", norm="gpt_neox.final_layer_norm",
        attention="attention", renamed={"lm_head.": "embed_out."},
    ),
    "mixtral": HFPlan(
        styles=_decoder(_QKV, **_ROUTED), experts=_MIXTRAL_EXPERTS,
        renamed={".{i}.mlp.": ".{i}.block_sparse_moe."},
    ),
    "qwen2_moe": HFPlan(
        styles={
            **_decoder(_QKV, **_ROUTED, shared_expert_gate="replicated"), **_swiglu("model.layers.*.mlp.shared_expert")
        },
        experts=_EACH_EXPERT,
    ),
    "qwen3_moe": HFPlan(styles=_decoder({**_QKV, **_HEAD_NORMS}, **_ROUTED), experts=_EACH_EXPERT),
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": HFPlan(
        styles=_decoder({**_QKV, "sinks": "heads"}, router="replicated", experts="replicated"), experts=STACKED
    ),
    "qwen3_next": HFPlan(styles=_GATED_DELTA_ROUTED, experts=_EACH_EXPERT),
    "qwen3_5_text": HFPlan(styles=_GATED_DELTA),
    "qwen3_5_moe_text": HFPlan(styles=_GATED_DELTA_ROUTED, experts=_EACH_EXPERT),
    "glm4_moe": HFPlan(
        styles={**_decoder({**_QKV, **_HEAD_NORMS}, **_ROUTED), **_SHARED}, experts=_EACH_EXPERT
    ),
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _SPARSE,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": HFPlan(
        styles=_DEEPSEEK_V4, merge="model.hc_head", experts=_separate("mlp.experts", "w1", "w2", "w3"), own_attention=True,
        masked_attention=True, counts=("num_key_value_groups", "config.o_groups"), streams="hc_mult", token_ids="input_ids",
        token_experts="tid2eid",
        renamed={
            "model.embed_tokens.": "embed.", "model.norm.": "norm.", "model.hc_head.hc_": "hc_head_", "model.layers.": "layers.",
            **_DEEPSEEK_V4_NAMES,
        },
        resaved={".self_attn.kv_norm.": ".self_attn.norm.", **_DEEPSEEK_V4_NAMES},
        lacks={"cp": "each token attends to keys that are made of all tokens of the row before it"},
    ),
    "olmo3": HFPlan(styles=_decoder({**_QKV, **_WIDE_NORMS})),
    "olmo_hybrid": HFPlan(
        styles=_decoder({**_QKV, **_WIDE_NORMS}), convolution={"q": "key_dim", "k": "key_dim", "v": "value_dim"},
        renamed={
            ".input_layernorm.": ".attention_layer_norm.", ".post_attention_layernorm.": ".feedforward_layer_norm.",
            **_APART,
        },
    ),
    "granitemoehybrid": _GRANITE_MOE,
    "nemotron_h": HFPlan(
        styles=_NEMOTRON_H, embedding="model.embeddings", norm="model.norm_f", attention="mixer", feed_forward="mixer",
        experts={name: f"mixer.experts.{{j}}.{name}.weight" for name in ("up_proj", "down_proj")},
        renamed={"model.": "backbone."},
    ),
    "kimi_linear": HFPlan(
        styles={**_decoder(_LATENT, **_ROUTED), **_SHARED}, experts=_MIXTRAL_EXPERTS,
        convolution={"q": "qkv_dim", "k": "qkv_dim", "v": "qkv_dim"},
        renamed={
            ".mlp.gate.": ".block_sparse_moe.gate.", ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
            ".forget_gate.": ".", **_APART,
        },
    ),
    "minimax_m2": HFPlan(
        styles=_decoder({**_QKV, **_WIDE_NORMS}, **_ROUTED), experts=_MIXTRAL_EXPERTS,
        renamed={".{i}.mlp.": ".{i}.block_sparse_moe."},
    ),
    "llama4_text": HFPlan(
        styles=_LLAMA4, feed_forward="feed_forward", shorter_than=("attention_chunk_size", "floor_scale"),
        lacks={"ep": "each of its experts computes every token, so nothing is sent"},
    ),
    "ministral": _LLAMA,
    "ministral3": _LLAMA,
    "gemma4_text": HFPlan(
        styles=_GEMMA4, lacks={"ep": "its experts stand beside a dense feed-forward of the same layer"},
        lacks_with={
            "hidden_size_per_layer_input": {
                "sp": "it looks up each token a second time, for all of its layers",
                "pp": "its layers take in what the embedding of the first stage gives for each of them",
            },
            "num_kv_shared_layers": {"pp": "its last layers attend to keys and values of earlier ones, maybe of another stage"},
        },
    ),
    "gemma3n_text": HFPlan(
        styles=_GEMMA3N, feed_forward="",
        lacks={
            "sp": "it looks up each token a second time, for all of its layers",
            "pp": "its layers hand on several streams, and take in what the embedding of the first stage gives for each of them",
        },
    ),
    "mistral4": replace(_DEEPSEEK, experts=STACKED),
    "ernie4_5": _LLAMA,
    "ernie4_5_moe": HFPlan(
        styles={**_decoder(_QKV, **_ROUTED), **_SHARED}, experts=_EACH_EXPERT,
        renamed={".gate.moe_statics.": ".moe_statics."},
    ),
    "hunyuan_v1_dense": HFPlan(styles=_decoder({**_QKV, "*_layernorm": "replicated"})),
    "hunyuan_v1_moe": HFPlan(
        styles={
            **_decoder({**_QKV, "*_layernorm": "replicated"}, **_ROUTED), **_swiglu("model.layers.*.mlp.shared_mlp")
        },
        experts=_EACH_EXPERT,
    ),
    # Llama's structure with small changes
    "gemma": _LLAMA,
    "gemma2": _CAPPED,
    "vaultgemma": _CAPPED,
    "granite": _LLAMA,
    "granite_swa": HFPlan(styles=_decoder({**_QKV, "sinks": "heads"})),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoe_swa": replace(
        _GRANITE_MOE, styles={"model.layers.*.self_attn.sinks": "heads", **_GRANITE_HYBRID}, renamed={}
    ),
    "olmo": _LLAMA,
    "olmoe": _WIDE_ROUTED,
    "flex_olmo": _WIDE_ROUTED,
    "cohere": HFPlan(styles=_decoder({**_QKV, "q_norm": "heads", "k_norm": "kv_heads"})),  # a vector for each head
    "cohere2": _LLAMA,
    "starcoder2": HFPlan(styles=_decoder(_QKV, c_fc="colwise", c_proj="rowwise")),
    "stablelm": replace(
        _DROPPING, lacks_with={"qk_layernorm": {"tp": "each of its heads has a norm of its own, which is not cut"}}
    ),
    "smollm3": _LLAMA,
    "seed_oss": _LLAMA,
    "glm": _GLM,
    "glm4": _GLM,
    "exaone4": HFPlan(styles=_decoder({**_QKV, **_HEAD_NORMS})),
    "arcee": _LLAMA,
    "apertus": HFPlan(styles=_decoder({**_QKV, **_HEAD_NORMS}, act_fn="replicated")),
    "nemotron": _DROPPING,
    "phi": HFPlan(
        styles={
            **_decoder({**_QKV, "[qk]_layernorm": "replicated", "dense": "rowwise"}, fc1="colwise", fc2="rowwise"),
            **_FINAL_LAYERNORM,
        },
        norm="model.final_layernorm",
    ),
    "persimmon": HFPlan(
        styles={
            **_decoder(
                {"query_key_value": "heads", "[qk]_layernorm": "replicated", "dense": "rowwise"},
                dense_h_to_4h="colwise", dense_4h_to_h="rowwise",
            ),
            **_FINAL_LAYERNORM,
        },
        norm="model.final_layernorm",
    ),
    "helium": _LLAMA,
    "nanochat": HFPlan(styles=_decoder(_QKV, fc1="colwise", fc2="rowwise")),
    "cwm": _LLAMA,
    "internlm3": _LLAMA,
    "iquestcoder": _LLAMA,
    "jais2": _LLAMA,
    "hyperclovax": HFPlan(styles={**_decoder(_QKV), "model.layers.*.post_norm[12]": "replicated"}),
    "minicpm3": HFPlan(styles=_decoder(_LATENT)),
    "youtu": HFPlan(styles=_decoder(_LATENT)),
    "axk1": HFPlan(
        styles={**_decoder(_LATENT, **_ROUTED, post_mlp_layernorm="replicated"), **_SHARED}, experts=_EACH_EXPERT,
        renamed={".mlp.post_mlp_layernorm.": ".post_mlp_layernorm."},
    ),
    "dots1": HFPlan(styles=_ROUTED_SHARED, experts=_EACH_EXPERT),
    "mellum": HFPlan(styles=_ROUTED_SHARED, experts=_EACH_EXPERT),
    "solar_open": HFPlan(styles={**_decoder(_QKV, **_ROUTED), **_SHARED}, experts=_EACH_EXPERT),
    "exaone_moe": HFPlan(
        styles=_ROUTED_SHARED, experts=_EACH_EXPERT,
        renamed={".gate.e_score_correction_bias": ".e_score_correction_bias"},
    ),
    "hy_v3": HFPlan(
        styles=_ROUTED_SHARED, experts=_EACH_EXPERT,
        renamed={
            ".mlp.gate.": ".mlp.router.gate.", ".mlp.e_score_correction_bias": ".mlp.expert_bias",
            ".mlp.shared_experts.": ".mlp.shared_mlp.",
        },
    ),
    "kolibri1": HFPlan(
        styles=_ROUTED_SHARED, experts=_EACH_EXPERT,
        renamed={
            ".mlp.gate.e_score_correction_bias": ".moe.router.expert_bias", ".post_self_attn_layernorm.": ".post_attn_norm.",
            ".post_mlp_layernorm.": ".post_ffn_norm.",
        },
    ),
    "afmoe": HFPlan(
        styles={
            **_decoder(
                {**_QKV, **_HEAD_NORMS, "gate_proj": "heads"}, router="replicated", expert_bias="replicated",
                experts="replicated",
            ),
            **_SHARED,
        },
        experts=_EACH_EXPERT,
    ),
    "laguna": HFPlan(
        styles={**_decoder({**_QKV, **_HEAD_NORMS, "g_proj": "heads"}, **_ROUTED), **_SHARED}, experts=_EACH_EXPERT,
        renamed={
            ".mlp.gate.e_score_correction_bias": ".mlp.experts.e_score_correction_bias",
            ".mlp.shared_experts.": ".mlp.shared_expert.",
        },
    ),
    "flint": HFPlan(
        styles={
            **_decoder({**_QKV, **_HEAD_NORMS, "sinks": "heads"}, **_ROUTED),
            **_swiglu("model.layers.*.mlp.shared_expert"),
        },
        experts=_EACH_EXPERT, renamed={".sinks": ".softmax_offset"},
    ),
    "mimo_v2_flash": HFPlan(
        styles=_decoder({**_QKV, "sinks": "heads"}, **_ROUTED), experts=_EACH_EXPERT,
        renamed={".sinks": ".attention_sink_bias"},
    ),
    "beam": HFPlan(
        styles=_decoder({**_QKV, **_HEAD_NORMS, "gate_proj": "heads", "gate_bias": "heads"}, **_ROUTED),
        experts=_EACH_EXPERT,
    ),
}  # fmt: skip
"""``model_type`` of ``config.json`` to the plan, for the families that are planned here; `hf_plans` has all."""


@cache
def hf_plans() -> Mapping[str, HFPlan]:
    """Every known plan by ``model_type``. One of a package that cannot be loaded is left out with a warning."""
    return {**HF_PLANS, **_installed()}


def _installed() -> dict[str, HFPlan]:
    found: dict[str, HFPlan] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            plan: Any = entry.load()
        except Exception as err:  # a broken package must not stop runs that do not use it
            _logger.warning("entry point %s of %s could not be loaded: %s", entry.name, ENTRY_POINT_GROUP, err)
            continue
        if isinstance(plan, HFPlan):
            found[entry.name] = plan
        else:
            _logger.warning(
                "entry point %s of %s is a %s, not an HFPlan", entry.name, ENTRY_POINT_GROUP, type(plan).__name__
            )
    return found
