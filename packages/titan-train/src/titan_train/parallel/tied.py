"""One weight under several names, such as an embedding whose matrix is also the head's.

A tied weight is one thing: one value of each optimizer table, one state of the optimizer, one tensor of a checkpoint, one
share of the gradient's norm, one dtype. In one process that follows by itself, as there is one parameter. Two stages of a
pipeline hold a copy each, and each knows one name only. So what a tied weight is called is asked of the whole model, here, and
everybody else takes it from here: the optimizer's groups, checkpoints (under the first name), initial weights, the
pipeline, which sums the copies' gradients, and patterns of modules in the configuration: of those kept in float32, which
are no float8 layers either, and of those skipped by float8.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence

import titan_fp8
from titan_fsdp import named_parameters
from torch import nn

from titan_train.config import Config, Float8Config
from titan_train.models.common.moe.experts import Experts
from titan_train.models.common.moe.routed import StackedExperts
from titan_train.models.traits import traits_of

ParameterNames = Mapping[str, tuple[str, ...]]
"""Each name of a whole model's parameters, to all names of that parameter, the first in front. A tied weight has several."""


def parameter_names(model: nn.Module) -> ParameterNames:
    """The clean names of all parameters of a model, on any device."""
    found: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model, duplicates=True):
        found.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in found.values() for name in names}


def tied_to_first(names: ParameterNames) -> dict[str, str]:
    """Further names of tied parameters, to the first."""
    return {name: every[0] for name, every in names.items() if name != every[0]}


def meaning_all_copies(config: Config, whole: nn.Module) -> Config:
    """The configuration in which a pattern of modules that means one holder of a tied weight means all of them, and layers that
    are kept in float32 are skipped by float8.

    Args:
        config: Its ``parallel.keep_fp32`` and ``float8.skip`` go by the names of modules.
        whole: The whole model.
    """
    tied = [names for names in dict.fromkeys(parameter_names(whole).values()) if len(names) > 1]

    def completed(patterns: Sequence[str], matches: Callable[[str, str], bool]) -> tuple[str, ...]:
        meant = [
            names
            for names in tied
            if any(matches(part, p) for name in names for part in _and_owners(name) for p in patterns)
        ]
        return tuple(dict.fromkeys([*patterns, *(name.rpartition(".")[0] for names in meant for name in names)]))

    keep_fp32 = completed(config.parallel.keep_fp32, fnmatch.fnmatchcase)
    skip = completed(config.float8.skip, lambda name, pattern: titan_fp8.matching_pattern(name, (pattern,)) is not None)
    if (
        skip
    ):  # empty is the model's own. One process converts no shared weight, so no stage that holds one alone does either
        skip = tuple(dict.fromkeys([*skip, *(name.rpartition(".")[0] for names in tied for name in names)]))
    kept = [
        name
        for name, module in whole.named_modules()
        if isinstance(module, nn.Linear | Experts | StackedExperts) and is_kept(name, module, keep_fp32)
    ]
    if kept and config.float8.recipe != "none":
        skip = (*(skip or skip_patterns(whole, config.float8)), *kept)
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, keep_fp32=keep_fp32),
        float8=dataclasses.replace(config.float8, skip=skip),
    )


def skip_patterns(model: nn.Module, config: Float8Config) -> Sequence[str]:
    """What stays in high precision: as configured, or else as the model says."""
    own = traits_of(model).float8_skip
    return config.skip or (titan_fp8.DEFAULT_SKIP if own is None else own)


def is_kept(name: str, module: nn.Module, keep_fp32: Sequence[str]) -> bool:
    """Whether patterns of ``parallel.keep_fp32`` name a module, one around it or a parameter of its own."""
    own = (f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False))
    names = [*_and_owners(name), *own] if keep_fp32 else []
    return any(fnmatch.fnmatchcase(part, pattern) for part in names for pattern in keep_fp32)


def _and_owners(name: str) -> list[str]:
    """A parameter's name, and those of the modules around it, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
