"""One weight under several names, such as an embedding whose matrix is also the head's.

A tied weight is one thing: one value of each optimizer table, one state of the optimizer, one tensor of a checkpoint, one
share of the gradient's norm, one dtype. In one process that follows by itself, as there is one parameter. Two stages of a
pipeline hold a copy each, and each knows one name only. So what a tied weight is called is asked of the whole model, here, and
everybody else takes it from here: the optimizer's groups, checkpoints (under the first name), initial weights, the
sum of the copies' gradients, and patterns of modules in the configuration.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import titan_fp8
import torch.distributed as dist
from titan_fsdp import named_parameters
from titan_mesh import Mesh
from titan_pipeline import Schedule
from torch import nn

from titan_train.config import Config
from titan_train.parallel.stages import stage_layers, take_stage

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
    """The configuration in which a pattern of modules that means one holder of a tied weight means all of them.

    Args:
        config: Its ``parallel.keep_fp32`` and ``float8.skip`` go by the names of modules.
        whole: The whole model.
    """
    tied = [names for names in dict.fromkeys(parameter_names(whole).values()) if len(names) > 1]
    if not tied:
        return config

    def completed(patterns: Sequence[str], matches: Callable[[str, str], bool]) -> tuple[str, ...]:
        meant = [
            names
            for names in tied
            if any(matches(part, p) for name in names for part in _and_owners(name) for p in patterns)
        ]
        return tuple(dict.fromkeys([*patterns, *(name.rpartition(".")[0] for names in meant for name in names)]))

    keep_fp32 = completed(config.parallel.keep_fp32, fnmatch.fnmatchcase)
    skip = completed(config.float8.skip, lambda name, pattern: titan_fp8.matching_pattern(name, (pattern,)) is not None)
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, keep_fp32=keep_fp32),
        float8=dataclasses.replace(config.float8, skip=skip),
    )


def _and_owners(name: str) -> list[str]:
    """A parameter's name, and those of the modules around it, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


@dataclass(frozen=True, slots=True)
class TiedCopies:
    """One parameter that several pipeline stages hold, each a copy of its own, equal on all."""

    names: tuple[str, ...]
    """Its names; this rank may hold some, all or none of them."""
    copies: int
    """How many stages hold one."""
    group: dist.ProcessGroup | None
    """The ranks that hold the copies; None if all of them are on one rank, or none is here."""


def tied_copies(config: Config, whole: nn.Module, mesh: Mesh, schedule: Schedule) -> list[TiedCopies]:
    """The parameters of which several pipeline stages hold a copy. Collective over all ranks."""
    tied = [names for names in dict.fromkeys(parameter_names(whole).values()) if len(names) > 1]
    if not tied:
        return []
    last = schedule.num_stages - 1
    held = [
        parameter_names(take_stage(whole, layers, first=stage == 0, last=stage == last)).keys()
        for stage, layers in enumerate(stage_layers(config, whole, schedule))
    ]
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    found: list[TiedCopies] = []
    for names in tied:
        stages = [stage for stage, here in enumerate(held) if not here.isdisjoint(names)]
        ranks = tuple(sorted({schedule.placement[stage] for stage in stages}))
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = _group_of(ranks, mesh)
        if len(stages) > 1:
            found.append(TiedCopies(names, len(stages), groups.get(ranks)))
    return found


def _group_of(pp_ranks: Sequence[int], mesh: Mesh) -> dist.ProcessGroup | None:
    """The group of these ranks of this rank's pipeline, if it is one of them. Collective over all ranks."""
    mine: dist.ProcessGroup | None = None
    for pipeline in mesh.layout.groups("pp"):
        members = [pipeline[rank] for rank in pp_ranks]
        group = cast(dist.ProcessGroup, dist.new_group(members, timeout=mesh.timeout))
        if mesh.global_rank in members:
            mine = group
    return mine
