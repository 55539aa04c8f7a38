"""Thousands of ranks as a map of small cells: nodes side by side, several in a row, one path for each group.

A cell is a rank. A node is a run of cells with a gap after it; each row begins with its first node and rank. The title of
a group's path, which a browser shows under the pointer, names its ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_mesh.layout.explain import show_ranks

_MOST = 4096
_LABEL_W = 118  # room for "node 1016 · 16256"
_PITCH_X, _PITCH_Y = 10, 16
_CELL_W, _CELL_H = 9, 12
_NODE_GAP = 7
_WIDEST = 600
_HEAD_H = 16


@dataclass(frozen=True)
class RankMap:
    """Where the cells of ``num_ranks`` ranks, ``per_node`` on each node, are drawn."""

    num_ranks: int
    per_node: int

    @property
    def drawn(self) -> int:
        """Ranks that are drawn: whole nodes, all where they are few enough."""
        most = max(self.per_node, _MOST - _MOST % self.per_node)
        return min(self.num_ranks, most)

    @property
    def nodes_a_row(self) -> int:
        """A power of two, so that the pattern of powers of two stays upright."""
        fit = max(1, _WIDEST // (self.per_node * _PITCH_X + _NODE_GAP))
        return 1 << (fit.bit_length() - 1)

    @property
    def cells_a_line(self) -> int:
        """A node wider than the drawing goes on in the next line."""
        return min(self.per_node, _WIDEST // _PITCH_X) if self.nodes_a_row == 1 else self.per_node

    @property
    def width(self) -> float:
        """Of the whole map with its labels."""
        return max(430, _LABEL_W + self.nodes_a_row * (self.cells_a_line * _PITCH_X + _NODE_GAP))

    @property
    def height(self) -> float:
        """Of the whole map with its heading."""
        return _HEAD_H + (self._place(self.drawn - 1)[1] + 1) * _PITCH_Y

    def draw(
        self, x: float, y: float, groups: Sequence[tuple[int, ...]], colors: Sequence[str], chosen: int
    ) -> list[str]:
        """The map with its upper left corner at ``(x, y)``, group ``chosen`` outlined."""
        head = f"<text x='{x:g}' y='{y + 8:g}' font-size='10' class='faint'>first node · rank of a row</text>"
        parts = [head, *self._labels(x, y + _HEAD_H)]
        for i, group in enumerate(groups):
            cells = "".join(self._cell(rank, x, y + _HEAD_H) for rank in group if rank < self.drawn)
            if cells:
                title = f"<title>group {i}: ranks {show_ranks(group)}</title>"
                parts.append(f"<path fill='{colors[i]}' d='{cells}'>{title}</path>")
        mine = "".join(self._cell(rank, x, y + _HEAD_H) for rank in groups[chosen] if rank < self.drawn)
        return [*parts, f"<path class='mine' stroke-width='2' d='{mine}'/>"]

    def _place(self, rank: int) -> tuple[float, int]:
        """Distance from the left in pixels, and the line."""
        node, gpu = divmod(rank, self.per_node)
        row, column = divmod(node, self.nodes_a_row)
        lines = -(-self.per_node // self.cells_a_line)
        line, cell = divmod(gpu, self.cells_a_line)
        left = column * (self.cells_a_line * _PITCH_X + _NODE_GAP) + cell * _PITCH_X
        return left, row * lines + line

    def _cell(self, rank: int, x: float, y: float) -> str:
        left, line = self._place(rank)
        return f"M{x + _LABEL_W + left:g} {y + line * _PITCH_Y:g}h{_CELL_W}v{_CELL_H}h-{_CELL_W}z"

    def _labels(self, x: float, y: float) -> list[str]:
        found: list[str] = []
        for rank in range(0, self.drawn, self.nodes_a_row * self.per_node):
            line = self._place(rank)[1]
            text = f"node {rank // self.per_node} · {rank}"
            found.append(f"<text x='{x:g}' y='{y + line * _PITCH_Y + 10:g}' font-size='11' class='soft'>{text}</text>")
        return found
