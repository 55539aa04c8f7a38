"""A drawing of a layout: nodes in rows, GPUs in columns, one panel an axis, one colour a group.

Cells of one colour form a group: a column of one colour is an axis that crosses nodes, a row is one that stays inside.
The group of one chosen rank is outlined in every panel. Up to 24 nodes each cell shows its rank; a larger layout is drawn
whole as a map of small cells (`titan_mesh.layout.svg_map`). The drawing follows the reader's light or dark preference.
"""

import colorsys
from dataclasses import dataclass
from html import escape

from titan_mesh.layout.explain import AxisRow, rows, show_ranks
from titan_mesh.layout.ranks import RankLayout
from titan_mesh.layout.svg_map import RankMap

_CELL_W, _CELL_H = 46, 34
_LABEL_W = 62  # room for "node 12"
_GAP = 44  # between panels
_MARGIN = 28
_HEAD_H = 84
_TITLE_H = 62  # panel title, subtitle, GPU numbers
_LEGEND_LINE = 20
_MAX_LEGEND = 6
_MAX_NODES = 24
_MAX_GPUS = 16
_PANELS_A_ROW = 3
_MAPS_A_ROW = 2
_FONT = "font-family='Inter, Segoe UI, Helvetica, Arial, sans-serif'"
# The class keeps the rules to this drawing where it is part of a page.
_STYLE = (
    "<style>.titan-mesh{--paper:#fff;--ink:#0f172a;--soft:#475569;--faint:#64748b}"
    "@media(prefers-color-scheme:dark){.titan-mesh{--paper:#16191e;--ink:#e9ebef;--soft:#a2a9b4;--faint:#8b919c}}"
    ".titan-mesh .paper{fill:var(--paper)}.titan-mesh .ink{fill:var(--ink)}.titan-mesh .soft{fill:var(--soft)}"
    ".titan-mesh .faint{fill:var(--faint)}.titan-mesh .cell{fill:#0f172a}.titan-mesh .cell2{fill:#334155}"
    ".titan-mesh .mine{fill:none;stroke:var(--ink)}</style>"
)
# Twelve tints that stay apart from each other and carry dark text; more groups than this get computed hues.
_PALETTE = (
    "#8ecae6", "#ffb703", "#95d5b2", "#f4978e", "#cdb4db", "#d4a373",
    "#5fa8d3", "#fb8500", "#52b788", "#e5989b", "#a58fd8", "#c9ada7",
)  # fmt: skip


def draw_svg(layout: RankLayout, *, rank: int = 0) -> str:
    """Draw ``layout`` as a stand-alone SVG document.

    Args:
        layout: What to draw. Of more than 4,096 ranks the first are drawn: the pattern repeats.
        rank: The rank whose groups are outlined.

    Returns:
        The document's text.

    Raises:
        ValueError: ``rank`` is not one of the layout's.
    """
    coord = layout.coord(rank)
    panels = [_Panel(layout, row, rank) for row in rows(layout) if row.same_as is None]
    columns = max(1, min(_MAPS_A_ROW if panels and panels[0].map is not None else _PANELS_A_ROW, len(panels)))
    lines = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    panel_width = panels[0].width if panels else 420
    width = 2 * _MARGIN + columns * panel_width + (columns - 1) * _GAP
    parts: list[str] = []
    y = float(_MARGIN + _HEAD_H)
    for line in lines:
        for i, panel in enumerate(line):
            parts += panel.draw(_MARGIN + i * (panel_width + _GAP), y)
        y += max(panel.height for panel in line) + _GAP
    height = y - (_GAP if lines else 0) + _MARGIN
    degrees = " x ".join(f"{axis}={degree}" for axis, degree in layout.spec.degrees.items() if degree > 1) or "one rank"
    topology = layout.topology
    nodes = topology.nodes(layout.num_ranks)
    place = ", ".join(f"{axis}={index}" for axis, index in coord.items() if layout.size(axis) > 1) or "alone"
    small = bool(panels) and panels[0].map is not None
    cell = "A cell is a rank" if small else "In a cell: the rank, and below it its index in the group"
    head = [
        _text(_MARGIN, _MARGIN + 18, f"{degrees} on {layout.num_ranks} ranks", size=22, weight=700),
        _text(
            _MARGIN,
            _MARGIN + 42,
            f"{nodes} node{'s' if nodes > 1 else ''} of {min(topology.gpus_per_node, layout.num_ranks)} ranks; outer to inner: "
            f"{', '.join(layout.spec.axes)}",
            size=13,
            role="soft",
        ),
        _text(
            _MARGIN,
            _MARGIN + 62,
            f"One colour is one group. {cell}. Outlined: the groups of rank {rank} ({place}).",
            size=13,
            role="soft",
        ),
    ]
    width = max(width, 860)  # the head's text
    return "\n".join([_open(width, height, str(layout.spec)), *head, *parts, "</svg>", ""])


def _open(width: float, height: float, title: str) -> str:
    size = f"width='{width:g}' height='{height:g}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} viewBox='0 0 {width:g} {height:g}' class='titan-mesh' {_FONT}>\n"
        f"<title>{escape(title)}: ranks, nodes and groups</title>\n{_STYLE}\n<rect {size} class='paper'/>"
    )


@dataclass
class _Panel:
    """One axis: the grid of nodes and GPUs, coloured by that axis's groups, and its legend."""

    layout: RankLayout
    row: AxisRow
    rank: int

    @property
    def gpus(self) -> int:
        return min(self.layout.topology.gpus_per_node, self.layout.num_ranks, _MAX_GPUS)

    @property
    def nodes(self) -> int:
        return min(self.layout.topology.nodes(self.layout.num_ranks), _MAX_NODES)

    @property
    def cut(self) -> bool:
        if self.map is not None:
            return self.map.drawn < self.layout.num_ranks
        return self.nodes < self.layout.topology.nodes(self.layout.num_ranks) or self.gpus < min(
            self.layout.topology.gpus_per_node, self.layout.num_ranks
        )

    @property
    def map(self) -> RankMap | None:
        """The small drawing of a large layout."""
        layout = self.layout
        per_node = min(layout.topology.gpus_per_node, layout.num_ranks)
        large = layout.topology.nodes(layout.num_ranks) > _MAX_NODES or per_node > _MAX_GPUS
        return RankMap(layout.num_ranks, per_node) if large else None

    @property
    def width(self) -> float:
        return self.map.width if self.map is not None else max(_LABEL_W + self.gpus * _CELL_W, 330)

    @property
    def height(self) -> float:
        grid = self.map.height if self.map is not None else self.nodes * (_CELL_H + 4)
        return _TITLE_H + grid + 14 + (self._legend_lines + self.cut) * _LEGEND_LINE

    @property
    def _legend_lines(self) -> int:
        return min(self.row.num_groups, _MAX_LEGEND) + (self.row.num_groups > _MAX_LEGEND)

    def draw(self, x: float, y: float) -> list[str]:
        groups = self.layout.groups(self.row.name)
        group_of = {rank: i for i, group in enumerate(groups) for rank in group}
        index_of = {rank: i for group in groups for i, rank in enumerate(group)}
        colors = _colors(len(groups))
        chosen = group_of[self.rank]
        parts = self._title(x, y, len(groups))
        top = y + _TITLE_H
        if self.map is not None:
            parts += self.map.draw(x, top, groups, colors, chosen)
            return parts + self._legend(x, top + self.map.height + 16, groups, colors, chosen)
        outlines: list[str] = []
        for node in range(self.nodes):
            row_y = top + node * (_CELL_H + 4)
            parts.append(_text(x, row_y + 21, f"node {node}", size=12, role="soft"))
            for gpu in range(self.gpus):
                rank = node * self.layout.topology.gpus_per_node + gpu
                if rank >= self.layout.num_ranks:
                    break
                cell_x = x + _LABEL_W + gpu * _CELL_W
                box = f"<rect x='{cell_x:g}' y='{row_y:g}' width='{_CELL_W - 4}' height='{_CELL_H}' rx='4'"
                parts.append(f"{box} fill='{colors[group_of[rank]]}'/>")
                middle = cell_x + (_CELL_W - 4) / 2
                parts.append(_text(middle, row_y + 17, str(rank), size=14, weight=600, anchor="middle", role="cell"))
                parts.append(_text(middle, row_y + 29, str(index_of[rank]), size=10, anchor="middle", role="cell2"))
                if group_of[rank] == chosen:
                    outlines.append(f"{box} class='mine' stroke-width='2.5'/>")
        parts += outlines  # on top of every cell
        legend_y = top + self.nodes * (_CELL_H + 4) + 16
        return parts + self._legend(x, legend_y, groups, colors, chosen)

    def _title(self, x: float, y: float, num_groups: int) -> list[str]:
        row = self.row
        if row.nodes_per_group == 1:
            where = "each inside one node"
        elif row.link == "nvlink":
            where = f"each over {row.nodes_per_group} nodes of one NVLink domain"
        else:
            where = f"each over {row.nodes_per_group} nodes"
        axes = self.layout.flattens.get(row.name)
        name = row.name if axes is None else f"{row.name} = {' x '.join(a for a in axes if self.layout.size(a) > 1)}"
        numbers = [
            _text(
                x + _LABEL_W + (_CELL_W - 4) / 2 + gpu * _CELL_W,
                y + 54,
                str(gpu),
                size=10,
                anchor="middle",
                role="faint",
            )
            for gpu in range(self.gpus if self.map is None else 0)
        ]
        return [
            _text(x, y + 14, name, size=18, weight=700),
            _text(
                x,
                y + 34,
                f"{num_groups} group{'s' if num_groups > 1 else ''} of {row.size}, {where}",
                size=13,
                role="soft",
            ),
            *numbers,
            *([_text(x, y + 54, "local rank", size=10, role="faint")] if self.map is None else []),
        ]

    def _legend(self, x: float, y: float, groups: list[tuple[int, ...]], colors: list[str], chosen: int) -> list[str]:
        first = list(range(min(len(groups), _MAX_LEGEND)))
        if chosen not in first:  # the outlined group is always in the legend
            first[-1] = chosen
        parts: list[str] = []
        for line, i in enumerate(first):
            line_y = y + line * _LEGEND_LINE
            box = f"<rect x='{x:g}' y='{line_y:g}' width='16' height='12' rx='3'"
            parts.append(f"{box} fill='{colors[i]}'/>")
            if i == chosen:
                parts.append(f"{box} class='mine' stroke-width='2'/>")
            parts.append(_text(x + 24, line_y + 11, f"group {i}: ranks {show_ranks(groups[i], limit=8)}", size=12))
        line_y = y + len(first) * _LEGEND_LINE
        if len(groups) > len(first):
            parts.append(
                _text(x + 24, line_y + 11, f"and {len(groups) - len(first)} more groups", size=12, role="faint")
            )
            line_y += _LEGEND_LINE
        if self.cut:
            drawn = self.map.drawn if self.map is not None else self.nodes * self.gpus
            note = f"drawn: the first {drawn:,} of {self.layout.num_ranks:,} ranks; the pattern repeats"
            parts.append(_text(x, line_y + 11, note, size=12, role="faint"))
        return parts


def _colors(count: int) -> list[str]:
    if count <= len(_PALETTE):
        return list(_PALETTE[:count])
    colors: list[str] = []
    for i in range(count):
        # Golden-angle hues keep neighbours apart; three depths tell apart those that come round to a similar hue.
        red, green, blue = colorsys.hls_to_rgb(i * 0.38196601 % 1.0, (0.82, 0.74, 0.66)[i % 3], 0.60)
        colors.append(f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}")
    return colors


def _text(
    x: float, y: float, text: str, *, size: int, weight: int = 400, anchor: str = "start", role: str = "ink"
) -> str:
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' class='{role}'>"
        f"{escape(text)}</text>"
    )
