"""The nearest value that would have worked, for error messages."""

import difflib
import math
from collections.abc import Iterable

# Below this share of common characters, a suggestion misleads: "mistral_7b" and "llama3_70b" share half of theirs.
_CLOSE = 0.6


def nearest_name(word: object, choices: Iterable[str]) -> str | None:
    """The choice spelled most like ``word``, ignoring case and ``-`` for ``_``; None if none is close."""
    spelled = {choice: choice.lower().replace("-", "_") for choice in choices}
    close = difflib.get_close_matches(str(word).lower().replace("-", "_"), list(spelled.values()), n=1, cutoff=_CLOSE)
    return next((choice for choice, plain in spelled.items() if plain == close[0]), None) if close else None


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """``"Did you mean 'x'? "``, to be put before the list of choices; empty if no choice is close."""
    near = nearest_name(word, choices)
    return "" if near is None else f"Did you mean {near!r}? "


def nearest_divisor(n: int, wanted: int) -> int:
    """The divisor of ``n`` nearest to ``wanted``; of two as near, the smaller."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return min({*small, *(n // d for d in small)}, key=lambda d: (abs(d - wanted), d))
