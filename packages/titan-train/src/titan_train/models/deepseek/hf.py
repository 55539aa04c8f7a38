"""DeepSeek-V2 and V3 checkpoints of Hugging Face: what their ``config.json`` means here.

The two route differently. V2 scores experts by a softmax and a group by its best expert; V3 by a sigmoid, a group by its
best two, with a bias for each expert. Neither file says so in every version: the ``model_type`` does.
"""

from collections.abc import Mapping
from typing import Any

from titan_train.models.common.hf_config import HFConfig
from titan_train.models.deepseek.args import DeepSeekArgs

_ONLY_IN_TRAINING = ("bias_rate", "balance_loss", "z_loss")
_ONLY_WITH_YARN = ("rope_original_seq_len", "rope_beta_fast", "rope_beta_slow", "rope_mscale")


def args_from_hf(config: Mapping[str, Any]) -> DeepSeekArgs:
    """The arguments of the model that ``config.json`` describes.

    Raises:
        ValueError: It describes what `DeepSeek` cannot do; the message names every such field.
    """
    read = HFConfig(config, kinds=("deepseek_v2", "deepseek_v3"))
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("hidden_act", "silu")
    read.only("rope_interleave", True)
    read.only("moe_layer_freq", 1)
    heads = read.need("num_attention_heads")
    read.only("num_key_value_heads", heads)
    read.take("head_dim", "qk_head_dim")  # sums of others
    fields = {
        "dim": read.need("hidden_size"),
        "num_layers": read.need("num_hidden_layers"),
        "num_dense_layers": read.take("first_k_dense_replace", default=0),
        "num_heads": heads,
        "q_lora_rank": read.take("q_lora_rank", default=0),
        "kv_lora_rank": read.need("kv_lora_rank"),
        "qk_nope_head_dim": read.need("qk_nope_head_dim"),
        "qk_rope_head_dim": read.need("qk_rope_head_dim"),
        "v_head_dim": read.need("v_head_dim"),
        "ffn_dim": read.need("intermediate_size"),
        "vocab_size": read.need("vocab_size"),
        "norm_eps": read.take("rms_norm_eps", default=1e-6),
        "tied_embeddings": read.take("tie_word_embeddings", default=False),
    }
    fields |= _routing(read) | _rope(read)
    read.finish()
    return DeepSeekArgs(**fields)


def settings_of(args: DeepSeekArgs) -> dict[str, Any]:
    """What decides the logits, in one spelling."""
    unused: tuple[str, ...] = _ONLY_IN_TRAINING
    if args.num_groups == 1:
        unused += ("top_groups", "group_score")
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
