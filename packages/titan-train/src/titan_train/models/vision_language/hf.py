"""Qwen3-VL checkpoints of Hugging Face, dense and with experts: their ``config.json`` and their key map."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan_ckpt import KeyMap, Pair

from titan_train.models.common.hf import (
    ATTENTION,
    DECODER,
    DENSE,
    IGNORED,
    NATIVE_ONLY,
    HFConfig,
    HuggingFace,
    read_decoder,
    rope_fields,
)
from titan_train.models.qwen3.hf import HEAD_NORMS, describe_text, read_experts
from titan_train.models.qwen3.hf import settings_of as decoder_settings
from titan_train.models.vision_language.args import Qwen3VLArgs

_KINDS = ("qwen3_vl", "qwen3_vl_moe")
_VISION_ROPE = {"rope_theta": 10_000.0, "rope_type": "axial"}
_VISION_ACTIVATION = "gelu_pytorch_tanh"


def args_from_hf(config: Mapping[str, Any]) -> Qwen3VLArgs:
    """The arguments of the model that ``config.json`` describes.

    Raises:
        ValueError: It describes what `Qwen3VL` cannot do; the message names every such field.
    """
    read = HFConfig(config, kinds=_KINDS)
    text: dict[str, Any] = dict(read.need("text_config") or {})
    vision: dict[str, Any] = dict(read.need("vision_config") or {})
    read.take("video_token_id")  # images only
    ids = {
        "image_token": read.take("image_token_id", default=151_655),
        "image_start_token": read.take("vision_start_token_id", default=151_652),
        "image_end_token": read.take("vision_end_token_id", default=151_653),
    }
    tied = read.take("tie_word_embeddings", default=text.pop("tie_word_embeddings", False))
    read.finish()
    return Qwen3VLArgs(**_decoder_of(text) | _encoder_of(vision, text) | ids | {"tied_embeddings": tied})


def _decoder_of(config: dict[str, Any]) -> dict[str, Any]:
    read = HFConfig(config, kinds=tuple(f"{kind}_text" for kind in _KINDS))
    fields = read_decoder(read)
    rope = read.rope("default", default_theta=500_000.0)
    time, row, column = rope.get("mrope_section") or (24, 20, 20)
    sparse = read.kind == "qwen3_vl_moe_text"
    head_dim = read.take("head_dim", default=128)
    if sparse and not config.get("head_dim"):  # that class has no default of 128
        head_dim = fields["dim"] // max(1, fields["num_heads"])
    if time + row + column != head_dim // 2:
        read.problem(f"mrope_section={[time, row, column]} does not add up to half of head_dim={head_dim}")
    if not rope.get("mrope_interleaved", True):
        read.problem("mrope_interleaved=False, but this model's channel pairs take turns between time, row and column")
    fields |= {
        "num_kv_heads": read.need("num_key_value_heads"),
        "head_dim": head_dim,
        "ffn_dim": 0 if sparse else read.need("intermediate_size"),
        "rope_theta": rope["rope_theta"],
        "rope_row_pairs": row,
        "rope_column_pairs": column,
    }
    if sparse:
        # without effect on the logits: transformers norms the weights of a token's experts always
        read.take("intermediate_size", "router_aux_loss_coef", "output_router_logits", "norm_topk_prob")
        fields |= read_experts(read)
    read.finish()
    return fields


def _encoder_of(config: dict[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    read = HFConfig(
        # files of the first releases have the type of the whole model
        {**config, "model_type": f"{config['model_type']}_vision"} if config.get("model_type") in _KINDS else config,
        kinds=tuple(f"{kind}_vision" for kind in _KINDS),
    )
    read.only("hidden_act", _VISION_ACTIVATION)
    read.only("in_channels", 3)
    read.only("out_hidden_size", text.get("hidden_size"))
    rope = read.take("rope_parameters", default=_VISION_ROPE)
    if rope.get("rope_theta", 10_000.0) != 10_000.0 or rope.get("rope_type", "axial") != "axial":
        read.problem(f"vision rope_parameters={rope}, but this encoder rotates by rows and columns with base 10000")
    positions = read.take("num_position_embeddings", default=2304)
    side = round(positions**0.5)
    if side * side != positions:
        read.problem(f"num_position_embeddings={positions} is not the square of a number")
    fields = {
        "vision_dim": read.need("hidden_size"),
        "vision_layers": read.need("depth", "num_hidden_layers"),
        "vision_heads": read.need("num_heads", "num_attention_heads"),
        "vision_ffn_dim": read.need("intermediate_size"),
        "patch": read.take("patch_size", default=16),
        "frames": read.take("temporal_patch_size", default=2),
        "merge": read.take("spatial_merge_size", default=2),
        "position_side": side,
        "deepstack_layers": tuple(read.take("deepstack_visual_indexes", default=())),
    }
    read.finish()
    return fields


def settings_of(args: Qwen3VLArgs) -> dict[str, Any]:
    """What decides the logits."""
    return {name: value for name, value in decoder_settings(args).items() if name != "image_share"}


def config_of(args: Qwen3VLArgs) -> dict[str, Any]:
    """The fields of ``config.json`` that describe the model.

    Raises:
        ValueError: The mixture of experts has settings that Qwen3-VL does not have.
    """
    sparse = args.num_experts > 0
    kind = "qwen3_vl_moe" if sparse else "qwen3_vl"
    name = "Qwen3VLMoeForConditionalGeneration" if sparse else "Qwen3VLForConditionalGeneration"
    refused = {f"normalize_weights={args.normalize_weights}": not args.normalize_weights}
    text = describe_text(args, name, **refused)
    tied = text.pop("tie_word_embeddings")
    rope = rope_fields(args.rope_theta)
    time = args.head_dim // 2 - args.rope_row_pairs - args.rope_column_pairs
    sections = {"mrope_section": [time, args.rope_row_pairs, args.rope_column_pairs], "mrope_interleaved": True}
    rope["rope_parameters"] |= sections
    rope["rope_scaling"] = {"rope_type": "default", **sections}
    return {
        "architectures": [name],
        "model_type": kind,
        "image_token_id": args.image_token,
        "vision_start_token_id": args.image_start_token,
        "vision_end_token_id": args.image_end_token,
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": f"{kind}_text",
            **text,
            **rope,
        },
        "vision_config": {
            "model_type": f"{kind}_vision",
            "depth": args.vision_layers,
            "hidden_size": args.vision_dim,
            "hidden_act": _VISION_ACTIVATION,
            "intermediate_size": args.vision_ffn_dim,
            "num_heads": args.vision_heads,
            "in_channels": 3,
            "patch_size": args.patch,
            "spatial_merge_size": args.merge,
            "temporal_patch_size": args.frames,
            "out_hidden_size": args.dim,
            "num_position_embeddings": args.position_side**2,
            "deepstack_visual_indexes": list(args.deepstack_layers),
        },
    }


_TEXT = tuple(
    replace(pair, hf=pair.hf.replace("model.", "model.language_model.", 1))
    for pair in (*DECODER, *ATTENTION, *HEAD_NORMS, *DENSE)
)
_STACK, _HF_STACK = "layers.{i}.moe", "model.language_model.layers.{i}.mlp"
_EXPERTS = (  # matrices [in, out] for all experts at once, gate and up in one
    Pair(f"{_STACK}.experts.w1", f"{_HF_STACK}.experts.gate_up_proj", part=(0, 2, 2), transposed=True),
    Pair(f"{_STACK}.experts.w3", f"{_HF_STACK}.experts.gate_up_proj", part=(1, 2, 2), transposed=True),
    Pair(f"{_STACK}.experts.w2", f"{_HF_STACK}.experts.down_proj", transposed=True),
    Pair(f"{_STACK}.router.gate.weight", f"{_HF_STACK}.gate.weight"),
)
_BLOCK, _HF_BLOCK = "vision.blocks.{i}", "model.visual.blocks.{i}"
_SAME = {
    "vision.patch_embedding": "model.visual.patch_embed.proj",
    f"{_BLOCK}.attention_norm": f"{_HF_BLOCK}.norm1",
    f"{_BLOCK}.mlp_norm": f"{_HF_BLOCK}.norm2",
    f"{_BLOCK}.attention.wo": f"{_HF_BLOCK}.attn.proj",
    f"{_BLOCK}.mlp.up": f"{_HF_BLOCK}.mlp.linear_fc1",
    f"{_BLOCK}.mlp.down": f"{_HF_BLOCK}.mlp.linear_fc2",
} | {
    f"{native}.{ours}": f"{hf}.{theirs}"
    for native, hf in (
        ("vision.projector", "model.visual.merger"),
        ("vision.deepstack.{i}", "model.visual.deepstack_merger_list.{i}"),
    )
    for ours, theirs in (("norm", "norm"), ("up", "linear_fc1"), ("down", "linear_fc2"))
}
_VISION = (
    Pair("vision.positions.weight", "model.visual.pos_embed.weight"),
    *(Pair(f"{native}.{kind}", f"{hf}.{kind}") for native, hf in _SAME.items() for kind in ("weight", "bias")),
    *(
        Pair(f"{_BLOCK}.attention.w{x}.{kind}", f"{_HF_BLOCK}.attn.qkv.{kind}", part=(number, 3, 0))
        for number, x in enumerate("qkv")
        for kind in ("weight", "bias")
    ),
)

QWEN3_VL_HF = HuggingFace(
    key_map=KeyMap("qwen3_vl", (*_VISION, *_TEXT, *_EXPERTS), IGNORED, NATIVE_ONLY),
    config_of=config_of,
    args_from=args_from_hf,
    kinds=_KINDS,
    settings_of=settings_of,
)
