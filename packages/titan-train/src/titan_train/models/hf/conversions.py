"""How the tensors of a family in files become those of its module: what transformers' own table says, as far as it is done here.

Three sorts of steps are done: a part of a name is another one in files; each expert is a tensor of its own in files and
part of a stack in the module; nothing. A family with any other step (halves of one linear joined, convolutions put
together) can be trained from random weights. Its files can be neither read nor written.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

_STACKED = ".experts.gate_up_proj", ".experts.down_proj"


def _steps(kind: str) -> list[Any]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return get_checkpoint_conversion_mapping(kind) or []


def _plain(pattern: str) -> str:
    return pattern.replace("\\.", ".")


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


def renamed(kind: str) -> Mapping[str, str]:
    """Part of a tensor's name in the module to that in files, where transformers renames it and does no more."""
    return {pair[1]: pair[0] for step in _steps(kind) if (pair := _renaming(step))}


def unread(kind: str) -> list[str]:
    """The steps that are not done here, as words; a step that concerns nothing of this model may be among them."""
    separate = separate_experts(kind)
    return [
        f"{', '.join(step.source_patterns)} -> {', '.join(step.target_patterns)}"
        for step in _steps(kind)
        if _renaming(step) is None and not (separate and _plain(step.target_patterns[0]).endswith(_STACKED))
    ]


def _renaming(step: Any) -> tuple[str, str] | None:
    """The part of a name in files and in the module."""
    from transformers.core_model_loading import WeightRenaming

    if type(step) is not WeightRenaming or not len(step.source_patterns) == len(step.target_patterns) == 1:
        return None
    there, here = _plain(step.source_patterns[0]), _plain(step.target_patterns[0])
    return None if set(here + there) & set("\\^$*+?()[]{}|") else (there, here)  # plain text only
