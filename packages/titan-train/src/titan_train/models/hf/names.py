"""How the tensors of a family in files become those of its module, as far as it is done here.

Names are transformers' own, but for three things: a part of a name is another one in files, as transformers' own table says;
each expert is a tensor of its own in files and part of a stack in the module; one fused linear in files (Phi's ``qkv_proj``) is
several in the module, so that each can be cut over ranks. A family with any other step (convolutions put together) can be
trained from random weights. Its files can be neither read nor written.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from titan_ckpt import KeyMap, Pair
from torch import Tensor, nn

from titan_train.models.common.hf import published_mtp
from titan_train.models.common.moe.routed import RoutedExperts, StackedExperts
from titan_train.models.hf.lora import BASE
from titan_train.models.hf.plan import STACKED, HFPlan

_LAYER = re.compile(r"\.(\d+)\.")
_IGNORED = (r".*rotary_emb\.inv_freq", r".*\.(?:attention|attn)\.(?:masked_)?bias")
"""Tables in old checkpoints that models compute."""
_WHOLE = {"w1": ("gate_up_proj", (0, 2, 1)), "w3": ("gate_up_proj", (1, 2, 1)), "w2": ("down_proj", None)}
"""The stacks of transformers' own modules, which some folders hold in place of each expert's tensors (Qwen3.5), and the part of
one that a parameter here is."""
_STACKED = ".experts.gate_up_proj", ".experts.down_proj"


class SplitLinear(nn.Module):
    """Linears of one input whose outputs are put one after the other."""

    def __init__(self, whole: nn.Linear, widths: Mapping[str, int], *, num_heads: int, num_kv_heads: int) -> None:
        """Take ``whole`` apart.

        Args:
            whole: The linear, on meta.
            widths: Name of each part to its outputs, in order.
            num_heads: Query heads, for tensor parallelism.
            num_kv_heads: Key-value heads.
        """
        super().__init__()
        if sum(widths.values()) != whole.out_features:
            raise ValueError(f"parts of {dict(widths)} outputs do not make up a linear of {whole.out_features}.")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_counts: list[tuple[Any, str]] = []
        """(object, attribute): what else counts heads, and is to count a rank's own under tensor parallelism."""
        for name, width in widths.items():
            self.add_module(name, nn.Linear(whole.in_features, width, bias=getattr(whole, "bias", None) is not None))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d]`` to ``[..., sum of widths]``."""
        return torch.cat([part(x) for part in self.children()], dim=-1)


class SplitConvolution(nn.Module):
    """Depthwise convolutions of some channels each, of which a layer reads all weights at once."""

    bias = None

    def __init__(self, whole: nn.Conv1d, widths: Mapping[str, int]) -> None:
        """Take ``whole`` apart, which has no bias and is on meta; ``widths`` has the channels of each part, in order."""
        super().__init__()
        for name, width in widths.items():
            self.add_module(name, nn.Conv1d(width, width, whole.kernel_size[0], groups=width, bias=False))

    @property
    def weight(self) -> Tensor:
        """``[channels, 1, taps]``."""
        return torch.cat([part.get_parameter("weight") for part in self.children()])


def key_map_of(model: nn.Module, kind: str, plan: HFPlan | None) -> KeyMap:
    """The key map of a model that was built by `titan_train.models.hf.build`.

    Args:
        model: The whole model, on any device.
        kind: Its ``model_type``.
        plan: Of its family, if it has one.
    """
    if plan is None:
        pairs = _named(model, kind, plan, {pair[1]: pair[0] for step in _steps(kind) if (pair := _renaming(step))})
    else:
        pairs = _named(model, kind, plan, plan.renamed)
        pairs |= _named(model, kind, plan, plan.resaved) if plan.resaved else {}
    own_layers, copies, further = _further_layers(model, plan, tuple(pairs)) if plan is not None else ((), (), ())
    pairs = dict.fromkeys((*own_layers, *pairs))
    old: list[str] = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    patterns = [*_IGNORED, *further, *(f".*{pattern}.*" for pattern in old)]
    numbers = range(len(cast("Any", model).repeated_layers()))
    # transformers asks for such names only where a model lacks them
    own = {pair.hf.replace("{i}", str(number)).replace("{j}", "0") for pair in pairs for number in numbers}
    ignored = tuple(p for p in patterns if not any(re.fullmatch(p, name) for name in own))
    return KeyMap(kind, tuple(pairs), ignored, (r".*\.lora_[AB]\..*",), copies)


def _named(model: nn.Module, kind: str, plan: HFPlan | None, new_names: Mapping[str, str]) -> dict[Pair, None]:
    """The pairs of the model without modules for tokens further ahead, in order; ``new_names`` as `HFPlan.renamed`."""
    kinds = (SplitLinear, RoutedExperts, *(() if plan is None or plan.experts == STACKED else (StackedExperts,)))
    apart = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    pairs: dict[Pair, None] = {}
    stacks: dict[Pair, None] = {}
    separate = {} if plan is not None else separate_experts(kind) or {}
    for name in model.state_dict(keep_vars=True):
        if ".lora_" in name or name.startswith(("mtp.", "mtp_embeddings.")):
            continue
        owner = next((path for path in apart if name.startswith(f"{path}.")), None)
        if owner is None:
            pairs[Pair(_template(name), _renamed(_template(name).replace(BASE, "."), new_names))] = None
            continue
        module = apart[owner]
        if isinstance(module, RoutedExperts | StackedExperts):
            leaf = name.removeprefix(f"{owner}.")
            here = _template(f"{owner}.")
            if plan is not None and plan.experts != STACKED:
                there = _renamed(f"{here.partition(f'.{plan.feed_forward}.')[0]}.{plan.experts[leaf]}", new_names)
            else:
                there = _renamed(f"{here.removesuffix('experts.')}{separate[leaf]}", new_names)
            pairs[Pair(f"{here}{leaf}", there)] = None
            if isinstance(module, RoutedExperts):
                whole, part = _WHOLE[leaf]
                stacks[Pair(f"{here}{leaf}", f"{there.partition('{j}')[0]}{whole}", part=part)] = None
        else:
            pairs |= dict.fromkeys(_parts(owner, module))
    return pairs | stacks  # which are read, and not written


def _further_layers(
    model: Any, plan: HFPlan, pairs: tuple[Pair, ...]
) -> tuple[tuple[Pair, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Modules for tokens further ahead, by the names of their family.

    Returns:
        Their pairs; the tensors that files have once more; patterns of further layers that this model does without.
    """
    kind = str(model.published["model_type"])
    of_layers = [pair for pair in pairs if pair.native.startswith(f"{plan.layers}.{{i}}.")]
    depth, layers = len(model.mtp or ()), len(model.get_submodule(plan.layers))
    prefix = of_layers[0].hf.partition("{i}")[0]
    there = {pair.native: pair.hf for pair in reversed(pairs)}
    embedding = there[f"{plan.embedding}.weight"]
    tied = model.get_submodule(plan.head).weight is model.get_submodule(plan.embedding).weight
    head = embedding if tied else there[f"{plan.head}.weight"]
    found: list[Pair] = []
    copies: list[tuple[str, str]] = []
    for k in range(depth):
        published = published_mtp(kind, k, layers=layers, depth=depth, prefix=prefix)
        for pair in of_layers:
            native = pair.native.replace(f"{plan.layers}.{{i}}", f"mtp.{k}.block", 1)
            found.append(replace(pair, native=native, hf=pair.hf.replace(f"{prefix}{{i}}", published.block, 1)))
        for native, hf in published.own.items():
            leaves = model.get_submodule(f"mtp.{k}.{native}").named_parameters()
            found += [Pair(f"mtp.{k}.{native}.{leaf}", f"{hf}.{leaf}") for leaf, _ in leaves]
        copies += published.copies(embedding, head)
    described = int(model.published.get("num_nextn_predict_layers") or 0)
    without = tuple(rf"{re.escape(prefix)}{layers + k}\..*" for k in range(depth, described))
    return tuple(found), tuple(copies), without


@cache
def separate_experts(kind: str) -> Mapping[str, str] | None:
    """Names in files of one expert's tensors, from ``experts.`` on, for each parameter of the stack here.

    None: the family's files have no tensor for each expert.
    """
    found: dict[str, tuple[str, ...]] = {}
    for step in _steps(kind):
        target = _plain(step.target_patterns[0])
        if target.endswith(_STACKED) and all(".experts.*." in _plain(source) for source in step.source_patterns):
            leaves = (_plain(source).partition(".experts.*.")[2] for source in step.source_patterns)
            found[target.rpartition(".")[2]] = tuple(leaves)
    if {name: len(leaves) for name, leaves in found.items()} != {"gate_up_proj": 2, "down_proj": 1}:
        return None
    (gate, up), (down,) = found["gate_up_proj"], found["down_proj"]
    return {name: f"experts.{{j}}.{leaf}" for name, leaf in {"w1": gate, "w2": down, "w3": up}.items()}


def as_files_have(key_map: KeyMap, files: Collection[str]) -> KeyMap:
    """The key map with the names that these files have, where they have other ones that transformers reads as the same.

    It renames a part of all names when it writes, also where the published files do not (dense layers of Kimi Linear). In the
    files of a model that also sees, the names of its decoder begin otherwise, and those of its other parts are ignored.
    """
    templates = {_template(name) for name in files}
    steps = _steps(key_map.family)
    renamings = [pair for step in steps if (pair := _renaming(step))]
    for there, here in (("language_model.", ""), *_beginnings(steps)):
        if any(name.startswith(there) for name in files):
            begun = (replace(pair, hf=re.sub(rf"^{re.escape(here)}", there, pair.hf)) for pair in key_map.pairs)
            key_map = replace(key_map, pairs=tuple(begun))
            key_map = key_map if here else key_map.ignoring(rf"(?!{re.escape(there)}).*")

    def found(pair: Pair) -> Pair:
        others = [pair.hf.replace(here, there) for there, here in renamings if here in pair.hf]
        return replace(
            pair, hf=next((name for name in others if pair.hf not in templates and name in templates), pair.hf)
        )

    return replace(key_map, pairs=tuple(map(found, key_map.pairs)))


def _beginnings(steps: Collection[Any]) -> list[tuple[str, str]]:
    """Beginnings of names in the files of a larger model, each with that of the module."""
    changes = [step for step in steps if getattr(step, "prefix_to_remove", None) and step.model_prefix]
    return [(f"{step.model_prefix}.{step.prefix_to_remove}.", f"{step.model_prefix}.") for step in changes]


def unread(kind: str) -> list[str]:
    """The steps that are not done here, as words; a step that concerns nothing of this model may be among them."""
    separate = separate_experts(kind)
    return [
        f"{', '.join(step.source_patterns)} -> {', '.join(step.target_patterns)}"
        for step in _steps(kind)
        if _renaming(step) is None and not (separate and _plain(step.target_patterns[0]).endswith(_STACKED))
    ]


def _template(name: str) -> str:
    """The name with its layer's number left open."""
    return _LAYER.sub(".{i}.", name, count=1)


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for here, there in renamed.items():
        name = name.replace(here, there)
    return name


def _parts(owner: str, module: SplitLinear) -> list[Pair]:
    """Each part is some of the rows of the file's tensor."""
    linears = {name: part for name, part in module.named_children() if isinstance(part, nn.Linear)}
    found: list[Pair] = []
    start = 0
    for index, (name, part) in enumerate(linears.items()):
        for leaf in ("weight", "bias") if getattr(part, "bias", None) is not None else ("weight",):
            native, hf = _template(f"{owner}.{name}.{leaf}"), _template(f"{owner}.{leaf}")
            found.append(Pair(native, hf, part=(index, len(linears), 0), rows=(start, part.out_features)))
        start += part.out_features
    return found


def _steps(kind: str) -> list[Any]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping as steps_of
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return (
        steps_of(kind) or steps_of(MODEL_MAPPING_NAMES.get(kind)) or []
    )  # some families are listed by their body's class


def _plain(pattern: str) -> str:
    return pattern.replace("\\.", ".")


def _renaming(step: Any) -> tuple[str, str] | None:
    """The part of a name in files and in the module."""
    from transformers.core_model_loading import WeightRenaming

    if type(step) is not WeightRenaming or not len(step.source_patterns) == len(step.target_patterns) == 1:
        return None
    there, here = _plain(step.source_patterns[0]), _plain(step.target_patterns[0])
    return None if set(here + there) & set("\\^$*+?()[]{}|") else (there, here)  # plain text only
