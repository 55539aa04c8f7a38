"""The model families that are known: ours, those of installed packages, and those that a program registers.

A package registers families by entry points of the group ``titan_train.families``, which every process of a run reads:

    [project.entry-points."titan_train.families"]
    cohere = "my_package.cohere:COHERE"

`register_family` does the same for the current process only. Nothing here imports torch.
"""

import logging
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from titan_train.models.deepseek import DEEPSEEK_FAMILY
from titan_train.models.family import Family, class_path
from titan_train.models.flux import FLUX_FAMILY
from titan_train.models.gpt import GPT_FAMILY
from titan_train.models.llama import LLAMA_FAMILY
from titan_train.models.qwen3 import QWEN3_FAMILY
from titan_train.models.qwen3_next import QWEN3_NEXT_FAMILY
from titan_train.models.vision_language import DEEPSEEK_VL_FAMILY, GPT_VL_FAMILY, LLAMA_VL_FAMILY, QWEN3_VL_FAMILY
from titan_train.values import did_you_mean

if TYPE_CHECKING:
    from torch import nn

ENTRY_POINT_GROUP = "titan_train.families"

_SHIPPED = (
    LLAMA_FAMILY, GPT_FAMILY, QWEN3_FAMILY, QWEN3_NEXT_FAMILY, DEEPSEEK_FAMILY, FLUX_FAMILY, QWEN3_VL_FAMILY, LLAMA_VL_FAMILY,
    GPT_VL_FAMILY, DEEPSEEK_VL_FAMILY,
)  # fmt: skip
_registered: dict[str, Family] = {}
_logger = logging.getLogger(__name__)


def families() -> dict[str, Family]:
    """Every known family by name: shipped, installed, registered."""
    known = {family.name: family for family in _SHIPPED}
    return known | _installed() | _registered


def register_family(family: Family) -> Family:
    """Make a family known to this process, and return it.

    A run with several ranks starts other processes: use an entry point there.

    Raises:
        ValueError: Its name, or the name of one of its configurations, is taken by another family.
    """
    others = {name: known for name, known in families().items() if known != family}
    _check_names(family, others)
    _registered[family.name] = family
    return family


def list_models() -> list[str]:
    """The names that ``model.name`` can be, besides a dotted path."""
    return [name for family in families().values() for name in family.configs]


def find_model(name: str) -> tuple[Family, Any]:
    """The family of a shipped configuration, and its arguments.

    Raises:
        ValueError: No family has it.
    """
    for family in families().values():
        if name in family.configs:
            return family, family.configs[name]
    raise ValueError(
        f"unknown model {name!r}. {did_you_mean(name, list_models())}Known are {', '.join(list_models())}."
    )


def family_of(model: "nn.Module") -> Family | None:
    """The family whose module class is exactly the model's, or the one that a model of transformers makes; else None."""
    from titan_train.models.traits import traits_of

    own: Family | None = traits_of(model).own_family
    if own is not None:
        return own
    path = class_path(type(model))
    return next((family for family in families().values() if family.model == path), None)


def is_shipped(model: "nn.Module") -> bool:
    """Whether the model's class is exactly that of a family in this package."""
    return class_path(type(model)) in {family.model for family in _SHIPPED}


def names_shipped(name: str, task: str) -> bool:
    """Whether ``model.name`` is a configuration of a family in this package that is trained on ``task``."""
    return any(name in family.configs for family in _SHIPPED if family.task == task)


@cache
def _installed() -> dict[str, Family]:
    """Families of installed packages. One that cannot be loaded is left out with a warning; the others still work."""
    known = {family.name: family for family in _SHIPPED}
    found: dict[str, Family] = {}
    for name, family in _entry_points():
        if not isinstance(family, Family):
            _logger.warning(
                "entry point %s of %s is a %s, not a Family", name, ENTRY_POINT_GROUP, type(family).__name__
            )
            continue
        try:
            _check_names(family, known | found)
        except ValueError as err:
            _logger.warning("entry point %s of %s: %s", name, ENTRY_POINT_GROUP, err)
            continue
        found[family.name] = family
    return found


def _entry_points() -> Iterator[tuple[str, Any]]:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            yield entry.name, entry.load()
        except Exception as err:  # a broken package must not stop runs that do not use it
            _logger.warning("entry point %s of %s could not be loaded: %s", entry.name, ENTRY_POINT_GROUP, err)


def _check_names(family: Family, others: dict[str, Family]) -> None:
    if family.name in others:
        raise ValueError(f"a family named {family.name!r} is already registered. Give yours another name.")
    for other in others.values():
        if taken := sorted(family.configs.keys() & other.configs.keys()):
            raise ValueError(
                f"family {family.name!r}: the family {other.name!r} already has a configuration {taken[0]!r}. Rename yours."
            )
