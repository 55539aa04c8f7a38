"""DeepSeek-V2 and V3 checkpoints of Hugging Face: their ``config.json`` and their key map.

The two route differently. V2 scores experts by a softmax and a group by its best expert; V3 by a sigmoid, a group by its
best two, with a bias for each expert. Neither file says so in every version: the ``model_type`` does.
"""

from collections.abc import Mapping
from typing import Any

from titan_ckpt import KeyMap, Pair

from titan_train.models.common.hf import (
    DECODER,
    DENSE,
    EXPERTS,
    IGNORED,
    NATIVE_ONLY,
    PROJECTIONS,
    HFConfig,
    HuggingFace,
    describe_decoder,
    read_decoder,
    refuse_export,
    rope_fields,
)
from titan_train.models.deepseek.args import DeepSeekArgs

_ONLY_IN_TRAINING = ("bias_rate", "balance_loss", "z_loss", "mtp_depth")
_ONLY_WITH_YARN = ("rope_original_seq_len", "rope_beta_fast", "rope_beta_slow", "rope_mscale")

_KINDS = ("deepseek_v2", "deepseek_v3")


def args_from_hf(config: Mapping[str, Any]) -> DeepSeekArgs:
    """The arguments of the model that ``config.json`` describes.

    Raises:
        ValueError: It describes what `DeepSeek` cannot do; the message names every such field.
    """
    read = HFConfig(config, kinds=_KINDS)
    read.only("mlp_bias", False)
    read.only("rope_interleave", True)
    read.only("moe_layer_freq", 1)
    fields = read_decoder(read)
    read.only("num_key_value_heads", fields["num_heads"])
    read.take("head_dim", "qk_head_dim")  # sums of others
    fields |= {
        "num_dense_layers": read.take("first_k_dense_replace", default=0),
        "q_lora_rank": read.take("q_lora_rank", default=0),
        "kv_lora_rank": read.need("kv_lora_rank"),
        "qk_nope_head_dim": read.need("qk_nope_head_dim"),
        "qk_rope_head_dim": read.need("qk_rope_head_dim"),
        "v_head_dim": read.need("v_head_dim"),
        "ffn_dim": read.need("intermediate_size"),
    }
    fields |= _routing(read) | _rope(read)
    read.finish()
    return DeepSeekArgs(**fields)


def settings_of(args: DeepSeekArgs) -> dict[str, Any]:
    """What decides the logits, in one spelling."""
    unused: tuple[str, ...] = _ONLY_IN_TRAINING
    if args.num_groups == 1:
        unused += ("group_score",)
    if args.rope_factor == 1.0:
        unused += _ONLY_WITH_YARN
    return {name: getattr(args, name) for name in args.__dataclass_fields__ if name not in unused}


def _routing(read: HFConfig) -> dict[str, Any]:
    fields = {
        "num_experts": read.need("n_routed_experts", "num_local_experts"),
        "experts_per_token": read.need("num_experts_per_tok"),
        "expert_ffn_dim": read.need("moe_intermediate_size"),
        "num_shared_experts": read.take("n_shared_experts", default=0),
        "route_scale": float(read.take("routed_scaling_factor", default=1.0)),
        "num_groups": read.take("n_group", default=1),
        "top_groups": read.take("topk_group", default=1),
    }
    if read.kind == "deepseek_v3":
        read.only("scoring_func", "sigmoid")
        read.only("topk_method", "noaux_tc")
        normalized = read.take("norm_topk_prob", default=True)
        return fields | {"scores": "sigmoid", "group_score": "top2_sum", "normalize_weights": normalized}
    read.only("scoring_func", "softmax")
    read.only("norm_topk_prob", False)  # published V2 does not; transformers would not heed it
    method = read.take("topk_method", default="greedy")
    if method == "greedy":
        fields |= {"num_groups": 1, "top_groups": 1}
    elif method != "group_limited_greedy":
        read.problem(f"topk_method={method!r}, but this model can only do 'greedy' or 'group_limited_greedy'")
    return fields | {"scores": "softmax", "group_score": "max", "normalize_weights": False, "bias_rate": 0.0}


def _rope(read: HFConfig) -> dict[str, Any]:
    rope = read.rope("default", "yarn")
    fields: dict[str, Any] = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "yarn":
        return fields
    mscale, of_scores = rope.get("mscale"), rope.get("mscale_all_dim")
    if not of_scores or mscale != of_scores:
        read.problem(
            f"mscale={mscale} and mscale_all_dim={of_scores}, but this model can only do the same positive value for both"
        )
    if rope.get("attention_factor") is not None or rope.get("truncate", True) is not True:
        read.problem(
            "attention_factor or truncate of rope_scaling is set, but this model derives them as DeepSeek does"
        )
    return fields | {
        "rope_factor": float(rope["factor"]),
        "rope_original_seq_len": rope["original_max_position_embeddings"],
        "rope_beta_fast": float(rope.get("beta_fast") or 32),
        "rope_beta_slow": float(rope.get("beta_slow") or 1),
        "rope_mscale": float(of_scores or 1.0),
    }


def config_of(args: DeepSeekArgs) -> dict[str, Any]:
    """The fields of ``config.json`` that describe the model: V3 if experts are scored by a sigmoid, else V2.

    Raises:
        ValueError: The mixture of experts has settings that neither has.
    """
    v3 = args.scores == "sigmoid"
    grouped = args.num_groups > 1
    refuse_export(
        {
            f"scores='sigmoid' with group_score={args.group_score!r}": v3
            and grouped
            and args.group_score != "top2_sum",
            f"scores='softmax' with group_score={args.group_score!r}": not v3 and grouped and args.group_score != "max",
            "scores='softmax' with normalize_weights=true": not v3 and args.normalize_weights,
            f"scores='softmax' with bias_rate={args.bias_rate}": not v3 and args.bias_rate > 0,
        },
        architecture="DeepseekV3ForCausalLM or DeepseekV2ForCausalLM",
    )
    scaling = None
    if args.rope_factor != 1.0:
        scaling = {
            "rope_type": "yarn",
            "factor": args.rope_factor,
            "mscale": args.rope_mscale,
            "mscale_all_dim": args.rope_mscale,
            "beta_fast": args.rope_beta_fast,
            "beta_slow": args.rope_beta_slow,
            "original_max_position_embeddings": args.rope_original_seq_len,
        }
    return {
        "architectures": ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if v3 else "deepseek_v2",
        "num_nextn_predict_layers": 0,
        **describe_decoder(args),
        "intermediate_size": args.ffn_dim,
        "first_k_dense_replace": args.num_dense_layers,
        "num_key_value_heads": args.num_heads,
        "q_lora_rank": args.q_lora_rank or None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "n_routed_experts": args.num_experts,
        "n_shared_experts": args.num_shared_experts,
        "num_experts_per_tok": args.experts_per_token,
        "moe_intermediate_size": args.expert_ffn_dim,
        "moe_layer_freq": 1,
        "n_group": args.num_groups,
        "topk_group": args.top_groups,
        "norm_topk_prob": args.normalize_weights,
        "routed_scaling_factor": args.route_scale,
        "scoring_func": args.scores,
        "topk_method": "noaux_tc" if v3 else "group_limited_greedy" if grouped else "greedy",
        **({"rope_interleave": True} if v3 else {}),
        **rope_fields(args.rope_theta, scaling),
    }


_LATENT_ATTENTION = tuple(
    Pair(f"layers.{{i}}.attention.{native}.weight", f"model.layers.{{i}}.self_attn.{hf}.weight")
    for native, hf in (
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
        for native, hf in PROJECTIONS
    ),
    Pair("layers.{i}.moe.expert_bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),
)

DEEPSEEK_HF = HuggingFace(
    key_map=KeyMap(
        "deepseek", (*DECODER, *_LATENT_ATTENTION, *DENSE, *EXPERTS, *_SHARED_EXPERTS), IGNORED, NATIVE_ONLY
    ),
    config_of=config_of,
    args_from=args_from_hf,
    kinds=_KINDS,
    settings_of=settings_of,
)
"""Float8 weights with block scales are read too. V3's further layer, which predicts a second token, is read with
``mtp_depth=1`` and passed over with 0 (`HuggingFace.names`)."""
