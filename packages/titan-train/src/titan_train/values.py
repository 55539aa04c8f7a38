"""Values that a setting may have: declared in the type of its field, refused by one function in one wording.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class TrainConfig:
        steps: Annotated[int, Range(1)] = 1000
        decay: Annotated[int, Range(0, also=-1, note="-1 takes 20 % of steps")] = -1
        share: Annotated[float, Range(0, 1)] = 0.5
        lr: Annotated[float, Range(above=0)] = 3e-4
        dtype: Literal["fp32", "bf16"] = "fp32"

        def __post_init__(self) -> None:
            check_values("train", self)

    TrainConfig(steps=0)  # ValueError: train.steps=0 must be at least 1; the nearest valid choice is 1.

`check_values` checks every field of the class and of its bases whose type declares something: a range, alone or in a union,
for the entries of a list or the values of a table; and the choices of a ``Literal``. What relates two fields is written by
hand after it. The remedy is the range's ``note``; without one it is the nearest valid value, or the default where the bound
itself is not allowed. ``Count`` and ``CountOrOff`` stand for the two most frequent ranges.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class GPTArgs:
        dim: Count = 768                      # at least 1
        ffn_dim: Annotated[int, Range(0, note="0 takes 4 * dim")] = 0

        def __post_init__(self) -> None:
            check_values("model.args", self)
            if self.dim % self.num_heads: ...
"""

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

# Below this share of common characters, a suggestion misleads: "mistral_7b" and "llama3_70b" share half of theirs.
_CLOSE = 0.6


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may hold, for ``Annotated``."""

    least: float | None = None
    """Smallest value."""
    most: float | None = None
    """Largest value."""
    _: dataclasses.KW_ONLY
    above: float | None = None
    """Bound that every value exceeds."""
    below: float | None = None
    """Bound that no value reaches."""
    also: float | None = None
    """A value outside of the range that has a meaning of its own; `note` says which."""
    note: str = ""
    """What to do, for the message: what a special value means, or which one is usual."""

    def holds(self, value: float) -> bool:
        """Whether ``value`` is allowed; NaN and infinity never are."""
        return value == self.also or (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def nearest(self, value: float) -> float | None:
        """The allowed value nearest to one that is not; None where the bound itself is not allowed."""
        too_low = self.least is not None and value < self.least
        return self.least if too_low else self.most if self.most is not None and value > self.most else None

    def __str__(self) -> str:
        bounds = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        text = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        return text if self.also is None else f"{self.also} or {text}"


Count = Annotated[int, Range(1)]
CountOrOff = Annotated[int, Range(0, note="0 disables")]


def check_values(prefix: str, values: Any) -> None:
    """Check every field of a dataclass against the range or the choices that its type declares.

    Args:
        prefix: What the names of the fields follow in messages, such as ``train``; may be empty.
        values: An instance of the dataclass.

    Raises:
        ValueError: One line for each field with a value that is not allowed: the value, what is allowed, what to do.
    """
    problems: list[str] = []
    for field, range_, choices in _declared(type(values)):
        for key, value in _entries(f"{prefix}.{field.name}".lstrip("."), getattr(values, field.name)):
            if isinstance(value, str) and choices and value not in choices:
                problems.append(_choice_problem(key, value, choices))
            elif isinstance(value, (int, float)) and range_ is not None and not range_.holds(value):
                words = f", or one of {', '.join(map(repr, choices))}" if choices else ""
                problems.append(f"{key}={value} must be {range_}{words}{_remedy(range_, value, field.default)}.")
    if problems:
        raise ValueError("\n".join(problems))


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``, naming the nearest."""
    if value not in choices:
        raise ValueError(_choice_problem(key, value, choices))


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
    """The divisor of ``n`` nearest to ``wanted``; the smaller of two at the same distance."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return min({*small, *(n // d for d in small)}, key=lambda d: (abs(d - wanted), d))


def _choice_problem(key: str, value: str, choices: Sequence[str]) -> str:
    return f"{key}={value!r} is not one of {', '.join(map(repr, choices))}. {did_you_mean(value, choices)}".rstrip()


def _remedy(range_: Range, value: float, default: Any) -> str:
    if range_.note:
        return f"; {range_.note}"
    nearest = range_.nearest(value)
    if nearest is not None:
        return f"; the nearest valid choice is {nearest}"
    return f"; the default is {default}" if isinstance(default, (int, float)) else ""


@functools.cache
def _declared(cls: type) -> list[tuple[dataclasses.Field[Any], Range | None, tuple[str, ...]]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = [(field, *_allowed(hints[field.name])) for field in dataclasses.fields(cls)]
    return [(field, range_, choices) for field, range_, choices in found if range_ is not None or choices]


def _allowed(hint: Any) -> tuple[Range | None, tuple[str, ...]]:
    """What a type declares: a range of numbers, choices of text, or both."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return next((mark for mark in hint.__metadata__ if isinstance(mark, Range)), None), ()
    if origin is Literal:
        return None, arguments
    if origin in (typing.Union, types.UnionType):
        inner = [_allowed(argument) for argument in arguments]
        return next((range_ for range_, _ in inner if range_), None), tuple(c for _, cs in inner for c in cs)
    if origin in (dict, tuple):
        return _allowed(arguments[1] if origin is dict else arguments[0])
    return None, ()


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{key}.{name}", entry) for name, entry in typing.cast("dict[str, Any]", value).items())
    elif isinstance(value, tuple):
        yield from ((f"{key}.{i}", entry) for i, entry in enumerate(typing.cast("tuple[Any, ...]", value)))
    else:
        yield key, value
