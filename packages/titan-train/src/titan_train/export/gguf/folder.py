"""A run's model as GGUF, the format of llama.cpp.

    model.gguf     weights, settings, tokenizer and chat template

It is made of an exported Hugging Face folder, one tensor at a time. Names come from the `gguf` library. What llama.cpp lays
out in another way is translated here: its architecture ``llama`` pairs neighbouring rotary channels, so rows of queries and
keys are reordered; Llama 3.1's stretch is a tensor of factors; GPT-2's matrices are transposed; experts are stacked;
DeepSeek's matrix that makes keys and values from the latent is two tensors, one of them transposed.

Vectors and routers stay float32. Q8_0 stores blocks of 32 weights as int8 with one float16 scale.
"""

import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from titan_ckpt.interop.safetensors_folder import SafetensorsReader
from titan_ckpt.interop.views import View, whole_box
from torch import Tensor

from titan_train.export.gguf.tokenizer import write_tokenizer
from titan_train.files import read_text
from titan_train.lazy import require
from titan_train.models.deepseek.attention import LATENT_EPS
from titan_train.tokenizers import ChatTemplate, Tokenizer

GgufType = Literal["fp32", "bf16", "fp16", "q8_0"]
FILE = "model.gguf"
_ARCHITECTURES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt2": "gpt2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
_LITE_LAYERS = 27
_ACTIVATIONS = {"gpt2": ("gelu_new", "gelu_pytorch_tanh")}
"""What llama.cpp computes in the feed-forward, as transformers names it; SwiGLU of other models."""
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Ends of the names of GPT-2's matrices in Hugging Face files, which are ``[in, out]`` there."""
_FLOAT32 = re.compile(r"\.mlp\.gate\.|ffn_gate_inp|wpe\.|position_embd")
"""Routers and positions, in Hugging Face files and in GGUF: llama.cpp computes with these in float32."""
_FROM_LATENT = re.compile(r"kv_b_proj|attn_[kv]_b\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj)\.weight")


def write_gguf(
    folder: Path,
    hf_folder: Path,
    tokenizer: Tokenizer,
    *,
    name: str,
    dtype: GgufType,
    add_bos: bool = False,
    template: ChatTemplate | None = None,
) -> None:
    """Write the file into a new folder.

    Args:
        folder: The folder to make.
        hf_folder: The exported Hugging Face folder.
        tokenizer: The run's.
        name: Of the model.
        dtype: How matrices are stored.
        add_bos: As of `write_tokenizer`.
        template: As of `write_tokenizer`.

    Raises:
        ValueError: The gguf library is missing, or llama.cpp has no architecture or tokenizer that computes the same.
    """
    gguf = gguf_library()
    config = json.loads(read_text(hf_folder / "config.json"))
    check_gguf(config)
    config = _filled(config)
    architecture = _ARCHITECTURES[config["model_type"]]
    folder.mkdir(parents=True)
    writer: Any = gguf.GGUFWriter(folder / FILE, architecture)
    try:
        writer.add_name(name)
        _write_settings(writer, config)
        write_tokenizer(writer, tokenizer, rows=config["vocab_size"], add_bos=add_bos, template=template)
        sources = dict(_sources(hf_folder, config, architecture))
        kinds = {key: _kind(gguf, key, source, dtype) for key, source in sources.items()}
        for key, source in sources.items():
            nbytes = _nbytes(gguf, source.shape, kinds[key])
            writer.add_tensor_info(key, source.shape, np.dtype(np.float32), nbytes, kinds[key])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, source in sources.items():
            writer.write_tensor_data(gguf.quants.quantize(source.read().float().numpy(), kinds[key]))
    finally:
        writer.close()


def _filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` with what published files leave to their class of transformers."""
    if config["model_type"] == "gpt2":
        return {**config, "n_inner": config.get("n_inner") or 4 * config["n_embd"]}
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return {"num_key_value_heads": heads, "rope_theta": 10_000.0, **config, "head_dim": width}


def gguf_library() -> Any:
    """The gguf library.

    Raises:
        ValueError: It is not installed.
    """
    gguf = require("gguf", extra="gguf", purpose="--to gguf")
    importlib.import_module("gguf.quants")
    return gguf


def check_gguf(config: Mapping[str, Any]) -> None:
    """Whether llama.cpp has an architecture that computes what ``config.json`` describes.

    Raises:
        ValueError: It has not, or not here.
    """
    kind = config["model_type"]
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"--to gguf: models of type {kind} are not written as GGUF; {', '.join(_ARCHITECTURES)} are. Use --to hf."
        )
    scaling = config.get("rope_scaling") or {}
    stretch = scaling.get("rope_type", scaling.get("type", "default"))
    if stretch not in ("default", {"llama": "llama3", "deepseek2": "yarn"}.get(_ARCHITECTURES[kind])):
        raise ValueError(f"--to gguf: rotary positions stretched as {stretch} are not written for {kind}. Use --to hf.")
    key, usual = ("activation_function", "gelu_new") if kind == "gpt2" else ("hidden_act", "silu")
    if config.get(key, usual) not in _ACTIVATIONS.get(kind, ("silu", "swish")):
        raise ValueError(
            f"--to gguf: llama.cpp computes {kind} with {usual}, and this model has {key}={config[key]!r}. Use --to hf."
        )
    if kind == "qwen3_moe" and not config["norm_topk_prob"]:
        raise ValueError(
            "--to gguf: llama.cpp always normalizes the weights of Qwen3's experts, and this model has "
            "normalize_weights=false. Use --to hf."
        )
    if _ARCHITECTURES[kind] == "deepseek2":
        _check_deepseek(config)


def _check_deepseek(config: Mapping[str, Any]) -> None:
    """llama.cpp's graph has shared experts and one eps, scores groups as V3 does, and knows plain queries by V2-Lite's depth."""
    if not config["q_lora_rank"] and config["num_hidden_layers"] != _LITE_LAYERS:
        raise ValueError(
            f"--to gguf: llama.cpp reads DeepSeek models without a latent for queries (q_lora_rank=0) only if they have "
            f"{_LITE_LAYERS} layers, and this one has {config['num_hidden_layers']}. Use --to hf."
        )
    if not config["n_shared_experts"]:
        raise ValueError(
            "--to gguf: llama.cpp's DeepSeek always has shared experts, and this model has none. Use --to hf."
        )
    if config["rms_norm_eps"] != LATENT_EPS:
        raise ValueError(
            f"--to gguf: llama.cpp norms latents with rms_norm_eps={config['rms_norm_eps']} too, and this model norms "
            f"them with {LATENT_EPS}. Use --to hf."
        )
    if config["n_group"] > 1 and config["model_type"] == "deepseek_v2":
        raise ValueError(
            "--to gguf: llama.cpp scores a group of experts by its best two, and this model by its best (num_groups above 1 "
            "with group_score='max'). Use --to hf."
        )


class _Source:
    """One tensor of the file, read when it is written."""

    def __init__(self, views: list[View], change: str = "", heads: int = 0) -> None:
        self._views, self._change, self._heads = views, change, heads
        shape = views[0].shape
        if change == "transpose":
            shape = shape[::-1]
        self.shape: tuple[int, ...] = (len(views), *shape) if change == "stack" else shape

    def read(self) -> Tensor:
        parts: list[Tensor] = []
        for view in self._views:
            values = torch.empty(view.shape)
            view.check(whole_box(view.shape))
            view.fill(whole_box(view.shape), values)
            parts.append(values)
        if self._change == "stack":
            return torch.stack(parts)
        values = parts[0]
        if self._change == "transpose":
            return values.t().contiguous()
        if self._change == "neighbours":
            return values.unflatten(0, (self._heads, 2, -1)).transpose(1, 2).reshape(values.shape)
        return values


class _FromLatent(_Source):
    """The keys' or the values' part of a matrix ``[H * (N + E), R]``: ``[H, R, N]`` or ``[H, E, R]``."""

    def __init__(self, view: View, config: Mapping[str, Any], *, keys: bool) -> None:
        super().__init__([view])
        self._keys = keys
        self._widths = (config["qk_nope_head_dim"], config["v_head_dim"])
        heads, rank = config["num_attention_heads"], view.shape[1]
        self.shape = (heads, rank, self._widths[0]) if keys else (heads, self._widths[1], rank)

    def read(self) -> Tensor:
        keys, values = super().read().unflatten(0, (-1, sum(self._widths))).split(self._widths, dim=1)
        return (keys.transpose(1, 2) if self._keys else values).contiguous()


class _Factors(_Source):
    """Llama 3.1's stretch of each rotary frequency."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.shape = (config["head_dim"] // 2,)

    def read(self) -> Tensor:
        scaling, factors = self._config["rope_scaling"], list[float]()
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        for i in range(self.shape[0]):
            turns = original * self._config["rope_theta"] ** (-2 * i / self._config["head_dim"]) / (2 * math.pi)
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            factors.append(1 / (kept + (1 - kept) / factor))
        return torch.tensor(factors, dtype=torch.float64).float()


def _sources(hf_folder: Path, config: Mapping[str, Any], architecture: str) -> Iterator[tuple[str, _Source]]:
    gguf = gguf_library()
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    table = gguf.get_tensor_name_map(number, layers)
    stacks: dict[str, dict[int, View]] = {}
    if architecture == "llama" and config.get("rope_scaling"):
        yield "rope_freqs.weight", _Factors(config)
    for name, view in SafetensorsReader(hf_folder).views().items():
        if (layer := _LAYER.match(name)) and int(layer[1]) >= layers:
            continue  # of a module for a token further ahead
        if name.endswith(".kv_b_proj.weight"):
            for part in ("k", "v"):
                source = _FromLatent(view, config, keys=part == "k")
                yield _gguf_name(table, name.replace("kv_b", f"{part}_b")), source
            continue
        if architecture == "deepseek2" and config["tie_word_embeddings"] and "embed_tokens" in name:
            yield "output.weight", _Source([view])
        if expert := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = view
            continue
        yield _gguf_name(table, name), _laid_out(view, name, config, architecture)
    for name, items in stacks.items():
        yield _gguf_name(table, name), _Source([items[j] for j in range(len(items))], "stack")


def _gguf_name(table: Any, name: str) -> str:
    name = name.replace("correction_bias", "correction.bias")
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ValueError(f"--to gguf: the gguf library has no name for {name!r}. Use --to hf.")
    return found


def _laid_out(view: View, name: str, config: Mapping[str, Any], architecture: str) -> _Source:
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return _Source([view], "neighbours", heads)
    if architecture == "gpt2" and name.endswith(TRANSPOSED):
        return _Source([view], "transpose")
    return _Source([view])


def _kind(gguf: Any, key: str, source: _Source, dtype: GgufType) -> Any:
    types = gguf.GGMLQuantizationType
    kinds = {"fp32": types.F32, "bf16": types.BF16, "fp16": types.F16, "q8_0": types.Q8_0}
    return kinds[stored_type(key, source.shape, dtype)]


def stored_type(name: str, shape: Sequence[int], dtype: GgufType) -> GgufType:
    """How a tensor is stored, by its name in Hugging Face files or in GGUF, and its shape in GGUF."""
    if len(shape) == 1 or _FLOAT32.search(name):
        return "fp32"
    if dtype == "q8_0" and (shape[-1] % 32 or _FROM_LATENT.search(name)):
        return "fp16"
    return dtype


def _nbytes(gguf: Any, shape: tuple[int, ...], kind: Any) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


def _write_settings(writer: Any, config: Mapping[str, Any]) -> None:
    if config["model_type"] == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config["n_inner"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "kv_lora_rank" in config:
        _write_latent_attention(writer, config)
        _write_deepseek_experts(writer, config)
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _write_latent_attention(writer: Any, config: Mapping[str, Any]) -> None:
    """llama.cpp keeps the latent as the one key and value of all heads."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rotated)
    if scaling := config.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf_library().RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def _write_deepseek_experts(writer: Any, config: Mapping[str, Any]) -> None:
    gating = gguf_library().ExpertGatingFuncType
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gating.SIGMOID if config["scoring_func"] == "sigmoid" else gating.SOFTMAX)
    if config["n_group"] > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
