"""Qwen3 checkpoints of Hugging Face, dense and mixture of experts: their ``config.json`` and their key map."""

from collections.abc import Mapping
from typing import Any

from titan_ckpt import KeyMap, Pair

from titan_train.models.common.hf import (
    ATTENTION,
    DECODER,
    DENSE,
    EXPERTS,
    IGNORED,
    NATIVE_ONLY,
    HFConfig,
    HuggingFace,
    describe_decoder,
    read_decoder,
    refuse_export,
    rope_fields,
)
from titan_train.models.qwen3.args import Qwen3Args

_ONLY_WITH_EXPERTS = ("experts_per_token", "expert_ffn_dim", "num_shared_experts", "scores", "normalize_weights")
_ONLY_IN_TRAINING = ("bias_rate", "balance_loss", "z_loss", "mtp_depth")

_KINDS = ("qwen3", "qwen3_moe")


def args_from_hf(config: Mapping[str, Any]) -> Qwen3Args:
    """The arguments of the model that ``config.json`` describes.

    Raises:
        ValueError: It describes what `Qwen3` cannot do; the message names every such field.
    """
    read = HFConfig(config, kinds=_KINDS)
    read.only("use_sliding_window", False)
    read.take("sliding_window", "max_window_layers")  # without effect unless it is used
    if set(read.take("layer_types", default=[])) - {"full_attention"}:
        read.problem(f"layer_types={config['layer_types']}, but this model attends to all of a document")
    fields = read_decoder(read) | {
        "num_kv_heads": read.need("num_key_value_heads"),
        "head_dim": read.take("head_dim", default=128),
        "ffn_dim": read.take("intermediate_size", default=0),
        "rope_theta": read.rope("default")["rope_theta"],
    }
    if read.kind == "qwen3_moe":
        if not config.get("head_dim"):  # that class has no default of 128
            fields["head_dim"] = fields["dim"] // max(1, fields["num_heads"])
        fields |= read_experts(read) | {"normalize_weights": read.take("norm_topk_prob", default=False)}
    read.finish()
    return Qwen3Args(**fields)


def read_experts(read: HFConfig) -> dict[str, Any]:
    """The arguments of the experts, which every layer must have."""
    read.only("decoder_sparse_step", 1)
    read.only("mlp_only_layers", [])
    return {
        "num_experts": read.need("num_experts", "num_local_experts"),
        "experts_per_token": read.need("num_experts_per_tok"),
        "expert_ffn_dim": read.need("moe_intermediate_size"),
    }


def settings_of(args: Qwen3Args) -> dict[str, Any]:
    """What decides the logits, in one spelling."""
    unused = ("ffn_dim",) if args.num_experts else _ONLY_WITH_EXPERTS
    names = [name for name in args.__dataclass_fields__ if name not in (*unused, *_ONLY_IN_TRAINING)]
    return {name: getattr(args, name) for name in names}


def config_of(args: Qwen3Args) -> dict[str, Any]:
    """The fields of ``config.json`` that describe the model.

    Raises:
        ValueError: The mixture of experts has settings that Qwen3 does not have.
    """
    sparse = args.num_experts > 0
    name = "Qwen3MoeForCausalLM" if sparse else "Qwen3ForCausalLM"
    config = {
        "architectures": [name],
        "model_type": "qwen3_moe" if sparse else "qwen3",
        **describe_text(args, name),
        "use_sliding_window": False,
        **rope_fields(args.rope_theta),
    }
    return config | ({"norm_topk_prob": args.normalize_weights} if sparse else {})


def describe_text(args: Qwen3Args, architecture: str, **refused: bool) -> dict[str, Any]:
    """The fields that Qwen3-VL's ``text_config`` has too; ``refused`` are more reasons not to export experts.

    Raises:
        ValueError: The mixture of experts has settings that Qwen3 does not have.
    """
    config = describe_decoder(args) | {
        "intermediate_size": args.ffn_dim or args.expert_ffn_dim,
        "num_key_value_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
    }
    if args.num_experts == 0:
        return config
    refuse_export(
        {
            f"num_shared_experts={args.num_shared_experts}": args.num_shared_experts > 0,
            f"scores={args.scores!r}": args.scores != "softmax",
            f"bias_rate={args.bias_rate}": args.bias_rate > 0,
            **refused,
        },
        architecture=architecture,
    )
    return config | {
        "num_experts": args.num_experts,
        "num_local_experts": args.num_experts,  # the name that transformers 5 writes
        "num_experts_per_tok": args.experts_per_token,
        "moe_intermediate_size": args.expert_ffn_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


HEAD_NORMS = tuple(
    Pair(f"layers.{{i}}.attention.{x}_norm.weight", f"model.layers.{{i}}.self_attn.{x}_norm.weight", rotary=True)
    for x in "qk"
)

QWEN3_HF = HuggingFace(
    key_map=KeyMap("qwen3", (*DECODER, *ATTENTION, *HEAD_NORMS, *DENSE, *EXPERTS), IGNORED, NATIVE_ONLY),
    config_of=config_of,
    args_from=args_from_hf,
    kinds=_KINDS,
    settings_of=settings_of,
)
