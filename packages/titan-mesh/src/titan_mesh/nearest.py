"""The nearest valid choice, which every error of this package offers."""

import difflib
from collections.abc import Iterable


def divisors(n: int) -> list[int]:
    """All divisors of ``n`` (at least 1), ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_divisors(value: int, n: int) -> list[int]:
    """The divisor of ``n`` just below ``value`` and the one just above, those that exist, nearest first."""
    below = [d for d in divisors(n) if d < value]
    above = [d for d in divisors(n) if d > value]
    found = below[-1:] + above[:1]
    return sorted(found, key=lambda d: abs(d - value))


def nearest_name(name: str, valid: Iterable[str]) -> str:
    """The valid name most like ``name``, as a question to append to an error; empty if none is alike."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""


def either(choices: Iterable[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    items = list(choices)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} or {items[-1]}"
