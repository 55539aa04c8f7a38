"""Series of a run made ready to draw: smoothed, and thinned to what a screen can show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# More points than this are less than two pixels apart on a wide screen.
MOST_POINTS = 480


@dataclass(frozen=True, slots=True)
class Thinned:
    """A series cut into at most `MOST_POINTS` buckets; values are NaN where a bucket holds nothing finite."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over a window of a fiftieth of the series around each value; values that are not finite do not count.

    The window is centred, so that the curve does not lag behind what it smooths. Near the start, where a loss falls
    fastest, it is a tenth of the way so far at most; at the end it is cut.
    """
    total, count = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        total.append(total[-1] + (value if finite else 0.0))
        count.append(count[-1] + finite)
    widest = len(values) / 100
    result: list[float] = []
    for i in range(len(values)):
        half = int(min(widest, i / 10))
        first, last = i - half, min(i + half + 1, len(values))
        inside = count[last] - count[first]
        result.append((total[last] - total[first]) / inside if inside else math.nan)
    return result


def thin(
    x: Sequence[float],
    y: Sequence[float],
    *,
    log_x: bool = False,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
) -> Thinned:
    """Average neighbours, evenly along the axis they will be drawn on; extremes are kept as low and high.

    Args:
        x: Positions, ascending; positive if ``log_x``.
        y: Values.
        log_x: Whether the axis is logarithmic.
        low: Least of what each value stands for; None where it stands for itself.
        high: Largest of that.
    """
    if not x:
        return Thinned([], [], [], [])

    def place(value: float) -> float:
        return math.log(value) if log_x else value

    start, end = place(x[0]), place(x[-1])
    width = (end - start) / MOST_POINTS or 1.0
    buckets: dict[int, list[int]] = {}
    for i, value in enumerate(x):
        slot = i if len(x) <= MOST_POINTS else min(MOST_POINTS - 1, int((place(value) - start) / width))
        buckets.setdefault(slot, []).append(i)
    thinned = Thinned([], [], [], [])
    for members in buckets.values():
        finite = [y[i] for i in members if math.isfinite(y[i])]
        # the last member stands for the bucket, so that the newest step is where it belongs
        thinned.x.append(x[members[-1]])
        thinned.mean.append(math.fsum(finite) / len(finite) if finite else math.nan)
        least, most = (
            [v for i in members if math.isfinite(v := values[i])] if values else finite for values in (low, high)
        )
        thinned.low.append(min(least, default=math.nan))
        thinned.high.append(max(most, default=math.nan))
    return thinned
