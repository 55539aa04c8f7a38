"""Qwen3-Next checkpoints of Hugging Face, dense and mixture of experts: their ``config.json`` and their key map.

Projections are packed there as they are here. Only the convolutions of queries, keys and values are one tensor there.
"""

import math
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
    PROJECTIONS,
    HFConfig,
    HuggingFace,
    describe_decoder,
    read_decoder,
    refuse_export,
    rope_fields,
)
from titan_train.models.qwen3.hf import HEAD_NORMS, read_experts
from titan_train.models.qwen3_next.args import Qwen3NextArgs

_ONLY_WITH_EXPERTS = ("experts_per_token", "expert_ffn_dim", "num_shared_experts", "scores", "normalize_weights")
_ONLY_IN_TRAINING = ("bias_rate", "balance_loss", "z_loss", "mtp_depth")

_KIND, _CLASS = "qwen3_next", "Qwen3NextForCausalLM"
_LAYER = ("linear_attention", "full_attention")
_LINEAR = {
    "delta_heads": ("linear_num_value_heads", 32),
    "delta_key_heads": ("linear_num_key_heads", 16),
    "delta_key_dim": ("linear_key_head_dim", 128),
    "delta_value_dim": ("linear_value_head_dim", 128),
    "delta_taps": ("linear_conv_kernel_dim", 4),
}


def args_from_hf(config: Mapping[str, Any]) -> Qwen3NextArgs:
    """The arguments of the model that ``config.json`` describes.

    Raises:
        ValueError: It describes what `Qwen3Next` cannot do; the message names every such field.
    """
    read = HFConfig(config, kinds=(_KIND,))
    fields: dict[str, Any] = read_decoder(read) | {
        "num_kv_heads": read.need("num_key_value_heads"),
        "head_dim": read.take("head_dim", default=256),
        "ffn_dim": read.take("intermediate_size", default=0),
        "attention_every": _attention_every(read, int(read.take("num_hidden_layers", default=0))),
    }
    fields |= {native: read.take(name, default=default) for native, (name, default) in _LINEAR.items()}
    rope = read.rope("default", default_share=0.25)
    fields |= {"rope_theta": rope["rope_theta"], "rope_dim": int(fields["head_dim"] * rope["partial_rotary_factor"])}
    shared = read.take("shared_expert_intermediate_size", default=512)
    if read.take("num_experts", "num_local_experts", default=512):
        fields |= read_experts(read) | {"normalize_weights": read.take("norm_topk_prob", default=True)}
        width = fields["expert_ffn_dim"]
        fields["num_shared_experts"] = shared // max(1, width)
        if width and shared % width:
            read.problem(
                f"shared_expert_intermediate_size={shared}, but this model shares a multiple of {width} channels"
            )
    else:
        read.take("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "num_experts_per_tok")
        read.take("moe_intermediate_size")
    read.finish()
    return Qwen3NextArgs(**fields)


def _attention_every(read: HFConfig, layers: int) -> int:
    """Every which block has attention, by the list of the file or by its interval."""
    every = int(read.take("full_attention_interval", default=4))
    kinds = list(read.take("layer_types", default=[]))
    if not kinds:
        return every
    if "full_attention" in kinds:
        every = kinds.index("full_attention") + 1
    if kinds != [_LAYER[(layer + 1) % every == 0] for layer in range(layers)]:
        read.problem(
            f"layer_types={kinds} for {layers} layers, but this model has attention in every k-th block and a state in the others"
        )
    return every


def settings_of(args: Qwen3NextArgs) -> dict[str, Any]:
    """What decides the logits, in one spelling."""
    unused = ("ffn_dim",) if args.num_experts else _ONLY_WITH_EXPERTS
    names = [name for name in args.__dataclass_fields__ if name not in (*unused, *_ONLY_IN_TRAINING)]
    return {name: getattr(args, name) for name in names}


def config_of(args: Qwen3NextArgs) -> dict[str, Any]:
    """The fields of ``config.json`` that describe the model.

    Raises:
        ValueError: The mixture of experts has settings that Qwen3-Next does not have.
    """
    sparse = args.num_experts > 0
    refuse_export(
        {
            f"num_shared_experts={args.num_shared_experts}": sparse and args.num_shared_experts == 0,
            f"scores={args.scores!r}": sparse and args.scores != "softmax",
            f"bias_rate={args.bias_rate}": sparse and args.bias_rate > 0,
            f"mtp_depth={args.mtp_depth}": args.mtp_depth > 1,
        },
        architecture=_CLASS,
    )
    share = args.rope_dim / args.head_dim
    if int(args.head_dim * share) < args.rope_dim:  # what it rounds to must be the same number of channels
        share = math.nextafter(share, 1.0)
    rope = rope_fields(args.rope_theta)
    rope["rope_parameters"] |= {"partial_rotary_factor": share}
    return {
        "architectures": [_CLASS],
        "model_type": _KIND,
        **describe_decoder(args),
        "intermediate_size": args.ffn_dim or args.expert_ffn_dim,
        "num_key_value_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "full_attention_interval": args.attention_every,
        "layer_types": [_LAYER[args.has_attention(layer)] for layer in range(args.num_layers)],
        **{name: getattr(args, native) for native, (name, _) in _LINEAR.items()},
        "partial_rotary_factor": share,
        **rope,
        "num_experts": args.num_experts,
        "num_experts_per_tok": args.experts_per_token,
        "moe_intermediate_size": args.expert_ffn_dim,
        "shared_expert_intermediate_size": args.num_shared_experts * args.expert_ffn_dim,
        "norm_topk_prob": args.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_DELTA, _LINEAR_ATTENTION = "layers.{i}.delta", "model.layers.{i}.linear_attn"
_SHARED, _SHARED_EXPERT = "layers.{i}.moe.shared_experts", "model.layers.{i}.mlp.shared_expert"

_PAIRS = (
    Pair(f"{_DELTA}.wqkvz.weight", f"{_LINEAR_ATTENTION}.in_proj_qkvz.weight"),
    Pair(f"{_DELTA}.wba.weight", f"{_LINEAR_ATTENTION}.in_proj_ba.weight"),
    Pair(f"{_DELTA}.decay.weight", f"{_LINEAR_ATTENTION}.A_log"),
    Pair(f"{_DELTA}.decay.bias", f"{_LINEAR_ATTENTION}.dt_bias"),
    Pair(f"{_DELTA}.gated_norm.weight", f"{_LINEAR_ATTENTION}.norm.weight"),
    Pair(f"{_DELTA}.wo.weight", f"{_LINEAR_ATTENTION}.out_proj.weight"),
    *(Pair(f"{_SHARED}.{w}.weight", f"{_SHARED_EXPERT}.{x}_proj.weight") for w, x in PROJECTIONS),
    Pair(f"{_SHARED}.gate.weight", f"{_SHARED_EXPERT}_gate.weight"),
)


def key_map(args: Qwen3NextArgs) -> KeyMap:
    """Names and parts of the tensors of a model with these arguments."""
    keys = args.delta_key_heads * args.delta_key_dim
    rows = {"q": (0, keys), "k": (keys, keys), "v": (2 * keys, args.delta_heads * args.delta_value_dim)}
    convolutions = [
        Pair(f"{_DELTA}.{x}_conv.weight", f"{_LINEAR_ATTENTION}.conv1d.weight", part=(part, 3, 0), rows=rows[x])
        for part, x in enumerate("qkv")
    ]
    pairs = (*DECODER, *ATTENTION, *HEAD_NORMS, *DENSE, *EXPERTS, *_PAIRS, *convolutions)
    return KeyMap(_KIND, pairs, IGNORED, NATIVE_ONLY)


QWEN3_NEXT_HF = HuggingFace(
    key_map=key_map, config_of=config_of, args_from=args_from_hf, kinds=(_KIND,), settings_of=settings_of
)
