"""What each rank holds of each parameter: a table applied to a model, as plain arithmetic.

No process group and no weights are needed, so `check_tensor_parallel` makes the same plan on a laptop that
`apply_tensor_parallel` carries out on the ranks, and refuses what would fail there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_fsdp import clean_fqn, named_parameters
from torch import nn

from titan_train.models.common.tensor_styles import Style, StyleTable
from titan_train.models.traits import traits_of
from titan_train.parallel.tensor.styles import style_of

ROW_CUT: tuple[Style, ...] = (
    "embedding",
    "colwise",
    "heads",
    "kv_heads",
    "groups",
    "heads_norm",
    "kv_heads_norm",
    "head",
)
"""Styles that cut dimension 0 of the weight (and the bias, where there is one)."""

_COLWISE = ("colwise", "heads", "kv_heads")
_NORMS = ("heads_norm", "kv_heads_norm")
_COUNTS = {
    "heads": "num_heads", "heads_norm": "num_heads", "kv_heads": "num_kv_heads", "kv_heads_norm": "num_kv_heads",
    "groups": "n_groups",
}  # fmt: skip
"""Styles that cut by units to the attribute that counts them."""
_STREAM = ("embedding", "positions", "head")


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """One module that takes part."""

    fqn: str
    module: nn.Module
    style: Style
    in_region: bool
    """A region around it communicates for it."""
    units: int = 0
    """What cannot be cut further: heads, or single rows or columns. A rank holds a whole number of them, at least one."""
    size: int = 0
    """Rows (or columns) of the whole weight, a multiple of ``units``."""
    names: tuple[str, ...] = ("weight", "bias")
    """Parameters of the module that are cut."""

    def share(self, tp: int, rank: int) -> tuple[int, int]:
        """First row (or column) of ``rank`` and how many it holds."""
        start, count = own_units(self.units, tp, rank)
        width = self.size // self.units
        return start * width, count * width

    def pieces(self, tp: int) -> int:
        """Different shares among the ranks: fewer than ``tp`` where heads are replicated."""
        return min(self.units, tp)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A model's tensor parallelism."""

    modules: tuple[PlannedModule, ...]
    """Modules with a style, in the model's order."""
    partial: tuple[str, ...]
    """Whole parameters whose gradient on one rank is a partial sum."""
    heads: tuple[tuple[Any, str, int], ...]
    """(module, attribute, new value): where something counts heads, it is to count this rank's."""


def own_units(units: int, tp: int, rank: int) -> tuple[int, int]:
    """The first of this rank's units, and how many: as even as can be, or one that several ranks share."""
    start = rank * units // tp
    return start, max(1, (rank + 1) * units // tp - start)


def plan_tensor_parallel(
    model: nn.Module, tp: int, *, table: StyleTable, sequence_parallel: bool, replicate_kv: bool
) -> TensorPlan:
    """Read a table against a model, or a pipeline stage of one.

    Args:
        model: On any device; not cut yet.
        tp: Ranks.
        table: Of the model's family, or a user's own.
        sequence_parallel: Tokens outside of regions are split over the ranks.
        replicate_kv: Ranks may share a key-value head where there are more ranks than heads.

    Raises:
        ValueError: The model cannot be cut like that; the message names both numbers, or the module.
    """
    # where a pipeline stage lacks a module of transformers, an Identity is in its place
    named = {clean_fqn(name): module for name, module in model.named_modules() if not isinstance(module, nn.Identity)}
    styles: dict[str, Style] = {}
    for name in named:
        style = style_of(name, table) if name else None
        if style is not None:
            styles[name] = style
    regions = [name for name, style in styles.items() if style == "region"]
    planned: list[PlannedModule] = []
    counters: dict[tuple[int, str], tuple[Any, str, int]] = {}
    for name, style in styles.items():
        module, inside = named[name], _is_inside(name, regions)
        if inside and style in ("region", *_STREAM):
            raise ValueError(
                f"the table puts {name} ({style}) inside the region {_region_of(name, regions)}: its output "
                "would be all-reduced twice. Remove one of the two from the table."
            )
        units = size = 0
        if style in _COUNTS:
            size = _rows_or_columns(name, style, module)
            units, holders = _count_heads(name, style, size, named)
            _check_heads(name, style, units, tp, replicate_kv)
            for holder, attribute, count in holders:
                counters[id(holder), attribute] = (holder, attribute, own_units(count, tp, 0)[1])
        elif style in ("embedding", "head", "colwise", "rowwise"):
            units = size = _rows_or_columns(name, style, module)
            _check_size(name, style, size, tp)
        planned.append(PlannedModule(name, module, style, inside, units, size))
    for name, style, size in _vectors_by_heads(model, table, styles):
        owner, _, leaf = name.rpartition(".")
        units, _ = _count_heads(name, style, size, named)
        _check_heads(name, style, units, tp, replicate_kv)
        planned.append(PlannedModule(owner, named[owner], style, True, units, size, (leaf,)))
    _check_regions(regions, planned)
    _check_tied(model, styles)
    if sequence_parallel:
        _check_tokens_are_split(named, styles, regions)
    partial = tuple(_partial_parameters(model, table, styles, regions, sequence_parallel))
    return TensorPlan(tuple(planned), partial, tuple(counters.values()))


def _vectors_by_heads(
    model: nn.Module, table: StyleTable, styles: dict[str, Style]
) -> Iterator[tuple[str, Style, int]]:
    """Parameters that a region holds itself, with entries of their own: a number or several for each head."""
    for name, parameter in named_parameters(model):
        style = style_of(name, table)
        if style in ("heads", "kv_heads") and parameter.ndim == 1 and styles.get(name.rpartition(".")[0]) == "region":
            yield name, style, parameter.shape[0]


def _rows_or_columns(name: str, style: Style, module: nn.Module) -> int:
    """How long the dimension is that the style cuts."""
    weight = getattr(module, "weight", None)
    if style in _NORMS and weight is not None and weight.ndim == 1:
        return weight.shape[0]
    if style in ("heads", "kv_heads") and weight is not None and weight.ndim != 2:
        return weight.shape[0]  # one number of each head, or the taps of a convolution of its channels
    if weight is None or weight.ndim != 2 or style in _NORMS:
        raise ValueError(
            f"the table says {style} for {name}, a {type(module).__name__}: only a module with a two-dimensional weight "
            "can be cut. Use 'replicated', or 'region' for a module that holds cut linears."
        )
    if style == "embedding" and (not isinstance(module, nn.Embedding) or module.max_norm or module.scale_grad_by_freq):
        raise ValueError(
            f"the table says embedding for {name}: it must be an nn.Embedding without max_norm and scale_grad_by_freq, "
            "which need the whole table and all tokens. Use 'replicated', and turn sequence parallelism off."
        )
    return weight.shape[0 if style in ROW_CUT else 1]


def _check_size(name: str, style: Style, size: int, tp: int) -> None:
    if style in ("embedding", "head"):
        if size < tp:
            raise ValueError(
                f"tp={tp} ranks cannot share the {size} rows of {name}: one would hold none. Use tp <= {size}."
            )
    elif size % tp:
        what = "inputs" if style == "rowwise" else "outputs"
        raise ValueError(
            f"tp={tp} does not divide the {size} {what} of {name}: ranks would hold different amounts. Use one of "
            f"{_divisors(size, limit=64)}, or a model whose size is a multiple of {tp}."
        )


def _count_heads(
    name: str, style: Style, rows: int, named: dict[str, nn.Module]
) -> tuple[int, list[tuple[Any, str, int]]]:
    """Heads of a projection, and everything beside it (or in a module's ``head_counts``) that counts them."""
    parent, wanted = named[name.rpartition(".")[0]], _COUNTS[style]
    holders: list[tuple[Any, str, int]] = [
        (module, attribute, int(getattr(module, attribute)))
        for module in (parent, *parent.children())
        for attribute in {"num_heads": 0, "num_kv_heads": 0, wanted: 0}
        if isinstance(getattr(module, attribute, None), int)
    ]
    holders += [
        (counter, attribute, int(getattr(counter, attribute)))
        for module in (parent, *parent.children())
        for counter, attribute in traits_of(module).head_counts
    ]
    counts = [count for _, attribute, count in holders if attribute == wanted]
    counts = counts or [count for _, attribute, count in holders if attribute == "num_heads"]
    if not counts or rows % counts[0]:
        found = f"{counts[0]}, which does not divide its {rows} rows" if counts else "none"
        raise ValueError(
            f"the table says {style} for {name}, but the number of heads is {found}: give the module that holds it, or "
            f"one beside it, the attribute {wanted}; or use 'colwise'."
        )
    return counts[0], holders


def _check_heads(name: str, style: Style, heads: int, tp: int, replicate_kv: bool) -> None:
    if heads % tp == 0:
        return
    attribute = _COUNTS[style]
    if style in ("kv_heads", "kv_heads_norm") and tp % heads == 0:
        if replicate_kv:
            return
        raise ValueError(
            f"tp={tp} is more than {attribute}={heads} of {name}: a rank would hold part of a head. Use one of "
            f"{_divisors(heads)}, or set parallel.replicate_kv=true, which gives each head to {tp // heads} ranks."
        )
    part = "group" if style == "groups" else "head"
    raise ValueError(
        f"tp={tp} does not divide {attribute}={heads} of {name}: a rank would hold part of a {part}. Use one of "
        f"{_divisors(heads)}, or a model whose {attribute} is a multiple of {tp}."
    )


def _check_regions(regions: list[str], planned: list[PlannedModule]) -> None:
    for region in regions:
        inside = [p.style for p in planned if p.fqn.startswith(f"{region}.")]
        if "rowwise" not in inside or not set(_COLWISE) & set(inside):
            raise ValueError(
                f"the region {region} needs linears of style colwise (or heads) and of style rowwise inside, and has "
                f"{sorted(set(inside)) or 'none'}: its output is summed over the ranks, so each must compute a part. Add "
                "them to the table, or make it 'replicated'."
            )


def _check_tied(model: nn.Module, styles: dict[str, Style]) -> None:
    """Refuse to cut the copies of one weight in two ways."""
    tied: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model, duplicates=True):
        tied.setdefault(id(parameter), []).append(name)
    for names in tied.values():
        cut = {name: _cut_dim(_owner_style(name, styles)) for name in names}
        if len(set(cut.values())) > 1:
            ways = ", ".join(
                f"{name} by {'rows' if dim == 0 else 'columns'}" for name, dim in cut.items() if dim is not None
            )
            raise ValueError(
                f"{' and '.join(names)} are one tied parameter, but the table cuts {ways} and not the others alike: give "
                "all their modules styles that cut the same way, such as 'embedding' and 'head'."
            )


def _check_tokens_are_split(named: dict[str, nn.Module], styles: dict[str, Style], regions: list[str]) -> None:
    """Refuse an embedding that would look up all tokens on each rank: gradients would be summed once too often."""
    seeing_all = [*regions, *(name for name, style in styles.items() if style == "whole")]
    for name, module in named.items():
        if not isinstance(module, nn.Embedding) or _is_inside(name, seeing_all):
            continue
        if _owner_style(f"{name}.weight", styles) in ("replicated", "whole"):
            raise ValueError(
                f"the table says replicated for {name}, an embedding: each rank would look up all tokens, but under sequence "
                "parallelism it holds only some of them. Use 'embedding' (or 'positions' for learned positions), or turn "
                "sequence parallelism off."
            )


def _cut_dim(style: Style | None) -> int | None:
    """The dimension of the weight that a style cuts, if any."""
    return 0 if style in ROW_CUT else 1 if style == "rowwise" else None


def _partial_parameters(
    model: nn.Module, table: StyleTable, styles: dict[str, Style], regions: list[str], sequence_parallel: bool
) -> Iterator[str]:
    """Whole parameters whose gradients come from part of the tokens, or of the heads, on each rank."""
    forgotten: list[str] = []
    for name, _ in named_parameters(model):
        owner = styles.get(name.rpartition(".")[0])
        # a wide pattern such as "**" also matches the names of parameters that are cut
        style = owner if _cut_dim(owner) is not None else style_of(name, table) or _owner_style(name, styles)
        if style is None or style == "region":
            forgotten.append(name)
        elif style in ("replicated", "whole", "positions") and (sequence_parallel or _is_inside(name, regions)):
            yield name
    if forgotten:
        more = f" and {len(forgotten) - 5} more" if len(forgotten) > 5 else ""
        raise ValueError(
            f"the tensor-parallel table does not cover {', '.join(forgotten[:5])}{more}: whether their gradients are "
            "partial sums is unknown. Give each a style; 'replicated' keeps it whole on every rank."
        )


def _owner_style(parameter: str, styles: dict[str, Style]) -> Style | None:
    """The style of the module that holds a parameter, or "replicated" where a module further out is."""
    owner = parameter.rpartition(".")[0]
    if owner in styles:
        return styles[owner]
    while owner := owner.rpartition(".")[0]:
        if styles.get(owner) in ("replicated", "whole"):
            return "replicated"
    return None


def _is_inside(name: str, regions: list[str]) -> bool:
    return any(name.startswith(f"{region}.") for region in regions)


def _region_of(name: str, regions: list[str]) -> str:
    return next(region for region in regions if name.startswith(f"{region}."))


def _divisors(number: int, limit: int | None = None) -> list[int]:
    return [d for d in range(1, min(number, limit or number) + 1) if number % d == 0]
