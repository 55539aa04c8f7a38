"""Read a table of tensor-parallel styles: which style a module has, and a user's table merged with the family's."""

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import cast, get_args

from titan_fsdp import clean_fqn
from torch import nn

from titan_train.models.common.tensor_styles import Style, StyleTable
from titan_train.models.registry import family_of
from titan_train.values import did_you_mean


def table_for(model: nn.Module) -> StyleTable:
    """The table of the model's family; else what the model says in ``tensor_styles``.

    Empty for any other model, which ``parallel.tp_plan`` describes.
    """
    family = family_of(model)
    table = {} if family is None else family.tensor_styles
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    return with_adapters(table, adapted) if adapted else table


def with_adapters(table: StyleTable, adapted: Sequence[str]) -> StyleTable:
    """The table of a model in which linears have become a frozen ``base_layer`` with an adapter ``B A`` beside it.

    A linear cut by rows has B cut in the same way, and A whole. One cut by columns has A cut in the same way, and B whole: it
    is linear, so the sum over ranks of ``B A x`` is taken with the base's.

    Args:
        table: Of the model without adapters.
        adapted: Names of the modules that hold base and adapter.
    """
    found: dict[str, Style] = {}
    for pattern, style in table.items():
        if style in ("region", "replicated") or not any(matches(pattern, name) for name in adapted):
            found[pattern] = style
            continue
        rows = style != "rowwise"
        found[f"{pattern}.base_layer"] = style
        found[f"{pattern}.lora_A.*"] = "replicated" if rows else style
        found[f"{pattern}.lora_B.*"] = style if rows else "replicated"
    return found


def style_of(fqn: str, table: StyleTable) -> Style | None:
    """The style of the module (or parameter) of this name, or None where no pattern matches it."""
    for pattern, style in table.items():
        if matches(pattern, fqn):
            return style
    return None


@functools.lru_cache(maxsize=1 << 16)
def matches(pattern: str, fqn: str) -> bool:
    """Whether a pattern stands for a name: segment by segment, ``**`` for any number of them."""
    return _match_segments(pattern.split("."), fqn.split("."))


def merge_tables(model: nn.Module, family: StyleTable, plan: Mapping[str, str]) -> StyleTable:
    """A user's ``parallel.tp_plan`` before the family's table, so that it wins where both match.

    Args:
        model: The whole model, on any device.
        family: The shipped table of the model's family; empty for a user's own model.
        plan: Pattern to style, from the configuration.

    Raises:
        ValueError: A style that does not exist, or a pattern that matches nothing in the model; with the nearest choice.
    """
    names = [clean_fqn(name) for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    merged: dict[str, Style] = {}
    for pattern, style in plan.items():
        if style not in get_args(Style):
            raise ValueError(
                f"parallel.tp_plan: {pattern!r} = {style!r} is an unknown style. {did_you_mean(style, get_args(Style))}"
                f"The styles are {', '.join(get_args(Style))}."
            )
        if not any(matches(pattern, name) for name in names):
            raise ValueError(
                f"parallel.tp_plan: {pattern!r} matches no module of {type(model).__name__}. "
                f"{did_you_mean(pattern, names)}'*' stands for one segment of a name, '**' for any number."
            )
        merged[pattern] = cast(Style, style)
    return {**merged, **{pattern: style for pattern, style in family.items() if pattern not in merged}}


def _match_segments(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_match_segments(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _match_segments(pattern[1:], name[1:])
