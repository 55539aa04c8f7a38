"""Checks of single values that several sections share."""

from collections.abc import Sequence

from titan_train.nearest import did_you_mean


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``, naming the nearest."""
    if value in choices:
        return
    hint = did_you_mean(value, choices)
    raise ValueError(f"{key}={value!r} is not one of {', '.join(map(repr, choices))}. {hint}".rstrip())


def check_at_least(key: str, value: int, least: int) -> None:
    """Raise ValueError if ``value`` is below ``least``."""
    if value < least:
        raise ValueError(f"{key}={value} must be at least {least}. The nearest valid value is {least}.")
