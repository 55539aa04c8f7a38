"""Qwen3 checkpoints of Hugging Face, dense and mixture of experts: their ``config.json`` and their key map."""

from collections.abc import Mapping
from typing import Any

from titan_ckpt import KeyMap, Pair

from titan_train.models.common.hf import HuggingFace, refuse_export, rope_fields
from titan_train.models.common.hf_config import HFConfig
from titan_train.models.common.hf_names import ATTENTION, DECODER, DENSE, EXPERTS, IGNORED, NATIVE_ONLY
from titan_train.models.qwen3.args import Qwen3Args

_ONLY_WITH_EXPERTS = ("experts_per_token", "expert_ffn_dim", "num_shared_experts", "scores", "normalize_weights")
_ONLY_IN_TRAINING = ("bias_rate", "balance_loss", "z_loss")

_KINDS = ("qwen3", "qwen3_moe")


def args_from_hf(config: Mapping[str, Any]) -> Qwen3Args:
    """The arguments of the model that ``config.json`` describes.

    Raises:
        ValueError: It describes what `Qwen3` cannot do; the message names every such field.
    """
    read = HFConfig(config, kinds=_KINDS)
    read.only("attention_bias", False)
    read.only("hidden_act", "silu")
    read.only("use_sliding_window", False)
    read.take("sliding_window", "max_window_layers")  # without effect unless it is used
    if set(read.take("layer_types", default=[])) - {"full_attention"}:
        read.problem(f"layer_types={config['layer_types']}, but this model attends to all of a document")
    fields = {
        "dim": read.need("hidden_size"),
        "num_layers": read.need("num_hidden_layers"),
        "num_heads": read.need("num_attention_heads"),
        "num_kv_heads": read.need("num_key_value_heads"),
        "head_dim": read.take("head_dim", default=128),
        "ffn_dim": read.take("intermediate_size", default=0),
        "vocab_size": read.need("vocab_size"),
        "norm_eps": read.take("rms_norm_eps", default=1e-6),
        "tied_embeddings": read.take("tie_word_embeddings", default=False),
        "rope_theta": read.rope("default")["rope_theta"],
    }
    if read.kind == "qwen3_moe":
        if not config.get("head_dim"):  # that class has no default of 128
            fields["head_dim"] = fields["dim"] // max(1, fields["num_heads"])
        read.only("decoder_sparse_step", 1)
        read.only("mlp_only_layers", [])
        fields |= {
            "num_experts": read.need("num_experts", "num_local_experts"),
            "experts_per_token": read.need("num_experts_per_tok"),
            "expert_ffn_dim": read.need("moe_intermediate_size"),
            "normalize_weights": read.take("norm_topk_prob", default=False),
        }
    read.finish()
    return Qwen3Args(**fields)


def settings_of(args: Qwen3Args) -> dict[str, Any]:
    """What decides the logits, in one spelling."""
    unused = ("ffn_dim",) if args.num_experts else _ONLY_WITH_EXPERTS
    names = [name for name in args.__dataclass_fields__ if name not in (*unused, *_ONLY_IN_TRAINING)]
    return {name: getattr(args, name) for name in names}


def config_of(args: Qwen3Args) -> dict[str, Any]:
    """The fields of ``config.json`` that describe the model.

    Raises:
        ValueError: The mixture of experts has settings that Qwen3's has not.
    """
    sparse = args.num_experts > 0
    refuse_export(
        {
            f"num_shared_experts={args.num_shared_experts}": sparse and args.num_shared_experts > 0,
            f"scores={args.scores!r}": sparse and args.scores != "softmax",
            f"bias_rate={args.bias_rate}": sparse and args.bias_rate > 0,
        },
        architecture="Qwen3MoeForCausalLM",
    )
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if sparse else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if sparse else "qwen3",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim or args.expert_ffn_dim,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": args.tied_embeddings,
        **rope_fields(args.rope_theta),
    }
    if sparse:
        config |= {
            "num_experts": args.num_experts,
            "num_local_experts": args.num_experts,  # the name that transformers 5 writes
            "num_experts_per_tok": args.experts_per_token,
            "moe_intermediate_size": args.expert_ffn_dim,
            "norm_topk_prob": args.normalize_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


_HEAD_NORMS = tuple(
    Pair(f"layers.{{i}}.attention.{x}_norm.weight", f"model.layers.{{i}}.self_attn.{x}_norm.weight", rotary=True)
    for x in "qk"
)

QWEN3_HF = HuggingFace(
    key_map=KeyMap("qwen3", (*DECODER, *ATTENTION, *_HEAD_NORMS, *DENSE, *EXPERTS), IGNORED, NATIVE_ONLY),
    config_of=config_of,
    args_from=args_from_hf,
    kinds=_KINDS,
    settings_of=settings_of,
)
