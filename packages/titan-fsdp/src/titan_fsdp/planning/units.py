"""Which modules form a unit: found, or as the user named them.

Finding them: the outermost repeated blocks are a unit each. A block is a child of a ``ModuleList`` or ``ModuleDict``, or
one of several siblings of one class that have submodules. One that holds more than a fifth of the parameters and is
itself made of such blocks (an encoder beside a decoder, a stage of a convolutional network) is a tower: the search goes
on inside it. Experts are never taken apart, because ranks may skip some of them.

A module without forward, such as a ``ParameterList``, is no unit: what reads its parameters is around it.

Embeddings before the blocks are a unit each; everything with parameters that comes after them (final norm, head) is one
unit together, the last. A module whose weight is tied to one elsewhere, or that is itself in several places, stays in the root,
which is gathered throughout; blocks that share one are one unit. What remains belongs to the root as well. Registration order
stands for execution order.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from titan_fsdp.names import expand, named_modules, tied_groups
from titan_fsdp.planning.policy import Unit

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)

FEWEST_UNITS = 5
"""A unit should hold at most this part, a fifth, of the parameters: it is what a rank holds unsharded at a time."""


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
        return _in_order(_discover(model, modules), modules)
    groups = _discover(model, modules) if "auto" in units else []
    named = [unit if isinstance(unit, Unit) else Unit(unit) for unit in units if unit != "auto"]
    chosen = [group for unit in named for group in _resolve(unit, modules)]
    # what is named stays whole: blocks that were found inside it are part of it; and it is taken out of what was found
    names = [fqn for group in chosen for fqn in group.fqns]
    groups = [group for group in groups if not all(_is_inside(fqn, names) for fqn in group.fqns)]
    rests = [(group, tuple(fqn for fqn in group.fqns if fqn not in names)) for group in groups]
    groups = [replace(group, fqns=rest) for group, rest in rests if rest] + chosen
    _check_disjoint(groups)
    _check_tied(model, groups)
    return _in_order(groups, modules)


def _is_inside(fqn: str, names: Sequence[str]) -> bool:
    return any(fqn.startswith(f"{name}.") for name in names)


def _in_order(groups: list[Group], modules: dict[str, nn.Module]) -> list[Group]:
    order = {name: i for i, name in enumerate(modules)}
    return sorted(groups, key=lambda g: min(order[name] for name in g.fqns))


def has_parameters(module: nn.Module) -> bool:
    """Whether ``module`` or a submodule has a parameter."""
    return next(module.parameters(), None) is not None


def is_container(module: nn.Module) -> bool:
    """Whether ``module`` only holds modules or parameters for others: FSDP hooks forward, and it has none."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def owner(name: str, fqns: Sequence[str]) -> str | None:
    """The longest of ``fqns`` that is ``name`` or a parent of it."""
    owners = [fqn for fqn in fqns if name == fqn or name.startswith(fqn + ".")]
    return max(owners, key=len, default=None)


def _discover(model: nn.Module, modules: dict[str, nn.Module]) -> list[Group]:
    ids = {id(module): name for name, module in reversed(modules.items())}
    blocks = [ids[id(block)] for block in _find_blocks(modules[""], _Search(modules[""]))]
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
    ends = [(name,) for name in before] + ([tuple(after)] if after else [])
    return _settle_ties(model, [Group((name,), Unit(name)) for name in blocks], [Group(e, Unit(e)) for e in ends])


class _Search:
    """What the search for blocks needs to know of the whole model."""

    def __init__(self, model: nn.Module) -> None:
        uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
        self._tied = {parameter for parameter, count in uses.items() if count > 1}
        self._total = self.size([model])

    def size(self, modules: Iterable[nn.Module]) -> int:
        """Parameters of ``modules`` that are tied to nothing: tied ones stay in the root."""
        found = {id(p): p.numel() for module in modules for p in module.parameters()}
        return sum(numel for parameter, numel in found.items() if parameter not in self._tied)

    def blocks_of_tower(self, module: nn.Module) -> list[nn.Module]:
        """The blocks that ``module`` is made of; none if it is a block itself."""
        if self.size([module]) * FEWEST_UNITS <= self._total:
            return []
        inner = [block for block in _find_blocks(module, self) if not _may_be_skipped(block, module)]
        # A tower is its blocks, and little else: what is left of it goes to the root.
        return inner if len(inner) > 1 and self.size(inner) >= 0.8 * self.size([module]) else []


def _find_blocks(module: nn.Module, search: _Search) -> list[nn.Module]:
    """The blocks inside ``module``, in registration order."""
    found: list[nn.Module] = []
    children = [child for child in module.children() if has_parameters(child)]
    siblings = Counter(type(child) for child in children if next(child.children(), None) is not None)
    for child in children:
        repeated = isinstance(module, _CONTAINERS) or siblings[type(child)] > 1
        if repeated and not is_container(child):
            found += search.blocks_of_tower(child) or [child]
        else:
            found += _find_blocks(child, search)
    return found


def _may_be_skipped(block: nn.Module, tower: nn.Module) -> bool:
    """Whether ``block`` may be an expert: without a norm of its own, and not in a ``Sequential``, which skips nothing."""
    if any(isinstance(m, nn.Sequential) and block in list(m.children()) for m in tower.modules()):
        return False
    return not any("norm" in type(m).__name__.lower() for m in block.modules())


def _settle_ties(model: nn.Module, blocks: list[Group], ends: list[Group]) -> list[Group]:
    """Blocks tied to each other become one unit; what is tied to anything else is left to the root."""
    for names in _tied_names(model, [fqn for g in [*blocks, *ends] for fqn in g.fqns]):
        tied_blocks = [g for g in blocks if any(owner(name, g.fqns) is not None for name in names)]
        tied_ends = [g for g in ends if any(owner(name, g.fqns) is not None for name in names)]
        in_root = [name for name in names if all(owner(name, g.fqns) is None for g in [*blocks, *ends])]
        if len(tied_blocks) + len(tied_ends) + bool(in_root) == 1:
            continue
        ends = [g for g in ends if g not in tied_ends]
        if tied_ends or in_root:
            blocks = [g for g in blocks if g not in tied_blocks]
        else:
            fqns = tuple(fqn for g in tied_blocks for fqn in g.fqns)
            merged = Group(fqns, Unit(fqns))
            blocks = [
                merged if g is tied_blocks[-1] else g for g in blocks if g is tied_blocks[-1] or g not in tied_blocks
            ]
    return [*blocks, *ends]


def _tied_names(model: nn.Module, fqns: Sequence[str]) -> list[list[str]]:
    """As `tied_groups`, with every name of a module that several others share; a unit that is registered twice is one."""
    first: dict[int, str] = {}
    same: dict[str, str] = {}
    for name, module in named_modules(model, duplicates=True).items():
        known = first.setdefault(id(module), name)
        if known != name and known in fqns:
            same[name] = known
    groups: list[list[str]] = []
    for names in tied_groups(model, shared=True):
        told = [(owner(name, list(same)), name) for name in names]
        distinct = list(
            dict.fromkeys(name if alias is None else same[alias] + name[len(alias) :] for alias, name in told)
        )
        if len(distinct) > 1:
            groups.append(distinct)
    return groups


def _resolve(unit: Unit, modules: dict[str, nn.Module]) -> list[Group]:
    if isinstance(unit.match, type):
        wanted = unit.match
        names = [n for n, m in modules.items() if n and isinstance(m, wanted) and has_parameters(m)]
        if not names:
            classes = sorted({type(m).__name__ for m in modules.values()})
            raise ValueError(f"Unit({wanted.__name__}) matches no module. The model has {', '.join(classes)}.")
        _check_hooked(names, modules)
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
    names = [name for name in names if has_parameters(modules[name])]
    _check_hooked(names, modules)
    return names


def _check_hooked(names: Sequence[str], modules: dict[str, nn.Module]) -> None:
    for name in names:
        if is_container(modules[name]):
            holds = any(has_parameters(child) for child in modules[name].children())
            instead = (
                f"Use {name + '.*'!r} to make each child a unit." if holds else "Leave it out: the unit around it does."
            )
            raise ValueError(
                f"unit {name!r} is a {type(modules[name]).__name__}, which has no forward to gather for. {instead}"
            )


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
    for names in _tied_names(model, [fqn for g in groups for fqn in g.fqns]):
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
