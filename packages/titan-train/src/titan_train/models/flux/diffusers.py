"""FLUX checkpoints in the format of diffusers (``FluxTransformer2DModel``): names of tensors, and ``config.json``.

The single blocks' last projection is one matrix there, ``[d, 5 d]``, and two here; everything else has other names only. The
final modulation gives scale before shift in both.
"""

from collections.abc import Mapping
from typing import Any

import torch
from titan_ckpt import KeyMap, Pair
from torch import Tensor

from titan_train.models.common.hf import HFConfig, HuggingFace
from titan_train.models.flux.args import FluxArgs

_CLASS = "FluxTransformer2DModel"
_EMBEDDERS = {"time_in": "timestep_embedder", "pooled_in": "text_embedder", "guidance_in": "guidance_embedder"}
_STREAMS = {
    "image": {"q": "to_q", "k": "to_k", "v": "to_v", "out": "to_out.0", "q_norm": "norm_q", "k_norm": "norm_k"},
    "text": {
        "q": "add_q_proj", "k": "add_k_proj", "v": "add_v_proj", "out": "to_add_out",
        "q_norm": "norm_added_q", "k_norm": "norm_added_k",
    },
}  # fmt: skip
_DOUBLE, _SINGLE = "transformer_blocks.{i}", "single_transformer_blocks.{i}"


def key_map(args: FluxArgs) -> KeyMap:
    """The names of a model with these arguments, as a map for titan-ckpt's import and export."""
    pairs: list[Pair] = []

    def linear(native: str, hf: str, *kinds: str) -> None:
        pairs.extend(Pair(f"{native}.{kind}", f"{hf}.{kind}") for kind in kinds or ("weight", "bias"))

    linear("image_in", "x_embedder")
    linear("text_in", "context_embedder")
    linear("final.modulation", "norm_out.linear")
    linear("final.out", "proj_out")
    for native, hf in _EMBEDDERS.items():
        linear(f"{native}.first", f"time_text_embed.{hf}.linear_1")
        linear(f"{native}.second", f"time_text_embed.{hf}.linear_2")
    for stream, suffix in (("image", ""), ("text", "_context")):
        linear(f"double_blocks.{{i}}.{stream}_modulation.linear", f"{_DOUBLE}.norm1{suffix}.linear")
        linear(f"double_blocks.{{i}}.{stream}_mlp.up", f"{_DOUBLE}.ff{suffix}.net.0.proj")
        linear(f"double_blocks.{{i}}.{stream}_mlp.down", f"{_DOUBLE}.ff{suffix}.net.2")
        for native, hf in _STREAMS[stream].items():
            kinds = ("weight",) if native.endswith("norm") else ()
            linear(f"double_blocks.{{i}}.attention.{stream}.{native}", f"{_DOUBLE}.attn.{hf}", *kinds)
    linear("single_blocks.{i}.modulation.linear", f"{_SINGLE}.norm.linear")
    linear("single_blocks.{i}.mixer.up", f"{_SINGLE}.proj_mlp")
    for name in "qkv":
        linear(f"single_blocks.{{i}}.mixer.{name}", f"{_SINGLE}.attn.to_{name}")
    for name in "qk":
        linear(f"single_blocks.{{i}}.mixer.{name}_norm", f"{_SINGLE}.attn.norm_{name}", "weight")
    joined = f"{_SINGLE}.proj_out.weight"
    pairs.append(Pair("single_blocks.{i}.mixer.out.weight", joined, part=(0, 2, 1), rows=(0, args.dim)))
    pairs.append(Pair("single_blocks.{i}.mixer.down.weight", joined, part=(1, 2, 1), rows=(args.dim, 4 * args.dim)))
    pairs.append(Pair("single_blocks.{i}.mixer.out.bias", f"{_SINGLE}.proj_out.bias"))
    return KeyMap("flux", tuple(pairs))


def to_diffusers(state: Mapping[str, Tensor], args: FluxArgs) -> dict[str, Tensor]:
    """The state dict of diffusers' class from that of `Flux`; tensors are shared where they are not joined."""
    names = key_map(args)
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("mixer.down.weight"):
            continue
        if name.endswith("mixer.out.weight"):
            tensor = torch.cat((tensor, state[name.replace("mixer.out", "mixer.down")]), dim=1)
        found[names.to_hf(name)] = tensor
    return found


def from_diffusers(state: Mapping[str, Tensor], args: FluxArgs) -> dict[str, Tensor]:
    """The state dict of `Flux` from that of diffusers' class.

    Raises:
        ValueError: A tensor that the family does not have.
    """
    names = key_map(args)
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        native = names.from_hf(name)
        assert native is not None  # the map ignores nothing
        if name.startswith("single_transformer_blocks.") and name.endswith("proj_out.weight"):
            found[native] = tensor[:, : args.dim]
            found[native.replace("mixer.out", "mixer.down")] = tensor[:, args.dim :]
        else:
            found[native] = tensor
    return found


def config_of(args: FluxArgs) -> dict[str, Any]:
    """The fields of diffusers' ``config.json``."""
    return {
        "_class_name": _CLASS,
        "patch_size": 1,
        "in_channels": args.in_channels,
        "num_layers": args.num_layers,
        "num_single_layers": args.num_single_layers,
        "attention_head_dim": args.head_dim,
        "num_attention_heads": args.num_heads,
        "joint_attention_dim": args.text_dim,
        "pooled_projection_dim": args.pooled_dim,
        "guidance_embeds": args.guidance,
        "axes_dims_rope": [args.rope_index_dim, args.rope_row_dim, args.rope_column_dim],
    }


def args_from(config: Mapping[str, Any]) -> FluxArgs:
    """The arguments that a ``config.json`` of diffusers describes.

    Raises:
        ValueError: It describes another class, or what this model does not compute; the message names every such field.
    """
    if config.get("_class_name") != _CLASS:
        raise ValueError(
            f"config.json describes {config.get('_class_name')!r}, but the family flux reads {_CLASS}. Name the folder "
            "`transformer` of a FLUX pipeline."
        )
    read = HFConfig(config, kinds=("",))
    for name in ("_class_name", "_diffusers_version"):
        read.take(name)
    read.only("patch_size", 1)
    channels = int(read.take("in_channels", default=64))
    read.only("out_channels", channels)
    axes = tuple(read.take("axes_dims_rope", default=(16, 56, 56)))
    if len(axes) != 3:
        read.problem(f"axes_dims_rope={list(axes)}, but this model has three axes")
        axes = (16, 56, 56)
    heads = int(read.take("num_attention_heads", default=24))
    fields = {
        "dim": heads * int(read.take("attention_head_dim", default=128)),
        "num_heads": heads,
        "num_layers": int(read.take("num_layers", default=19)),
        "num_single_layers": int(read.take("num_single_layers", default=38)),
        "in_channels": channels,
        "text_dim": int(read.take("joint_attention_dim", default=4096)),
        "pooled_dim": int(read.take("pooled_projection_dim", default=768)),
    }
    guidance = bool(read.take("guidance_embeds", default=False))
    read.finish()
    index, row, column = (int(axis) for axis in axes)
    return FluxArgs(**fields, guidance=guidance, rope_index_dim=index, rope_row_dim=row, rope_column_dim=column)


FLUX_HF = HuggingFace(key_map=key_map, config_of=config_of, args_from=args_from, kinds=(_CLASS,))
