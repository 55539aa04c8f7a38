"""Numbers as people read them, on the bar, in lines, and in the report."""

import math

_SCALE = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def short_count(value: float) -> str:
    """A count in at most five characters: ``812``, ``12.3k``, ``1.24M``, ``8.03B``."""
    if not math.isfinite(value):
        return str(value)
    for scale, unit in _SCALE:
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)}{unit}"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else _three_digits(value)


def short_duration(seconds: float) -> str:
    """A duration: ``0.84s``, ``42s``, ``3:12``, ``1:03:12``, ``2d 03h``."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short_loss(value: float | None) -> str:
    """A loss or a norm with four significant digits: ``10.52``, ``3.214``, ``0.8121``."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    digits = 3 if abs(value) < 1 else max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits + (abs(value) < 1)}f}"


def short_gib(value: float) -> str:
    """Memory: ``0.41 GiB``, ``3.1 GiB``, ``71.9 GiB``."""
    return f"{value:.2f} GiB" if value < 1 else f"{value:.1f} GiB"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
