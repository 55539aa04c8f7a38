"""Line charts as numbers for the page: paths in a square of 1000 × 1000 units, ticks in per cent.

The page stretches the square to any width, with strokes that keep their width, and sets the labels as text beside it:
so a chart is as sharp and as readable on a phone as on a wide screen, and follows the page's colours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_train.observe.format import short_count
from titan_train.report.series import smooth, thin

_SIDE = 1000.0
# Up to this many points each one is marked, so that a run of a few steps is visible.
_MOST_DOTS = 40
_LEAST_TO_SMOOTH = 20


@dataclass(frozen=True, slots=True)
class Series:
    """A line to draw. ``role`` is its CSS class."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    role: str = "train"
    smoothed: bool = False
    """Draw the smoothed course, with the raw values faint behind it."""
    dots: bool = False
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    """Extremes of what each value stands for; None where it stands for itself."""


@dataclass(frozen=True, slots=True)
class Path:
    """One stroke or area: its CSS classes and its SVG path data."""

    role: str
    d: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of an axis and where it stands, in per cent from the left or the top."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything the page needs to draw one chart."""

    title: str
    unit: str
    paths: list[Path] = field(default_factory=list[Path])
    x_ticks: list[Tick] = field(default_factory=list[Tick])
    y_ticks: list[Tick] = field(default_factory=list[Tick])
    legend: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(role, name) of each line, if there are several."""
    hover: dict[str, object] = field(default_factory=dict[str, object])
    """What the page's script shows under the pointer."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One part of a stack: its height over each step."""

    name: str
    y: Sequence[float]
    role: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to [0, 1] of an axis."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where ``value`` stands."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def build_chart(
    title: str, unit: str, series: Sequence[Series], *, log_x: bool = False, zero: bool = False
) -> Chart | None:
    """Lay out a chart; None if no series has a finite value.

    Args:
        title: What is shown.
        unit: Of the y axis.
        series: Lines over training steps.
        log_x: Logarithmic step axis.
        zero: Start the y axis at 0.
    """
    series = [s for s in series if any(math.isfinite(v) for v in s.y)]
    if not series:
        return None
    x_scale = _x_scale(series, log_x)
    chart = Chart(title, unit, x_ticks=[Tick(100 * x_scale(v), _trimmed(v)) for v in _x_ticks(x_scale)])
    lines = [_Line(s, log_x) for s in series]
    y_scale = _y_scale([v for line in lines for v in line.extent], zero)
    chart.y_ticks.extend(_y_ticks(y_scale))
    for line in lines:
        chart.paths.extend(line.paths(x_scale, y_scale))
    if len(series) > 1:
        chart.legend.extend((s.role, s.name) for s in series)
    chart.hover.update(
        x=[x_scale.low, x_scale.high], y=[y_scale.low, y_scale.high], log=log_x, lines=[line.hover() for line in lines]
    )
    return chart


def build_stack(title: str, unit: str, steps: Sequence[int], layers: Sequence[Layer]) -> Chart:
    """Lay out parts of a whole over training steps, one on top of the other.

    Args:
        title: What is shown.
        unit: Of the y axis.
        steps: At least one.
        layers: From the bottom up; every height is finite and at least 0.
    """
    x_scale = step_scale(steps, log_x=False)
    thinned = [thin([float(step) for step in steps], layer.y) for layer in layers]
    x = thinned[0].x
    floor = [0.0] * len(x)
    heights = [0.0] * len(x)
    edges: list[list[float]] = []
    for layer in thinned:
        heights = [below + height for below, height in zip(heights, layer.mean, strict=True)]
        edges.append(heights)
    y_scale = _y_scale(heights, zero=True)
    chart = Chart(title, unit, x_ticks=[Tick(100 * x_scale(v), _trimmed(v)) for v in _x_ticks(x_scale)])
    chart.y_ticks.extend(_y_ticks(y_scale))
    wide = x if len(x) > 1 else [x_scale.low, x_scale.high]  # one step fills the chart
    for layer, above in zip(layers, edges, strict=True):
        top = [(_SIDE * x_scale(a), _SIDE * (1 - y_scale(b))) for a, b in zip(wide, _as_wide(above, wide), strict=True)]
        below = [
            (_SIDE * x_scale(a), _SIDE * (1 - y_scale(b))) for a, b in zip(wide, _as_wide(floor, wide), strict=True)
        ]
        chart.paths.append(Path(f"area {layer.role}", _polyline([*top, *reversed(below)]) + "Z"))
        floor = above
    chart.legend.extend((layer.role, layer.name) for layer in layers)
    lines = [
        {"name": layer.name, "role": layer.role, "x": [int(v) for v in x], "y": [float(f"{v:.4g}") for v in part.mean]}
        for layer, part in zip(layers, thinned, strict=True)
    ]
    chart.hover.update(
        x=[x_scale.low, x_scale.high], y=[y_scale.low, y_scale.high], log=False, stacked=True, lines=lines[::-1]
    )
    return chart


def _as_wide(values: Sequence[float], wide: Sequence[float]) -> Sequence[float]:
    return values if len(values) == len(wide) else [values[0]] * len(wide)


def step_scale(steps: Sequence[float], log_x: bool) -> Scale:
    """The step axis of a chart of these steps."""
    low, high = min(steps), max(steps)
    if log_x:
        low = max(low, 1)
        return Scale(low, max(high, low * 2), log=True)
    return Scale(low, high) if high > low else Scale(low - 1, high + 1)


class _Line:
    """A series, smoothed and thinned."""

    def __init__(self, series: Series, log_x: bool) -> None:
        self.series = series
        points = zip(series.x, series.y, series.low or series.y, series.high or series.y, strict=True)
        kept = [point for point in points if not log_x or point[0] >= 1]
        x, y, low, high = ([point[i] for point in kept] for i in range(4))
        self.smoothed = series.smoothed and len(x) >= _LEAST_TO_SMOOTH
        self.raw = thin(x, y, log_x=log_x, low=low, high=high)
        self.main = thin(x, smooth(y), log_x=log_x) if self.smoothed else self.raw
        self.banded = len(x) > len(self.raw.x)

    @property
    def extent(self) -> list[float]:
        values = [*self.main.mean, *(self.raw.low + self.raw.high if self.smoothed or self.banded else [])]
        return [v for v in values if math.isfinite(v)]

    def paths(self, x_scale: Scale, y_scale: Scale) -> list[Path]:
        role = self.series.role

        def points(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float] | None]:
            return [
                (_SIDE * x_scale(a), _SIDE * (1 - y_scale(b))) if math.isfinite(b) else None
                for a, b in zip(x, y, strict=True)
            ]

        found: list[Path] = []
        if self.banded:
            high = [p for p in points(self.raw.x, self.raw.high) if p]
            low = [p for p in points(self.raw.x, self.raw.low) if p]
            if len(high) > 1:
                found.append(Path(f"band {role}", _polyline([*high, *reversed(low)]) + "Z"))
        elif self.smoothed:
            found.append(Path(f"faint {role}", _polyline(points(self.raw.x, self.raw.mean))))
        main = points(self.main.x, self.main.mean)
        found.append(Path(f"line {role}", _polyline(main)))
        if self.series.dots or len(main) <= _MOST_DOTS:
            # a stroke of no length with round caps is a dot that does not stretch with the chart
            found.append(Path(f"dots {role}", "".join(f"M{p[0]:.1f} {p[1]:.1f}h0" for p in main if p)))
        return found

    def hover(self) -> dict[str, object]:
        return {
            "name": self.series.name,
            "role": self.series.role,
            "x": [int(v) for v in self.main.x],
            "y": [float(f"{v:.5g}") if math.isfinite(v) else None for v in self.main.mean],
        }


def _polyline(points: Sequence[tuple[float, float] | None]) -> str:
    """SVG path through the points; None lifts the pen."""
    parts: list[str] = []
    down = False
    for point in points:
        if point is not None:
            parts.append(f"{'L' if down else 'M'}{point[0]:.1f} {point[1]:.1f}")
        down = point is not None
    return "".join(parts)


def _x_scale(series: Sequence[Series], log_x: bool) -> Scale:
    return step_scale([v for s in series for v in s.x], log_x)


def _x_ticks(scale: Scale) -> list[float]:
    if scale.log:
        exponents = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        ticks = [float(m * 10**e) for e in exponents for m in ((1,) if len(exponents) > 3 else (1, 2, 5))]
        return [t for t in ticks if scale.low <= t <= scale.high]
    step = max(1.0, _nice_step(scale.high - scale.low))
    return _multiples(scale.low, scale.high, step)


def _y_scale(values: Sequence[float], zero: bool) -> Scale:
    low, high = min(values), max(values)
    if zero:
        low = min(0.0, low)
    room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return Scale(low if zero and low == 0 else low - room, high + room)


def _y_ticks(scale: Scale) -> list[Tick]:
    step = _nice_step(scale.high - scale.low)
    return [Tick(100 * (1 - scale(v)), _tick_label(v, step)) for v in _multiples(scale.low, scale.high, step)]


def _nice_step(span: float) -> float:
    """A distance of 1, 2 or 5 times a power of ten that cuts the span into about six."""
    rough = span / 6
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _trimmed(value: float) -> str:
    """``2.50k`` as ``2.5k``, ``5.00k`` as ``5k``."""
    text = short_count(value)
    number, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit


def _tick_label(value: float, step: float) -> str:
    if value == 0:
        return "0"
    size = max(abs(value), step)
    if size >= 1000:
        return _trimmed(value)
    if step < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{max(0, -math.floor(math.log10(step)))}f}"
