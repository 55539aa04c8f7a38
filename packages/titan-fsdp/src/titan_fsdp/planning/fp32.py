"""Modules kept in float32 inside units that compute in bfloat16.

FSDP2's dtypes belong to a wrapped unit, so what stays in float32 needs a unit of its own: one for all such modules
inside a unit, nested in it. That costs one more, small, all-gather and reduce-scatter a unit, and works on every torch
version alike. A unit that lies in a kept module is kept as it is. Inputs are cast to float32, outputs back to the dtype
around it (but see `titan_fsdp.wrapping.borders`).
"""

from dataclasses import replace

from torch import nn

from titan_fsdp.names import matches, named_modules, tied_groups
from titan_fsdp.planning.policy import MixedPrecision, Unit
from titan_fsdp.planning.units import Group, has_parameters, is_container, owner


def split_fp32(model: nn.Module, groups: list[Group], mp: MixedPrecision) -> list[Group]:
    """``groups`` with the modules that ``mp.keep_fp32`` names in nested groups, each before the one it came from.

    Raises:
        ValueError: A pattern names some, but not all, parameters of a module.
    """
    if mp.param == "fp32" or not mp.keep_fp32:
        return groups
    kept = _kept_modules(model, mp)
    members = [fqn for g in groups for fqn in g.fqns]
    inside: dict[str | None, list[str]] = {}
    for name in kept:
        inside.setdefault(owner(name, members), []).append(name)
    result: list[Group] = []
    for group in groups:
        whole = [fqn for fqn in group.fqns if owner(fqn, kept) is not None]
        taken = [name for fqn in group.fqns for name in ([fqn] if fqn in whole else inside.get(fqn, []))]
        rest = tuple(fqn for fqn in group.fqns if fqn not in taken)
        if not rest:  # the whole unit is kept
            result.append(replace(group, fp32=True))
            continue
        host = replace(group, fqns=rest)
        result += [Group(tuple(taken), replace(group.unit, match=tuple(taken)), fp32=True, host=rest)] if taken else []
        result.append(host)
    of_root = tuple(inside.get(None, []))
    return [*result, Group(of_root, Unit(of_root), fp32=True, host=("root",))] if of_root else result


def _kept_modules(model: nn.Module, mp: MixedPrecision) -> list[str]:
    """Outermost modules that a pattern names, or all of whose own parameters one names, and those tied to them.

    A container that a pattern names stands for the modules in it.
    """
    kept: list[str] = []
    containers: list[str] = []
    tied = _tied_to_kept(model, mp)
    for name, module in named_modules(model).items():
        if owner(name, kept) is not None or not has_parameters(module):
            continue
        direct = [f"{name}.{p}" if name else p for p, _ in module.named_parameters(recurse=False)]
        hit = [fqn for fqn in direct if matches(fqn, mp.keep_fp32)]
        named = name in tied or matches(name, mp.keep_fp32) or owner(name, containers) is not None
        if name and is_container(module):
            if direct and (hit or named):
                raise ValueError(
                    f"mp.keep_fp32 matches {hit or direct}, but {name!r} is a {type(module).__name__} without forward, whose "
                    "parameters compute in the dtype of what is around it. Match the module around it."
                )
            containers += [name] if named else []
            continue
        if name and named:
            kept.append(name)
        elif hit:
            if not name or len(hit) < len(direct):
                raise ValueError(
                    f"mp.keep_fp32 matches {hit} but not {sorted(set(direct) - set(hit)) or 'the root'}: dtypes go by "
                    "module. Match the whole module, or move the parameter into a module of its own."
                )
            kept.append(name)
    return kept


def _tied_to_kept(model: nn.Module, mp: MixedPrecision) -> set[str]:
    """The modules that hold a tied parameter of which a pattern names one holder: one weight has one dtype."""
    holders: set[str] = set()
    for names in tied_groups(model):
        parts = [name.split(".") for name in names]
        around = {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}
        if any(matches(name, mp.keep_fp32) for name in around):
            holders |= {".".join(part[:-1]) for part in parts}
    return holders
