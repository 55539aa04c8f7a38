"""Draw a simulated schedule as SVG, without dependencies.

One row per rank. The colour is the kind, the shade the chunk, the number the microbatch. Below: memory over time. The
output depends on nothing but the simulation, so drawings can be compared as text.
"""

from html import escape

from titan_pipeline.analysis.simulate import Simulation
from titan_pipeline.ir.schedule import Kind

_ROW, _GAP, _LEFT, _TOP, _MEMORY = 26, 6, 64, 62, 46
# one colour a kind, light for the first chunk and darker for later ones
_COLOURS = {
    Kind.F: ("#9ec5f4", "#5b94dc", "#2f6cb8", "#1c4885"),
    Kind.B: ("#9fd8ab", "#5fb273", "#37864c", "#1f5c31"),
    Kind.I: ("#9fd8ab", "#5fb273", "#37864c", "#1f5c31"),
    Kind.W: ("#f6cf8e", "#e0a444", "#b57a1d", "#85560d"),
}
_LEGEND = ((Kind.F, "forward"), (Kind.I, "backward / input gradient"), (Kind.W, "weight gradient"))


def draw_svg(simulation: Simulation, *, width: int = 1200, messages: bool = False) -> str:
    """An SVG document.

    Args:
        simulation: From `simulate`.
        width: Pixels.
        messages: Also draw a line for every message between ranks.
    """
    schedule = simulation.schedule
    p = schedule.num_ranks
    scale = (width - _LEFT - 16) / simulation.makespan
    memory_top = _TOP + p * (_ROW + _GAP) + 30
    height = memory_top + p * (_MEMORY + _GAP) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text{font:11px system-ui,sans-serif}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="20" style="font-size:14px;font-weight:600">{escape(title_of(simulation))}</text>',
    ]
    x = _LEFT
    for kind, label in _LEGEND:
        out.append(f'<rect x="{x}" y="32" width="12" height="12" rx="2" fill="{_COLOURS[kind][0]}"/>')
        out.append(f'<text x="{x + 17}" y="42">{label}</text>')
        x += 40 + 6 * len(label)
    if schedule.num_chunks > 1:
        out.append(f'<text x="{x}" y="42" fill="#555">darker: later chunk of the rank</text>')
    for rank in range(p):
        out += _rank_row(simulation, rank, scale)
    if messages:
        out += _message_lines(simulation, scale)
    out.append(f'<text x="12" y="{memory_top - 8}" style="font-weight:600">memory</text>')
    highest = max(simulation.peak_memory)
    for rank in range(p):
        out += _memory_row(simulation, rank, scale, memory_top + rank * (_MEMORY + _GAP), highest)
    out.append("</svg>")
    return "\n".join(out) + "\n"


def title_of(simulation: Simulation) -> str:
    """Name, size and both bubbles."""
    s = simulation.schedule
    return (
        f"{s.name}: {s.num_ranks} ranks x {s.num_chunks} chunks, {s.num_microbatches} microbatches, "
        f"bubble {simulation.makespan_bubble:.1%} of the step ({simulation.stage_bubble:.1%} of a rank's span)"
    )


def _rank_row(simulation: Simulation, rank: int, scale: float) -> list[str]:
    y = _TOP + rank * (_ROW + _GAP)
    right = _LEFT + simulation.makespan * scale
    out = [
        f'<text x="12" y="{y + 17}">rank {rank}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{right - _LEFT:.2f}" height="{_ROW}" fill="#f1f1f1"/>',
    ]
    stages = simulation.schedule.stages_of(rank)
    for slot in simulation.timeline[rank]:
        kind, stage, mb = slot.action
        shade = min(stages.index(stage), 3)
        x, w = _LEFT + slot.start * scale, (slot.end - slot.start) * scale
        colour = "white" if shade > 1 else "#1a1a1a"
        out.append(
            f"<g><title>{slot.action}: {slot.start:.6g} to {slot.end:.6g}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{_ROW}" fill="{_COLOURS[kind][shade]}" '
            'stroke="white" stroke-width="0.6"/>'
            + (
                f'<text x="{x + w / 2:.2f}" y="{y + 17}" text-anchor="middle" fill="{colour}">{mb}</text>'
                if w >= 6 + 5 * len(str(mb))
                else ""
            )
            + "</g>"
        )
    return out


def _message_lines(simulation: Simulation, scale: float) -> list[str]:
    out: list[str] = []
    for t in simulation.transfers:
        y1, y2 = (_TOP + r * (_ROW + _GAP) + _ROW / 2 for r in (t.source, t.target))
        out.append(
            f'<line x1="{_LEFT + t.departure * scale:.2f}" y1="{y1}" x2="{_LEFT + t.arrival * scale:.2f}" y2="{y2}" '
            'stroke="#444" stroke-width="0.5" opacity="0.6"/>'
        )
    return out


def _memory_row(simulation: Simulation, rank: int, scale: float, y: float, highest: float) -> list[str]:
    curve = simulation.memory[rank]
    bottom = y + _MEMORY
    points = [f"{_LEFT},{bottom}"]
    for i, (time, level) in enumerate(curve):
        until = curve[i + 1][0] if i + 1 < len(curve) else simulation.makespan
        h = bottom - (level / highest * (_MEMORY - 4) if highest else 0)
        points += [f"{_LEFT + time * scale:.2f},{h:.2f}", f"{_LEFT + until * scale:.2f},{h:.2f}"]
    points.append(f"{_LEFT + simulation.makespan * scale:.2f},{bottom}")
    return [
        f'<text x="12" y="{y + _MEMORY / 2:.1f}">rank {rank}</text>',
        f'<text x="12" y="{y + _MEMORY / 2 + 13:.1f}" fill="#555">{simulation.peak_memory[rank]:.4g}</text>',
        f'<polygon points="{" ".join(points)}" fill="#d9c2ee" stroke="#8a5fb5" stroke-width="0.8"/>',
    ]
