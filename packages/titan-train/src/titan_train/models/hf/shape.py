"""The shape of a published model, from the fields of its ``config.json``. No torch, no transformers.

Families name the same sizes in a few ways, which are all read. What no field says (an ungated feed-forward, biases) is known
by ``model_type``; its plan says whether queries and keys are normalised. Matrices are exact for the families with a plan whose
layers are of softmax attention with as many heads each, or gated delta nets; a few vectors per layer (norms, biases, sinks) may
be missed, or counted where there are none. Of a list with a number for each layer, the largest counts.

Left out or counted as something else:

- DeepSeek-V3.2, GLM-5: the indexer.
- DeepSeek-V4: its compressors and indexer, and the mixers of residual streams; compressed attention is a window as wide as the
  keys of a row of 4,096 tokens.
- Mamba-2 layers (Granite 4, Nemotron-H): convolutions, decays and the norm inside.
- Layers with a state of other kinds (Kimi Linear): attention of the same heads.
- Gemma 3n: embeddings and projections for each layer, AltUp and LAuReL: a large part of its parameters.
- Layers with unlike heads (Gemma 4, Laguna, MiMo-V2-Flash): each as the fields without a layer's name say.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from titan_train.models.hf.plans import hf_plans
from titan_train.models.shape import (
    AttentionWidths,
    Block,
    DeltaShape,
    ExpertsShape,
    FeedForwardShape,
    ModelShape,
    StateSpaceShape,
)

_TIED = (
    "gpt2", "bloom", "opt", "falcon", "gemma", "gemma2", "gemma3_text", "vaultgemma", "cohere", "cohere2", "smollm3",
    "starcoder2", "granite_swa", "minicpm3", "youtu",
)  # fmt: skip
"""Families whose head is the embedding's matrix where the file does not say."""
_LAYER_NORM = (
    "gpt2", "gpt_neox", "bloom", "opt", "falcon", "starcoder2", "phi", "gptj", "gpt_bigcode", "mpt", "nemotron", "persimmon",
    "jais2",
)  # fmt: skip
"""Families with an ungated feed-forward and norms with a bias."""
_UNGATED = (*_LAYER_NORM, "arcee", "apertus", "nanochat", "nemotron_h")
_FOUR_NORMS = ("gemma3_text", "gemma2", "glm4", "hyperclovax", "kolibri1", "afmoe", "beam")
_GATED_HEADS = ("afmoe", "beam", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with a gate for each channel of attention's result."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk")
_STATES = ("linear_attention", "mamba")
"""Words of ``layer_types`` for layers that carry a state."""
_BIASED = (
    "gpt2", "gpt_neox", "bloom", "opt", "phi", "starcoder2", "persimmon", "jais2", "qwen2", "qwen2_moe", "gpt_oss", "glm", "glm4",
    "seed_oss",
)  # fmt: skip
_ONE_SHARED = ("llama4_text", "hunyuan_v1_moe")
"""Families with one shared expert, as wide as a routed one, that no field tells of."""
_STEPS = ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval")
"""Every so many layers one has experts, the last of them."""
_ONE_PART = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp", "mamba": "linear_attention",
             "attention": "full_attention"}  # fmt: skip
"""Letters and older words for layers that are a mixer or a feed-forward alone (Nemotron-H)."""
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip
_LEADING = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")

_RATIOS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""What the numbers of ``compress_ratios`` are called in ``layer_types``."""
_ROW = 4096


def shape_of_published(name: str, published: Mapping[str, Any], *, mtp: int = 0) -> ModelShape:
    """The shape that ``config.json`` describes.

    Args:
        name: Of the model.
        published: The file's content.
        mtp: Modules that predict a further token.

    Raises:
        ValueError: A size is missing or not a positive number.
    """
    inner = published.get("text_config")
    fields: Mapping[str, Any] = (
        {**published, **cast("Mapping[str, Any]", inner)} if isinstance(inner, dict) else published
    )
    kind = str(fields.get("model_type"))
    read = _Reader(name, fields)
    dim = read.size("hidden_size", "n_embd", "d_model")
    parts = _parts(fields)
    layers = len(parts) or read.size("num_hidden_layers", "n_layer", "n_layers")
    heads = read.size("num_attention_heads", "n_head", "n_heads")
    attention = _attention(read, kind, dim, heads)
    hidden = read.size("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * dim)
    width = read.size("intermediate_size_mlp", default=hidden)
    dense = FeedForwardShape(width, gated=kind not in _UNGATED, bias=kind in _UNGATED and kind in _BIASED)
    routed = _experts(read, kind, hidden)
    norm = 2 if kind in _LAYER_NORM else 1
    norms = (4 if kind in _FOUR_NORMS else 2) * norm
    blocks = _alone(read, parts, attention, dense, routed) or [
        _with_state(read, count, feed, norms)
        if near is None
        else Block(count, near, feed, norms=norms, streams=int(fields.get("hc_mult") or 1))
        for near, feed, count in _groups(fields, layers, attention, dense, routed)
    ]
    return ModelShape(
        name,
        dim,
        tuple(blocks),
        read.size("vocab_size"),
        tied=bool(fields.get("tie_word_embeddings", kind in _TIED)),
        positions=read.size("n_positions", "max_position_embeddings") if kind in ("gpt2", "opt") else 0,
        final_norm=norm,
        mtp=mtp,
    )


class _Reader:
    """Sizes of a file, each under one of several names."""

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self._name, self.fields = name, fields

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there; the largest of its numbers where it has one for each layer."""
        value = next((self.fields[name] for name in names if self.fields.get(name) is not None), default)
        if isinstance(value, list) and value and all(type(size) is int for size in cast("list[Any]", value)):
            value = max(cast("list[int]", value))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{self._name!r}: config.json has {names[0]}={value!r}, and a model's shape needs a positive number there. Use "
                "the folder of a decoder, or estimate a shipped model of similar shape."
            )
        return value


def _attention(read: _Reader, kind: str, dim: int, heads: int) -> AttentionWidths:
    fields = read.fields
    if fields.get("kv_lora_rank"):
        rope = read.size("qk_rope_head_dim")
        return AttentionWidths(
            heads, heads, read.size("qk_nope_head_dim") + rope, value_dim=read.size("v_head_dim", default=max(1, dim // heads)),
            q_lora=int(fields.get("q_lora_rank") or 0), kv_lora=read.size("kv_lora_rank"), rope_dim=rope,
        )  # fmt: skip
    if fields.get("o_lora_rank"):
        return AttentionWidths(
            heads, read.size("num_key_value_heads"), read.size("head_dim"), q_lora=read.size("q_lora_rank"),
            o_lora=read.size("o_lora_rank"), o_groups=read.size("o_groups"), shared_kv=True,
        )  # fmt: skip
    single = 1 if fields.get("multi_query") and not fields.get("new_decoder_architecture") else heads
    return AttentionWidths(
        heads,
        read.size("num_key_value_heads", "num_kv_heads", default=single),
        read.size("head_dim", default=max(1, dim // heads)),
        value_dim=int(fields.get("v_head_dim") or 0),
        gated=kind in _GATED_HEADS,
        qk_norm=bool(fields.get("use_qk_norm", _norms_heads(kind))),
        bias=bool(fields.get("attention_bias", kind in _BIASED)),
    )


def _with_state(read: _Reader, count: int, feed: FeedForwardShape | ExpertsShape, norms: int) -> Block:
    """Blocks whose mixer carries a state; tensor parallelism leaves it whole."""
    if read.fields.get("mamba_n_heads"):
        sizes = map(read.size, ("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state"))
        return Block(count, None, feed, ssm=StateSpaceShape(*sizes), whole_state=True, norms=norms)
    names = "num_value_heads", "num_key_heads", "value_head_dim", "key_head_dim", "conv_kernel_dim"
    delta = DeltaShape(*(read.size(f"linear_{name}") for name in names))
    return Block(count, None, feed, delta=delta, whole_state=True, norms=norms)


def _parts(fields: Mapping[str, Any]) -> list[str]:
    """What each layer is, where layers are a mixer or a feed-forward alone; empty for other families."""
    found: list[str] | str = fields.get("layers_block_type") or fields.get("hybrid_override_pattern") or []
    known = (*_ONE_PART.values(), *_ONE_PART)
    return [_ONE_PART.get(part, part) for part in found] if all(part in known for part in found) else []


def _alone(
    read: _Reader, parts: list[str], attention: AttentionWidths, dense: FeedForwardShape, routed: ExpertsShape | None
) -> list[Block]:
    """Blocks of layers that are one part each."""
    blocks: list[Block] = []
    for part in dict.fromkeys(parts):
        block = Block(parts.count(part), norms=1)
        if part == "linear_attention":
            groups = "mamba_n_groups" if "mamba_n_groups" in read.fields else "n_groups"
            sizes = map(read.size, ("mamba_num_heads", groups, "mamba_head_dim", "ssm_state_size"))
            block = replace(block, ssm=StateSpaceShape(*sizes), whole_state=True)
        elif part == "full_attention":
            block = replace(block, attention=attention)
        else:
            block = replace(block, ffn=routed if part == "moe" else dense)
        blocks.append(block)
    return blocks


def _norms_heads(kind: str) -> bool:
    """Whether queries and keys are normalised, as the family's plan says."""
    plan = hf_plans().get(kind)
    return plan is not None and any(
        f".{plan.attention}." in name and name.endswith(("_norm", ".*_layernorm")) for name in plan.styles
    )


def _experts(read: _Reader, kind: str, hidden: int) -> ExpertsShape | None:
    fields = read.fields
    if not any(fields.get(name) for name in _EXPERTS):
        return None
    width = read.size("moe_intermediate_size", default=hidden)
    number = next((int(fields[name]) for name in _SHARED_EXPERTS if fields.get(name)), int(kind in _ONE_SHARED))
    shared = next((fields[name] for name in _SHARED_WIDTHS if fields.get(name)), number * width)
    groups = int(fields.get("n_group") or 1)
    return ExpertsShape(
        read.size(*_EXPERTS),
        read.size(*_CHOSEN),
        width,
        int(shared),
        gated=kind not in _UNGATED,
        latent_dim=int(fields.get("moe_latent_size") or 0),
        bias=kind == "gpt_oss",
        shared_gate=kind.startswith("qwen") and bool(fields.get("shared_expert_intermediate_size")),
        max_groups=int(fields.get("topk_group") or 0) if groups > 1 else 0,
    )


def _groups(
    fields: Mapping[str, Any],
    layers: int,
    attention: AttentionWidths,
    dense: FeedForwardShape,
    routed: ExpertsShape | None,
) -> list[tuple[AttentionWidths | None, FeedForwardShape | ExpertsShape, int]]:
    """Layers that are alike, and how many there are of each; dense ones first. None is a layer with a state."""
    windows = _windows(fields, layers)
    delta = bool(fields.get("linear_num_value_heads"))
    every = int(fields.get("full_attention_interval") or 4)
    types: list[Any] = fields.get("layer_types") or []
    if delta and not types:
        types = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    states = _STATES if delta or fields.get("mamba_n_heads") else ()
    leading = next((int(fields[name]) for name in _LEADING if fields.get(name)), 0)
    sorts: list[Any] = fields.get("mlp_layer_types") or []
    also = fields.get("mlp_only_layers") or []
    listed: list[int] | None = fields.get("moe_layers")
    step = next((int(fields[name]) for name in _STEPS if fields.get(name)), 1)

    def routes(layer: int) -> bool:
        if layer < len(sorts):
            return sorts[layer] != "dense"
        if listed is not None:
            return layer in listed
        return layer >= leading and layer not in also and (layer + 1) % step == 0

    count: dict[tuple[bool, int, bool], int] = {}
    for layer, window in enumerate(windows):
        kind = routed is not None and routes(layer), window, layer < len(types) and types[layer] in states
        count[kind] = count.get(kind, 0) + 1
    return [
        (
            None if state else replace(attention, window=window, sparse=attention.shared_kv),
            routed if is_routed and routed is not None else dense,
            number,
        )
        for (is_routed, window, state), number in sorted(count.items())
    ]


def _windows(fields: Mapping[str, Any], layers: int) -> list[int]:
    """Keys that a query of each layer sees; 0 is all of those before it."""
    window = int(fields.get("sliding_window") or 0) if fields.get("use_sliding_window", True) else 0
    types: list[Any] = fields.get("layer_types") or [_RATIOS.get(n) for n in fields.get("compress_ratios") or []]
    first = fields.get("max_window_layers", 0) if "use_sliding_window" in fields else 0
    rate = int((fields.get("compress_rates") or {}).get(_RATIOS[128], 128))
    seen = {
        _RATIOS[0]: window,
        _RATIOS[4]: window + int(fields.get("index_topk") or 0),
        _RATIOS[128]: window + _ROW // rate,
    }
    return [
        0 if not window else seen.get(types[n], 0) if n < len(types) else window * (n >= first) for n in range(layers)
    ]
