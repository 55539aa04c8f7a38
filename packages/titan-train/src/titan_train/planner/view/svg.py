"""Pictures of estimates, as SVG text: one bar of time and one of memory, and the memory-speed picture of a search."""

from html import escape

from titan_train.planner.estimate import StepEstimate
from titan_train.planner.search.search import Ranking

COLOURS = (
    "#4063d8", "#389826", "#cb3c33", "#9558b2", "#e0a030", "#2a9d8f", "#8d6e63", "#607d8b", "#d81b60", "#7cb342",
    "#546e7a", "#ff7043", "#26a69a", "#5c6bc0", "#bdbdbd",
)  # fmt: skip
WIDTH = 860
_GIB = 2.0**30


def estimate_svg(e: StepEstimate) -> str:
    """Two stacked bars with their legends."""
    time = [
        (n, s, f"{s:.3f} s") for n, s in sorted(e.time.terms.items(), key=lambda t: -t[1]) if s > 0.004 * e.time.total
    ]
    memory = [(n, b, f"{b / _GIB:.1f} GiB") for n, b in sorted(e.memory.parts.items(), key=lambda p: -p[1])]
    parts = [_bar(f"one step: {e.time.total:.3f} s", time, e.time.total, 40)]
    top = 120 + 22 * -(-len(time) // 3)
    limit = max(e.machine.memory_bytes, e.memory.allocated)
    parts.append(
        _bar(f"memory: {e.memory.allocated_gib:.1f} of {e.machine.memory_bytes / _GIB:.1f} GiB", memory, limit, top)
    )
    height = top + 90 + 22 * -(-len(memory) // 3)
    title = f"{e.shape.name}, {e.setup.describe()}, {e.machine.title}: {e.tokens_per_s:,.0f} tokens/s/device"
    return svg_page(title, height, parts)


def _bar(title: str, parts: list[tuple[str, float, str]], whole: float, top: int) -> str:
    out = [f'<text x="20" y="{top}" font-weight="600">{escape(title)}</text>']
    out.append(f'<rect x="20" y="{top + 10}" width="{WIDTH - 40}" height="30" fill="#eee"/>')
    x = 20.0
    for number, (name, size, text) in enumerate(parts):
        width = (WIDTH - 40) * size / whole
        colour = COLOURS[number % len(COLOURS)]
        label = f"{escape(name)}: {text}, {size / whole:.1%}"
        out.append(
            f'<rect x="{x:.1f}" y="{top + 10}" width="{width:.1f}" height="30" fill="{colour}"><title>{label}</title></rect>'
        )
        x += width
        left, line = 20 + 275 * (number % 3), top + 62 + 22 * (number // 3)
        out.append(f'<rect x="{left}" y="{line - 11}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{left + 18}" y="{line}">{label}</text>')
    return "\n".join(out)


def front_svg(ranking: Ranking) -> str:
    """Memory against tokens per second: the Pareto front as a line, the best setups as numbered points."""
    points = [*ranking.front, *ranking.best]
    low = min(e.memory.allocated_gib for e in points) * 0.95
    high = max(e.memory.allocated_gib for e in points) * 1.02
    floor = min(e.tokens_per_s for e in points) * 0.9
    top = max(e.interval[1] for e in ranking.best[:1]) if ranking.best else 1.0
    top = max(top, max(e.tokens_per_s for e in points) * 1.02)

    def at(e: StepEstimate, speed: float) -> tuple[float, float]:
        x = 80 + (WIDTH - 110) * (e.memory.allocated_gib - low) / max(1e-9, high - low)
        return x, 380 - 320 * (speed - floor) / max(1e-9, top - floor)

    line = " ".join("{:.1f},{:.1f}".format(*at(e, e.tokens_per_s)) for e in ranking.front)
    out = [
        '<path d="M80 60 V380 H830" stroke="#888" fill="none"/>',
        f'<polyline points="{line}" fill="none" stroke="#4063d8" stroke-width="2"/>',
        '<text x="80" y="48">tokens/s/GPU</text><text x="690" y="418">GiB allocated</text>',
    ]
    for share in (0, 0.5, 1):
        out.append(f'<text x="8" y="{384 - 320 * share:.0f}">{floor + share * (top - floor):,.0f}</text>')
        out.append(f'<text x="{70 + 730 * share:.0f}" y="400">{low + share * (high - low):.3g}</text>')
    for e in ranking.front:
        x, y = at(e, e.tokens_per_s)
        label = f"{escape(e.setup.describe())}: {e.tokens_per_s:,.0f} tokens/s, {e.memory.allocated_gib:.1f} GiB"
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#4063d8"><title>{label}</title></circle>')
    for number, e in enumerate(ranking.best, 1):
        x, y = at(e, e.tokens_per_s)
        colour = "#cb3c33" if number == 1 else "#e0a030"
        label = f"{number}: {escape(e.setup.describe())}"
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"><title>{label}</title></circle>')
        if number <= 3:
            out.append(f'<text x="{x + 9:.1f}" y="{y + 4:.1f}">{number}</text>')
    title = (
        f"{ranking.request.shape.name} on {ranking.request.gpus} x {ranking.request.machine.title}: what memory buys"
    )
    return svg_page(title, 430, out)


def svg_page(title: str, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">'
    )
    return "\n".join(
        [head, f'<text x="20" y="20" font-size="13" font-weight="700">{escape(title)}</text>', *parts, "</svg>\n"]
    )
