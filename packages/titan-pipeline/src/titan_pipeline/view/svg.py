"""Draw a schedule as SVG, without dependencies: simulated, or as it was measured with the plan above it.

One row per rank over a time axis. The colour is the kind, the shade the chunk, the number the microbatch. Below: memory
over time. The output depends on nothing but the timeline, so drawings can be compared as text; it follows the reader's light
or dark preference.
"""

import math
from collections.abc import Sequence
from html import escape

from titan_pipeline.analysis.simulate import Simulation, Slot
from titan_pipeline.ir.schedule import Kind

_ROW, _GAP, _LEFT, _TOP, _MEMORY, _AXIS = 26, 6, 64, 62, 46, 34
_PLAN = 9  # height of the planned row above a measured one
# one colour a kind, light for the first chunk and darker for later ones
_COLOURS = {
    Kind.F: ("#9ec5f4", "#5b94dc", "#2f6cb8", "#1c4885"),
    Kind.B: ("#9fd8ab", "#5fb273", "#37864c", "#1f5c31"),
    Kind.I: ("#9fd8ab", "#5fb273", "#37864c", "#1f5c31"),
    Kind.W: ("#f6cf8e", "#e0a444", "#b57a1d", "#85560d"),
}
_LEGEND = ((Kind.F, "forward"), (Kind.I, "backward / input gradient"), (Kind.W, "weight gradient"))
# The class keeps the rules to this drawing where it is part of a page.
_STYLE = (
    "<style>.titan-pipeline{--paper:#fff;--ink:#1a1a1a;--soft:#555;--row:#f1f1f1;--line:#dcdcdc}"
    "@media(prefers-color-scheme:dark){.titan-pipeline{--paper:#16191e;--ink:#e9ebef;--soft:#a2a9b4;--row:#23272e;--line:#363b44}}"
    ".titan-pipeline text{font:11px system-ui,sans-serif;fill:var(--ink)}.titan-pipeline .soft{fill:var(--soft)}"
    ".titan-pipeline .paper{fill:var(--paper)}.titan-pipeline .row{fill:var(--row)}.titan-pipeline .dark{fill:#1a1a1a}"
    ".titan-pipeline .light{fill:#fff}.titan-pipeline .grid{stroke:var(--line)}"
    ".titan-pipeline .message{stroke:var(--soft)}</style>"
)


def draw_svg(
    simulation: Simulation,
    *,
    width: int = 1200,
    messages: bool = False,
    unit: str = "time units",
    memory_unit: str = "units",
) -> str:
    """An SVG document.

    Args:
        simulation: From `simulate`, or `titan_pipeline.Measurement.timeline`.
        width: Pixels.
        messages: Also draw a line for every message between ranks.
        unit: Of the costs' times; ``"s"`` lets the axis choose seconds, ms or µs. The default costs have a forward of one
            stage as their unit, divided by the chunks of a rank.
        memory_unit: Of the costs' memory.
    """
    p = simulation.schedule.num_ranks
    scale = (width - _LEFT - 16) / simulation.makespan
    axis_top = _TOP + p * (_ROW + _GAP)
    memory_top = axis_top + _AXIS + 18
    height = memory_top + p * (_MEMORY + _GAP) + 10
    out = [*_head(simulation, width, height, title_of(simulation)), *_axis(simulation.makespan, scale, axis_top, unit)]
    for rank in range(p):
        out += _rank_row(simulation, rank, scale, _TOP + rank * (_ROW + _GAP), unit)
    if messages:
        out += _message_lines(simulation, scale)
    label = f"memory, in {memory_unit}; the largest of each rank at the left"
    out.append(f'<text x="12" y="{memory_top - 8}" style="font-weight:600">{escape(label)}</text>')
    highest = max(simulation.peak_memory)
    for rank in range(p):
        out += _memory_row(simulation, rank, scale, memory_top + rank * (_MEMORY + _GAP), highest)
    out.append("</svg>")
    return "\n".join(out) + "\n"


def draw_executed_svg(executed: Simulation, planned: Simulation, *, width: int = 1200, unit: str = "s") -> str:
    """An SVG document: for each rank the plan as a thin row, and below it what ran, on one time axis.

    Args:
        executed: From `titan_pipeline.Measurement.timeline`.
        planned: The same schedule, simulated with costs in the same unit, such as those of `titan_pipeline.fit_costs`.
        width: Pixels.
        unit: As in `draw_svg`.

    Raises:
        ValueError: The two are of different schedules.
    """
    if executed.schedule.digest != planned.schedule.digest:
        raise ValueError("the plan is of another schedule than what ran. Simulate the schedule that was measured.")
    p = executed.schedule.num_ranks
    longest = max(executed.makespan, planned.makespan)
    scale = (width - _LEFT - 16) / longest
    pitch = _PLAN + 2 + _ROW + 2 * _GAP
    axis_top = _TOP + p * pitch - _GAP
    took, hoped = (_time(s.makespan, longest, unit) for s in (executed, planned))
    title = (
        f"{executed.schedule.name}: took {took}, planned {hoped}; bubble {executed.makespan_bubble:.1%}, "
        f"planned {planned.makespan_bubble:.1%}. Thin rows: the plan"
    )
    out = [*_head(executed, width, axis_top + _AXIS, title), *_axis(longest, scale, axis_top, unit)]
    for rank in range(p):
        y = _TOP + rank * pitch
        out += _rank_row(planned, rank, scale, y, unit, height=_PLAN)
        out += _rank_row(executed, rank, scale, y + _PLAN + 2, unit)
    out.append("</svg>")
    return "\n".join(out) + "\n"


def title_of(simulation: Simulation) -> str:
    """Name, size and both bubbles."""
    s = simulation.schedule
    return (
        f"{s.name}: {s.num_ranks} ranks x {s.num_chunks} chunks, {s.num_microbatches} microbatches, "
        f"bubble {simulation.makespan_bubble:.1%} of the step ({simulation.stage_bubble:.1%} of a rank's span)"
    )


def _head(simulation: Simulation, width: int, height: float, title: str) -> list[str]:
    size = f'width="{width}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} class="titan-pipeline">',
        _STYLE,
        f'<rect {size} class="paper"/>',
        f'<text x="12" y="20" style="font-size:14px;font-weight:600">{escape(title)}</text>',
    ]
    x = _LEFT
    for kind, label in _LEGEND:
        out.append(f'<rect x="{x}" y="32" width="12" height="12" rx="2" fill="{_COLOURS[kind][0]}"/>')
        out.append(f'<text x="{x + 17}" y="42">{label}</text>')
        x += 40 + 6 * len(label)
    if simulation.schedule.num_chunks > 1:
        out.append(f'<text x="{x}" y="42" class="soft">darker: later chunk of the rank</text>')
    return out


def _axis(longest: float, scale: float, y: float, unit: str) -> list[str]:
    """Ticks at round times below the ranks, a line up from each, and the unit."""
    factor, name = _unit(longest, unit)
    step = _nice_step(longest * factor)
    out: list[str] = []
    for i in range(math.floor(longest * factor / step + 1e-9) + 1):
        x = _LEFT + i * step / factor * scale
        out.append(f'<line x1="{x:.2f}" y1="{_TOP - 4}" x2="{x:.2f}" y2="{y + 2}" class="grid"/>')
        out.append(f'<text x="{x:.2f}" y="{y + 14}" text-anchor="middle" class="soft">{i * step:.10g}</text>')
    right = _LEFT + longest * scale
    out.append(f'<text x="{right:.2f}" y="{y + 28}" text-anchor="end" class="soft">{escape(f"time, {name}")}</text>')
    return out


def _unit(longest: float, unit: str) -> tuple[float, str]:
    """What to multiply times by, and what they are then in."""
    if unit != "s" or longest >= 2:
        return 1.0, unit
    return (1e3, "ms") if longest >= 2e-3 else (1e6, "µs")


def _time(value: float, longest: float, unit: str) -> str:
    factor, name = _unit(longest, unit)
    return f"{value * factor:.4g} {name}"


def _nice_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are 6 to 15 ticks."""
    power = 10.0 ** math.floor(math.log10(span / 6))
    return max(power * m for m in (1, 2, 5) if power * m <= span / 6 * 1.001)


def _rank_row(simulation: Simulation, rank: int, scale: float, y: float, unit: str, *, height: int = _ROW) -> list[str]:
    right = _LEFT + simulation.makespan * scale
    out = [f'<rect x="{_LEFT}" y="{y}" width="{right - _LEFT:.2f}" height="{height}" class="row"/>']
    if height == _ROW:
        out.insert(0, f'<text x="12" y="{y + 17}">rank {rank}</text>')
    stages = simulation.schedule.stages_of(rank)
    for slot in simulation.timeline[rank]:
        out.append(_slot(slot, stages, scale, y, height, simulation.makespan, unit))
    return out


def _slot(slot: Slot, stages: Sequence[int], scale: float, y: float, height: int, longest: float, unit: str) -> str:
    kind, stage, mb = slot.action
    shade = min(stages.index(stage), 3)
    x, w = _LEFT + slot.start * scale, (slot.end - slot.start) * scale
    start, end = (_time(value, longest, unit) for value in (slot.start, slot.end))
    role = "light" if shade > 1 else "dark"
    number = f'<text x="{x + w / 2:.2f}" y="{y + 17}" text-anchor="middle" class="{role}">{mb}</text>'
    return (
        f"<g><title>{slot.action}: {start} to {end}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{height}" fill="{_COLOURS[kind][shade]}" '
        'stroke="white" stroke-width="0.6"/>'
        + (number if height == _ROW and w >= 6 + 5 * len(str(mb)) else "")
        + "</g>"
    )


def _message_lines(simulation: Simulation, scale: float) -> list[str]:
    out: list[str] = []
    for t in simulation.transfers:
        y1, y2 = (_TOP + r * (_ROW + _GAP) + _ROW / 2 for r in (t.source, t.target))
        out.append(
            f'<line x1="{_LEFT + t.departure * scale:.2f}" y1="{y1}" x2="{_LEFT + t.arrival * scale:.2f}" y2="{y2}" '
            'class="message" stroke-width="0.5" opacity="0.6"/>'
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
        f'<text x="12" y="{y + _MEMORY / 2 + 13:.1f}" class="soft">{simulation.peak_memory[rank]:.4g}</text>',
        f'<polygon points="{" ".join(points)}" fill="#d9c2ee" stroke="#8a5fb5" stroke-width="0.8"/>',
    ]


def draw_html(simulation: Simulation, *, width: int = 1200, unit: str = "time units") -> str:
    """One self-contained HTML page: the drawing, the numbers, and where idle time comes from; ``unit`` as in `draw_svg`."""
    b = simulation.breakdown
    rows = [
        ("makespan bubble, part of the step", simulation.makespan_bubble),
        ("stage bubble, part of a rank's span", simulation.stage_bubble),
        (f"makespan, {unit}", simulation.makespan),
        ("work per rank", simulation.work),
        ("idle: warm-up", b.warm_up),
        ("idle: steady", b.steady),
        ("idle: drain", b.drain),
        ("idle: communication", b.communication),
        ("idle: imbalance", b.imbalance),
        ("largest memory of a rank, units", max(simulation.peak_memory)),
    ]
    table = "\n".join(f"<tr><td>{name}</td><td>{value:.4g}</td></tr>" for name, value in rows)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title_of(simulation))}</title>\n'
        "<style>body{color-scheme:light dark;font:14px system-ui,sans-serif;margin:24px}td{padding:2px 16px 2px 0}"
        "td+td{text-align:right;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}</style>\n"
        f"{draw_svg(simulation, width=width, unit=unit)}<table>\n{table}\n</table></html>\n"
    )
