"""Which modules form a unit: found, or as the user named them.

Finding them: the outermost repeated blocks (children of a ``ModuleList`` or ``ModuleDict``, or siblings of one class
that has submodules) are a unit each; embeddings that come before them are a unit each; everything with parameters
that comes after them (final norm, head) is one unit together, the last. Modules that share a parameter share a unit.
What remains belongs to the root. Registration order stands for execution order.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from titan_fsdp.names import expand, named_modules, tied_groups
from titan_fsdp.planning.policy import Unit

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Group:
    """The modules of one unit, by FQN, with the unit that asked for them."""

    fqns: tuple[str, ...]
    unit: Unit
    fp32: bool = False
    """Kept in float32."""
    host: tuple[str, ...] | None = None
    """FQNs of the unit this one was taken out of; None for a unit of its own."""


def find_groups(model: nn.Module, units: str | Sequence[Unit | type[nn.Module] | str]) -> list[Group]:
    """The units of ``model`` in registration order, without the root.

    Raises:
        ValueError: A pattern matches nothing, a container or the root is named, two units claim one module, or a tied
            parameter would be split over two units.
    """
    modules = named_modules(model)
    if isinstance(units, str):
        return _merge_tied(model, _discover(model, modules))
    groups = _merge_tied(model, _discover(model, modules)) if "auto" in units else []
    named = [unit if isinstance(unit, Unit) else Unit(unit) for unit in units if unit != "auto"]
    groups += [group for unit in named for group in _resolve(unit, modules)]
    _check_disjoint(groups)
    _check_tied(model, groups)
    order = {name: i for i, name in enumerate(modules)}
    return sorted(groups, key=lambda g: min(order[name] for name in g.fqns))


def has_parameters(module: nn.Module) -> bool:
    """Whether ``module`` or a submodule has a parameter."""
    return next(module.parameters(), None) is not None


def is_container(module: nn.Module) -> bool:
    """Whether ``module`` only holds others: FSDP hooks forward, and a container has none."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


def owner(name: str, fqns: Sequence[str]) -> str | None:
    """The longest of ``fqns`` that is ``name`` or a parent of it."""
    owners = [fqn for fqn in fqns if name == fqn or name.startswith(fqn + ".")]
    return max(owners, key=len, default=None)


def _discover(model: nn.Module, modules: dict[str, nn.Module]) -> list[Group]:
    ids = {id(module): name for name, module in reversed(modules.items())}
    blocks: list[str] = []
    _find_blocks(modules[""], ids, blocks)
    if not blocks:
        return []
    order = {name: i for i, name in enumerate(modules)}
    first, last = min(order[b] for b in blocks), max(order[b] for b in blocks)
    before: list[str] = []
    after: list[str] = []
    for name, module in modules.items():
        inside = owner(name, [*blocks, *before, *after]) is not None
        around = not name or any(block.startswith(name + ".") for block in blocks)
        if inside or around or not has_parameters(module) or is_container(module):
            continue
        if order[name] < first and isinstance(module, nn.Embedding):
            before.append(name)
        elif order[name] > last:
            after.append(name)
    groups = [Group((name,), Unit(name)) for name in [*before, *blocks]]
    if after:
        groups.append(Group(tuple(after), Unit(tuple(after))))
    return groups


def _find_blocks(module: nn.Module, ids: dict[int, str], found: list[str]) -> None:
    children = [child for child in module.children() if has_parameters(child)]
    siblings = [type(child) for child in children if next(child.children(), None) is not None]
    for child in children:
        if (is_container(module) and not is_container(child)) or (
            not is_container(child) and siblings.count(type(child)) > 1
        ):
            found.append(ids[id(child)])
        else:
            _find_blocks(child, ids, found)


def _merge_tied(model: nn.Module, groups: list[Group]) -> list[Group]:
    """Put units that share a parameter into one, at the place of the last of them."""
    for names in tied_groups(model):
        holders = [g for g in groups if any(owner(name, g.fqns) is not None for name in names)]
        outside = [name for name in names if all(owner(name, g.fqns) is None for g in groups)]
        if outside:  # the other name is the root's own: leave all of them to the root
            groups = [g for g in groups if g not in holders]
        elif len(holders) > 1:
            fqns = tuple(fqn for g in holders for fqn in g.fqns)
            merged = Group(fqns, Unit(fqns))
            groups = [merged if g is holders[-1] else g for g in groups if g is holders[-1] or g not in holders]
    return groups


def _resolve(unit: Unit, modules: dict[str, nn.Module]) -> list[Group]:
    if isinstance(unit.match, type):
        wanted = unit.match
        names = [n for n, m in modules.items() if n and isinstance(m, wanted) and has_parameters(m)]
        if not names:
            classes = sorted({type(m).__name__ for m in modules.values()})
            raise ValueError(f"Unit({wanted.__name__}) matches no module. The model has {', '.join(classes)}.")
        return [Group((name,), unit) for name in names]
    if isinstance(unit.match, str):
        return [Group((name,), unit) for name in _expand(unit.match, modules)]
    fqns = tuple(dict.fromkeys(name for pattern in unit.match for name in _expand(pattern, modules)))
    return [Group(fqns, replace(unit, match=fqns))]


def _expand(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    if pattern in ("", "root"):
        raise ValueError(f"unit {pattern!r} names the root, which is always wrapped, last. Leave it out.")
    names = expand(pattern, list(modules))
    if not names:
        near = difflib.get_close_matches(pattern, list(modules), n=3, cutoff=0.4) or list(modules)[1:4]
        raise ValueError(f"unit {pattern!r} matches no module. Nearest names: {', '.join(near)}.")
    for name in names:
        if is_container(modules[name]):
            raise ValueError(
                f"unit {name!r} is a {type(modules[name]).__name__}: a container has no forward to gather for. "
                f"Use {name + '.*'!r} to make each child a unit."
            )
    return [name for name in names if has_parameters(modules[name])]


def _check_disjoint(groups: list[Group]) -> None:
    seen: dict[str, Group] = {}
    for group in groups:
        for fqn in group.fqns:
            if fqn in seen:
                raise ValueError(
                    f"module {fqn!r} is claimed by two units ({seen[fqn].unit.match!r} and {group.unit.match!r}). "
                    "A module belongs to one unit: drop it from one of them."
                )
            seen[fqn] = group


def _check_tied(model: nn.Module, groups: list[Group]) -> None:
    for names in tied_groups(model):
        holder = {name: _group_of(name, groups) for name in names}
        if len(set(holder.values())) > 1:
            first = sorted({owner(name, g.fqns) or name.rpartition(".")[0] for name in names for g in groups})
            raise ValueError(
                f"{' and '.join(map(repr, names))} are one tied parameter in different units: each would shard and "
                f"update its own copy. Put their modules in one unit, for example Unit({first!r})."
            )


def _group_of(name: str, groups: list[Group]) -> int:
    """Index of the group that owns parameter ``name``; -1 for the root."""
    lengths = [(len(fqn), i) for i, g in enumerate(groups) if (fqn := owner(name, g.fqns)) is not None]
    return max(lengths)[1] if lengths else -1
