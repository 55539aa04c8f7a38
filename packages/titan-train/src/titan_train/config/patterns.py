"""Regular expressions of a configuration: only those that end soon on every name.

Python's engine goes back and tries again, so that `(a+)+$` takes forever on a name of forty letters. How often it can go back
is bounded from above before anything is matched: the numbers of choices of all parts multiply, those of alternatives add. A
repeated character has as many choices as a name has characters, and a group is repeated only if it has one choice itself.
"""

import importlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

PATTERN_TABLES = (
    "optimizer.lr_scales", "optimizer.weight_decays", "optimizer.frozen_steps", "optimizer.muon.groups", "optimizer.muon.splits",
    "optimizer.muon.heads", "parallel.tp_plan", "parallel.reshard_overrides",
)  # fmt: skip
"""Tables whose keys are patterns: of those that fit a name, the first counts."""
_LONGEST = 200
_NAME = 100
"""Characters of a parameter's name, about, at most."""
_MOST_WAYS = (_NAME + 1) ** 3
_CHARACTERS = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN"})
_REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})


def with_orders(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name; under the name of each table of several patterns, also these in their order."""
    found = dict(values)
    for table in PATTERN_TABLES:
        patterns = [name.removeprefix(f"{table}.") for name in values if name.startswith(f"{table}.")]
        if len(patterns) > 1:
            found[table] = patterns
    return found


def check_patterns(key: str, patterns: Iterable[str]) -> None:
    """Refuse what is not a regular expression, or one that may not end.

    Args:
        key: The setting, for the message.
        patterns: Its regular expressions.

    Raises:
        ValueError: Names the pattern: it is longer than 200 characters, Python cannot read it, or a name of 100 characters
            could be matched with it in more than a million ways.
    """
    parser: Any = importlib.import_module(
        "re._parser"
    )  # the tree that `re.compile` compiles; the same in Python 3.11 to 3.14
    for pattern in patterns:
        if len(pattern) > _LONGEST:
            raise ValueError(
                f"{key} has a pattern of {len(pattern)} characters, {pattern[:40]!r}...; at most {_LONGEST} are allowed. "
                "Write several patterns."
            )
        try:
            re.compile(pattern)
            ways = _ways(parser.parse(pattern))
        except (re.error, OverflowError, RecursionError) as err:
            raise ValueError(
                f"{key} has the pattern {pattern!r}, which is not a regular expression: {err}. "
                f"To search for the plain text, write {re.escape(pattern)!r}."
            ) from None
        if ways > _MOST_WAYS:
            raise ValueError(
                f"{key} has the pattern {pattern!r}, which may not end: a name can be matched in too many ways. Do not repeat "
                "a group that holds a repetition or alternatives, and use at most three of `*` and `+`."
            )


def _ways(sequence: Iterable[Any]) -> float:
    """In how many ways a sequence could match a name, at most."""
    return math.prod((_ways_of(str(kind), value) for kind, value in sequence), start=1.0)


def _ways_of(kind: str, value: Any) -> float:
    if kind == "BRANCH":
        return sum(map(_ways, value[1]))
    if kind == "SUBPATTERN":
        return _ways(value[3])
    if kind in ("ASSERT", "ASSERT_NOT"):
        return _ways(value[1])
    if kind == "ATOMIC_GROUP":
        return _ways(value)
    if kind == "GROUPREF_EXISTS":
        return _ways(value[1]) + _ways(value[2] or ())
    if kind not in _REPEATS:
        return 1.0
    least, most, inner = value
    times = min(int(most), _NAME) - min(int(least), _NAME)
    if len(inner) == 1 and str(inner[0][0]) in _CHARACTERS:
        return times + 1.0
    each = _ways(inner)
    try:
        return (times + 1.0) * each ** min(int(most), _NAME)
    except OverflowError:
        return math.inf
