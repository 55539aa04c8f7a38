"""A tiny model of the same kind: few layers, narrow, few tokens, so that what a family computes can be tried in a moment.

The configuration is cut, not the module: transformers builds the tiny model with its own code. Its layers are the first few,
as many as it takes to have one of each sort that the whole model mixes. Widths are divided by a power of two that leaves
heads of at least 8 channels. Counts (heads, groups, kernels) stay, so that what divides what still does. Nothing here knows
a family: fields are recognised by how they are named everywhere. Where a cut cannot be built, a less thorough one is tried.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, cast

from torch import nn

VOCABULARY = 96
WINDOW = 6
"""Of a layer that sees a window or a chunk: fewer tokens than the longest document that is tried."""
_HEAD, _WIDTH, _EXPERTS = 8, 64, 8

_WIDE = re.compile(
    r"((hidden|intermediate|inner|ffn|layer|embedding|proj|forward|head)_size|_dim|_dims|_rank|_lowrank|_width|channels)$"
    r"|^(dim|dim_(ff|head|model_base)|d_(model|head|inner|ff|rel|kv)|dff|n_embd|n_inner|mamba_d_(head|ssm)|mamba_headdim"
    r"|hidden_size_\w+|intermediate_size_\w+)$"
)
_NOT_WIDE = re.compile(r"vocab|kernel|state|conv1d")
_DEPTH = re.compile(
    r"^(n_layers?|num_(decoder_)?layers|\w*num_hidden_layers|decoder_layers|num_blocks|num_layers_per_stack)$"
)
_EXPERT_COUNT = re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num)$")
_WINDOW = re.compile(
    r"^((mamba_)?chunk_size|sliding_window|sliding_window_size|window_size|attention_window_size|attention_chunk_size|local_attention"
    r"|(compressed_sparse|heavily_compressed)_attention)$"
)
_LAYER_LIST = re.compile(r"layer|idx|ids|indices")
_PER_CHANNEL = ("short_factor", "long_factor")
"""Lists with a number for each pair of rotated channels."""
_NUMBERED = re.compile(r"idx|index|layer_id|layer_num|^_|training|name_or_path")


def layers_that_show_all(layers: Sequence[nn.Module]) -> int:
    """How many of the first layers have one of each sort: the same classes inside, with the same switches. At least two."""
    sorts = [sort_of(layer) for layer in layers]
    return max(min(2, len(sorts)), 1 + max((sorts.index(sort) for sort in sorts), default=0))


def sort_of(layer: nn.Module) -> tuple[object, ...]:
    """Equal for two layers with the same classes inside and the same switches: what they compute has the same shapes."""
    return tuple(_sort(name, module) for name, module in layer.named_modules())


def cuts(filled: Mapping[str, Any], *, depth: int, layers: int) -> Iterator[dict[str, Any]]:
    """Contents of ``config.json``, each less thoroughly cut than the one before.

    Args:
        filled: All fields with their values, defaults too.
        depth: Layers of the whole model.
        layers: Layers of the cut.
    """
    scales = [2**power for power in reversed(range(_scale(filled).bit_length()))]
    for number, experts, factor in product((layers, depth), (True, False), scales):
        cut = copy.deepcopy(dict(filled))
        for table in _tables(cut):
            _shorten(table, depth, number)
            _narrow(table, factor)
            _shrink(table, experts=experts)
        yield cut


def _sort(name: str, module: nn.Module) -> tuple[object, ...]:
    switches = {
        key: value if isinstance(value, bool | str) else type(value).__name__
        for key, value in vars(module).items()
        if (value is None or isinstance(value, bool | str | int)) and not _NUMBERED.search(key)
    }
    return name, type(module).__name__, tuple(sorted(switches.items(), key=str))


def _tables(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration, and those inside it (``text_config``)."""
    yield config
    for value in list(config.values()):
        if isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[Any, Any]", value)):
            yield from _tables(cast("dict[str, Any]", value))


def _scale(config: dict[str, Any] | Mapping[str, Any]) -> int:
    """The power of two that widths are divided by."""

    def first(*names: str) -> int:
        text: Any = config.get("text_config")
        found = [table.get(name) for name in names for table in (config, text) if isinstance(table, Mapping)]
        return next((value for value in found if type(value) is int and value > 0), 0)

    width = first("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "emb_dim")
    heads = first("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads") or 1
    head = first("head_dim", "attention_head_dim") or width // heads
    scale = 1
    while scale * 2 * _WIDTH <= width and scale * 2 * _HEAD <= head:
        scale *= 2
    return scale


def _shorten(table: dict[str, Any], depth: int, layers: int) -> None:
    for key, value in table.items():
        if _DEPTH.match(key) and value == depth:
            table[key] = layers
        elif key in _PER_CHANNEL:
            continue
        elif (isinstance(value, list) or (isinstance(value, str) and "pattern" in key)) and len(value) == depth:
            table[key] = value[:layers]
        elif isinstance(value, list) and _LAYER_LIST.search(key):
            numbers = cast("list[Any]", value)
            table[key] = [n for n in numbers if type(n) is not int or n < layers]
        elif (
            isinstance(value, dict) and value and all(str(number).isdigit() for number in cast("dict[Any, Any]", value))
        ):
            table[key] = {number: of for number, of in cast("dict[Any, Any]", value).items() if int(number) < layers}


def _narrow(table: dict[str, Any], factor: int) -> None:
    def scaled(value: Any) -> Any:
        if isinstance(value, list):
            return [scaled(part) for part in cast("list[Any]", value)]
        return value // factor if type(value) is int and value >= 2 * factor and value % factor == 0 else value

    for key, value in table.items():
        if key in _PER_CHANNEL and isinstance(value, list) and len(cast("list[Any]", value)) % factor == 0:
            table[key] = value[::factor]
        if _WIDE.search(key) and not _NOT_WIDE.search(key):
            table[key] = scaled(value)


def _shrink(table: dict[str, Any], *, experts: bool) -> None:
    """Few tokens in the vocabulary, few experts, short windows."""
    chosen = [table.get(key) for key in ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")]
    groups = [table.get(key) for key in ("n_group", "num_expert_group")]
    least = max([_EXPERTS, *(2 * n for n in chosen if type(n) is int), *(4 * n for n in groups if type(n) is int)])
    for key, value in table.items():
        if type(value) is not int:
            continue
        if "vocab_size" in key and value > VOCABULARY:
            table[key] = VOCABULARY
        elif re.search(r"_token_id$|_token_index$|_index$", key) and value >= VOCABULARY:
            table[key] = VOCABULARY - 1
        elif experts and _EXPERT_COUNT.match(key) and value > least:
            table[key] = least
        elif _WINDOW.match(key) and value > WINDOW:
            table[key] = WINDOW
