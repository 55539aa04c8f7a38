"""A plan as one self-contained SVG: who computes which blocks of the attention matrix, and how the work is shared.

Left: the attention matrix of the whole sequence in cells, queries down, keys across; a cell is coloured by the rank
that computes it, and paler the fewer of its pairs are unmasked. Right: one bar a rank, its work over the mean.
"""

import colorsys
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from titan_cp.planning.costs import work_matrix
from titan_cp.planning.numbers import PlanNumbers

_CELLS = 64
_MATRIX, _LEFT, _TOP = 512, 70, 96
_BAR_LEFT, _BAR_WIDTH = _LEFT + _MATRIX + 90, 240


def draw_plan(plan: PlanNumbers) -> str:
    """The drawing as SVG text.

    Under Ulysses and USP the ranks that share heads compute the same cells; a cell then shows its ring rank.
    """
    cells = min(_CELLS, plan.pad_to)
    edges = [plan.pad_to * c // cells for c in range(cells + 1)]
    owners, filled = _owners(plan, edges), _filled(plan, edges)
    side = _MATRIX / cells
    ring = plan.ring_degree
    parts = [
        _text(_LEFT, 30, f"{plan.method}, {plan.layout}: {plan.pad_to} tokens on {plan.size} ranks", size=18),
        _text(_LEFT, 52, _subtitle(plan), fill="#555"),
        _text(_LEFT + _MATRIX / 2, _TOP - 10, "keys →", anchor="middle", fill="#555"),
        f'<g transform="translate(16 {_TOP + _MATRIX / 2}) rotate(-90)">'
        + _text(0, 0, "← queries", anchor="middle", fill="#555")
        + "</g>",
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_MATRIX}" height="{_MATRIX}" fill="#fafafa" stroke="#999"/>',
    ]
    for row in range(cells):
        for column in range(cells):
            share = float(filled[row, column])
            if share > 0:
                # A cell whose queries belong to several ranks is striped by their shares of its rows.
                y = _TOP + row * side
                for rank, part in owners[row]:
                    height = side * part
                    parts.append(
                        f'<rect x="{_LEFT + column * side:.2f}" y="{y:.2f}" width="{side:.2f}" height="{height:.2f}" '
                        f'fill="{_colour(rank, ring)}" fill-opacity="{0.35 + 0.65 * share:.2f}"/>'
                    )
                    y += height
    for bound in plan.cu_seqlens[1:-1] if len(plan.cu_seqlens) <= 65 else ():
        at = _MATRIX * bound / plan.pad_to
        parts.append(
            f'<path d="M{_LEFT + at:.2f} {_TOP}v{_MATRIX}M{_LEFT} {_TOP + at:.2f}h{_MATRIX}" stroke="#222" '
            'stroke-width="0.6" stroke-dasharray="3 3"/>'
        )
    parts += _bars(plan)
    width, height = _BAR_LEFT + _BAR_WIDTH + 80, _TOP + _MATRIX + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _subtitle(plan: PlanNumbers) -> str:
    documents = len(plan.cu_seqlens) - 1 - (plan.pad_to > plan.seq_len)
    mask = ("causal" if plan.causal else "full") + (f", window {plan.window}" if plan.window is not None else "")
    colours = "" if plan.ring_degree == plan.size else f"; a colour is a ring rank of {plan.ulysses_degree} ranks"
    return f"{documents} document{'s' * (documents > 1)}, {mask}; imbalance {plan.imbalance:.3f}{colours}"


def _bars(plan: PlanNumbers) -> list[str]:
    mean = sum(plan.work) / plan.size
    top = max(max(plan.work) / mean, 1.0)
    height = min(22.0, _MATRIX / plan.size)
    parts = [_text(_BAR_LEFT, _TOP - 10, "work over the mean", fill="#555")]
    for rank, work in enumerate(plan.work):
        y, length = _TOP + rank * height, _BAR_WIDTH * work / mean / top
        colour = _colour(rank // plan.ulysses_degree, plan.ring_degree)
        parts.append(
            f'<rect x="{_BAR_LEFT}" y="{y + 1:.2f}" width="{length:.2f}" height="{max(height - 2, 0.5):.2f}" '
            f'fill="{colour}"/>'
        )
        if height >= 10:
            middle = y + height / 2 + 4
            parts.append(_text(_BAR_LEFT - 8, middle, f"rank {rank}", anchor="end", size=11))
            parts.append(_text(_BAR_LEFT + length + 6, middle, f"{work / mean:.3f}", size=11))
    x = _BAR_LEFT + _BAR_WIDTH / top
    bottom = _TOP + plan.size * height
    parts.append(f'<path d="M{x:.2f} {_TOP}V{bottom:.2f}" stroke="#222" stroke-dasharray="4 3"/>')
    return parts


def _owners(plan: PlanNumbers, edges: list[int]) -> list[list[tuple[int, float]]]:
    """For each row of cells: the ring ranks that hold its queries, each with its share, in token order."""
    held = sorted((start, stop, rank) for rank, ranges in enumerate(plan.ring_ranges) for start, stop in ranges)
    rows: list[list[tuple[int, float]]] = []
    for first, last in pairwise(edges):
        inside = [(rank, min(stop, last) - max(start, first)) for start, stop, rank in held if start < last > first]
        rows.append([(rank, tokens / (last - first)) for rank, tokens in inside if tokens > 0])
    return rows


def _filled(plan: PlanNumbers, edges: list[int]) -> NDArray[np.float64]:
    """The share of unmasked pairs in each cell."""
    cells = [((first, last),) for first, last in pairwise(edges)]
    pairs = work_matrix(cells, plan.cu_seqlens, causal=plan.causal, window=plan.window)
    sizes = np.diff(np.array(edges))
    return pairs / np.outer(sizes, sizes)


def _colour(rank: int, ranks: int) -> str:
    # Neighbouring ranks far apart on the colour circle would look random; a plain circle shows the layout's order.
    red, green, blue = colorsys.hls_to_rgb(rank / max(ranks, 1), 0.52, 0.62)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", fill: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
    )
