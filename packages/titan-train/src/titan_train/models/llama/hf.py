"""Llama and Mistral checkpoints of Hugging Face: their ``config.json`` and their key map."""

from collections.abc import Mapping
from typing import Any

from titan_ckpt import KeyMap

from titan_train.models.common.hf import (
    ATTENTION,
    DECODER,
    DENSE,
    IGNORED,
    NATIVE_ONLY,
    HFConfig,
    HuggingFace,
    describe_decoder,
    read_decoder,
    rope_fields,
)
from titan_train.models.llama.args import LlamaArgs

_KINDS = ("llama", "mistral")


def args_from_hf(config: Mapping[str, Any]) -> LlamaArgs:
    """The arguments of the model that ``config.json`` describes.

    Raises:
        ValueError: It describes what `Llama` cannot do; the message names every such field.
    """
    read = HFConfig(config, kinds=_KINDS)
    read.only("mlp_bias", False)
    if read.take("sliding_window") is not None:
        read.problem(f"sliding_window={config['sliding_window']}, but this model attends to all of a document")
    fields = read_decoder(read)
    rope = read.rope("default", "llama3")
    scaling: dict[str, Any] = {}
    if rope["rope_type"] == "llama3":
        scaling = {
            "rope_factor": float(rope["factor"]),
            "rope_low_freq_factor": float(rope["low_freq_factor"]),
            "rope_high_freq_factor": float(rope["high_freq_factor"]),
            "rope_original_seq_len": rope["original_max_position_embeddings"],
        }
    heads = fields["num_heads"]
    fields |= {
        "num_kv_heads": read.take("num_key_value_heads", default=heads),
        "ffn_dim": read.need("intermediate_size"),
        "head_dim": read.take("head_dim", default=fields["dim"] // max(1, heads)),
        "rope_theta": rope["rope_theta"],
    }
    read.finish()
    return LlamaArgs(**fields, **scaling)


def settings_of(args: LlamaArgs) -> dict[str, Any]:
    """What decides the logits, in one spelling."""
    settings = {name: getattr(args, name) for name in args.__dataclass_fields__}
    settings["head_dim"] = args.head_width
    del settings["mtp_depth"]  # in the weights or not, it changes no logits
    if args.rope_factor == 1.0:
        for name in ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_seq_len"):
            del settings[name]
    return settings


def config_of(args: LlamaArgs) -> dict[str, Any]:
    """The fields of ``config.json`` that describe the model."""
    scaling = None
    if args.rope_factor != 1.0:
        scaling = {
            "rope_type": "llama3",
            "factor": args.rope_factor,
            "low_freq_factor": args.rope_low_freq_factor,
            "high_freq_factor": args.rope_high_freq_factor,
            "original_max_position_embeddings": args.rope_original_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **describe_decoder(args),
        "intermediate_size": args.ffn_dim,
        "num_key_value_heads": args.num_kv_heads,
        "head_dim": args.head_width,
        "mlp_bias": False,
        **rope_fields(args.rope_theta, scaling),
    }


LLAMA_HF = HuggingFace(
    key_map=KeyMap("llama", (*DECODER, *ATTENTION, *DENSE), IGNORED, NATIVE_ONLY),
    config_of=config_of,
    args_from=args_from_hf,
    kinds=_KINDS,
    settings_of=settings_of,
)
