"""A layout in words: the table that says what each axis is, and one rank's place in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_mesh.layout.ranks import RankLayout
from titan_mesh.layout.topology import Link


@dataclass(frozen=True)
class AxisRow:
    """One line of the table."""

    name: str
    """Axis or flatten."""
    size: int
    """Ranks in a group."""
    stride: int | None
    """Difference between neighbouring ranks of a group; None if it is not constant."""
    num_groups: int
    """How many groups the world falls into."""
    example: tuple[int, ...]
    """The group of rank 0."""
    nodes_per_group: int
    """The most nodes that one group touches."""
    link: Link
    """The slowest link that any group uses."""
    same_as: str | None
    """An earlier name with exactly the same groups, which it shares communicators with."""


_SLOWEST_LAST: tuple[Link, ...] = ("self", "nvlink", "node", "network")


def rows(layout: RankLayout) -> list[AxisRow]:
    """One row for each name of size above 1, axes first."""
    found: list[AxisRow] = []
    seen: dict[tuple[tuple[int, ...], ...], str] = {}
    topology = layout.topology
    for name in layout.names:
        if layout.size(name) == 1:
            continue
        groups = layout.groups(name)
        steps = {b - a for a, b in zip(groups[0], groups[0][1:], strict=False)}
        links: set[Link] = {topology.link(group) for group in groups}
        same_as = seen.setdefault(tuple(groups), name)
        found.append(
            AxisRow(
                name=name,
                size=len(groups[0]),
                stride=steps.pop() if len(steps) == 1 else None,
                num_groups=len(groups),
                example=groups[0],
                nodes_per_group=max(len({topology.node_of(rank) for rank in group}) for group in groups),
                link=max(links, key=_SLOWEST_LAST.index),
                same_as=None if same_as == name else same_as,
            )
        )
    return found


def explain_layout(layout: RankLayout) -> str:
    """The text of `Layout.explain` without a rank."""
    table = rows(layout)
    cells = [("axis", "size", "stride", "groups", "crosses nodes", "slowest link", "ranks of the first group")]
    for row in table:
        note = f"  (= {row.same_as})" if row.same_as else ""
        stride = "mixed" if row.stride is None else str(row.stride)
        nodes = "no" if row.nodes_per_group == 1 else f"yes, {row.nodes_per_group}"
        ranks = show_ranks(row.example) + note
        cells.append((row.name, str(row.size), stride, str(row.num_groups), nodes, row.link, ranks))
    off = [name for name in (*layout.spec.axes, "ep", "etp") if getattr(layout.spec, name) == 1]
    shown = {row.name for row in table}
    flattens = [f"{name} = {' x '.join(axes)}" for name, axes in layout.flattens.items() if name in shown]
    if layout.spec.ep * layout.spec.etp > 1:
        flattens.append(f"{' x '.join(layout.spec.expert_axes)} = dp_shard x cp x tp")
    shared = [row for row in table if row.same_as is None]
    lines = [_headline(layout), "", *_align(cells), ""]
    lines += [f"off (size 1): {', '.join(off)}"] if off else []
    lines += [f"flattens: {'; '.join(flattens)}"] if flattens else []
    in_all = sum(row.num_groups for row in shared)
    lines.append(f"communicators: {len(shared)} per rank, {in_all} in total; names with equal groups share one")
    return "\n".join(lines)


def explain_rank(layout: RankLayout, rank: int) -> str:
    """The text of `Layout.explain` for one rank."""
    topology = layout.topology
    coord = layout.coord(rank)
    place = f"node {topology.node_of(rank)}, GPU {rank % topology.gpus_per_node}"
    where = " ".join(f"{axis}={index}" for axis, index in coord.items())
    cells = [("axis", "index", "size", "nodes", "slowest link", "ranks")]
    for name in layout.names:
        group = layout.group_of(rank, name)
        if len(group) > 1:
            nodes = len({topology.node_of(other) for other in group})
            index = group.index(rank)
            cells.append((name, str(index), str(len(group)), str(nodes), topology.link(group), show_ranks(group)))
    return "\n".join([f"rank {rank} of {layout.num_ranks} · {place} · {where}", "", *_align(cells)])


def show_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    """``0-7`` for a run, ``0 8 16 24`` for a short list, ``0 8 16 … 120`` for a long one."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= limit:
        return " ".join(map(str, ranks))
    return f"{' '.join(map(str, ranks[: limit - 2]))} … {ranks[-1]}"


def _headline(layout: RankLayout) -> str:
    topology = layout.topology
    nodes = topology.nodes(layout.num_ranks)
    where = f"{nodes} node{'s' if nodes > 1 else ''} of {topology.gpus_per_node}"
    if topology.domain != topology.gpus_per_node:
        where += f", NVLink domains of {topology.domain}" if topology.domain > 1 else ", no NVLink"
    degrees = " x ".join(f"{axis}={degree}" for axis, degree in layout.spec.degrees.items() if degree > 1) or "one rank"
    experts = "".join(f", {name}={d}" for name in ("ep", "etp") if (d := getattr(layout.spec, name)) > 1)
    ranks = f"{layout.num_ranks} rank{'s' if layout.num_ranks > 1 else ''}"
    return f"{degrees}{experts} · {ranks} · {where} · outer to inner: {' '.join(layout.spec.axes)}"


def _align(cells: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell: numbers to the right, names and the last column to the left."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines: list[str] = []
    for row in cells:
        padded = [
            cell.rjust(width) if 0 < i < len(row) - 3 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
