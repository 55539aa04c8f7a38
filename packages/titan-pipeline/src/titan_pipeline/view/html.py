"""A simulated schedule as one HTML page."""

from html import escape

from titan_pipeline.analysis.simulate import Simulation
from titan_pipeline.view.svg import draw_svg, title_of


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
