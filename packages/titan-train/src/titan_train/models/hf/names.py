"""Names of tensors in files: transformers' own, except for experts (one tensor for each) and fused linears."""

import re
from collections.abc import Mapping

from titan_ckpt import KeyMap, Pair
from torch import nn

from titan_train.models.common.moe.routed import RoutedExperts
from titan_train.models.hf.conversions import renamed, separate_experts
from titan_train.models.hf.fused import SplitLinear
from titan_train.models.hf.lora import BASE
from titan_train.models.hf.plans import HFPlan

_LAYER = re.compile(r"\.(\d+)\.")
_IGNORED = (r".*rotary_emb\.inv_freq", r".*\.(?:attention|attn)\.(?:masked_)?bias")
"""Tables in old checkpoints that models compute."""


def key_map_of(model: nn.Module, kind: str, plan: HFPlan | None) -> KeyMap:
    """The key map of a model that was built by `titan_train.models.hf.build`.

    Args:
        model: The whole model, on any device.
        kind: Its ``model_type``.
        plan: Of its family, if it has one.
    """
    apart = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts | SplitLinear)}
    pairs: dict[Pair, None] = {}
    new_names = plan.renamed if plan is not None else renamed(kind)
    separate = {} if plan is not None else separate_experts(kind) or {}
    for name in model.state_dict(keep_vars=True):
        if ".lora_" in name:
            continue
        owner = next((path for path in apart if name.startswith(f"{path}.")), None)
        if owner is None:
            pairs[Pair(_template(name), _renamed(_template(name).replace(BASE, "."), new_names))] = None
            continue
        module = apart[owner]
        if isinstance(module, RoutedExperts):
            leaf = name.removeprefix(f"{owner}.")
            here = _template(f"{owner}.")
            if plan is not None:
                there = f"{here.partition(f'.{plan.feed_forward}.')[0]}.{plan.experts[leaf]}"
            else:
                there = _renamed(f"{here.removesuffix('experts.')}{separate[leaf]}", new_names)
            pairs[Pair(f"{here}{leaf}", there)] = None
        else:
            pairs |= dict.fromkeys(_parts(owner, module))
    old: list[str] = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    patterns = [*_IGNORED, *(f".*{pattern}.*" for pattern in old)]
    own = [pair.hf for pair in pairs]  # transformers asks for such names only where a model lacks them
    ignored = tuple(p for p in patterns if not any(re.fullmatch(p, name) for name in own))
    return KeyMap(kind, tuple(pairs), ignored, (r".*\.lora_[AB]\..*",))


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
