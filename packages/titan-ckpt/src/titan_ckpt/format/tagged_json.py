"""Plain Python state as tagged JSON. It replaces pickle for everything that is not a tensor.

State dicts of schedulers and data loaders hold tuples, bytes, sets, non-string keys, NaN and complex numbers, which JSON
does not have. Each becomes an object with one key that starts with ``$``. Floats are JSON numbers: Python writes the
shortest text that reads back to the same bits. A value of another type is a TypeError with its path when it is saved.
Nothing in a file can name code to run.
"""

import base64
import collections
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

Encoder = Callable[[Any, str], Any]
"""Encodes a leaf of another type, given the leaf and its path; returns `UNKNOWN` to refuse it."""

Decoder = Callable[[str, Any], Any]
"""Decodes an object with an unknown tag, given the tag and its value."""

UNKNOWN: Any = object()


def child(path: str, key: str) -> str:
    """The path of an entry of a dict whose keys are strings. It is unique in the whole state."""
    return f"{path}.{key}" if key.isidentifier() else f"{path}[{key!r}]"


MAX_LEVELS = 100
"""Deepest nesting of plain state: far below what Python can read back."""

_MAX_INT_BITS = 14_000  # Python reads integers of up to 4,300 digits


def encode(value: Any, path: str, leaf: Encoder | None = None, levels: int = MAX_LEVELS) -> Any:
    """Turn ``value`` into what `json.dumps` accepts.

    Args:
        value: Nested None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, OrderedDict,
            Counter, range.
        path: Name of the value, for errors.
        leaf: Encodes further types (tensors); its result must be JSON already.
        levels: Levels of nesting that are left.

    Raises:
        ValueError: If the value is nested too deep, or is an integer of more than 4,000 digits.
        TypeError: If a value has another type. The message gives its path and what to do.
    """
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_INT_BITS:
        raise ValueError(
            f"{path} is an integer of more than 4,000 digits, which JSON readers refuse. Save it as bytes."
        )
    if not levels:
        raise ValueError(f"{path[:200]} is nested more than {MAX_LEVELS} levels deep, or contains itself. Flatten it.")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [encode(item, f"{path}[{i}]", leaf, levels - 1) for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, child(path, key), leaf, levels - 1) for key, item in value.items()}
    if kind in (dict, collections.OrderedDict, collections.Counter):
        tag = {dict: "$dict", collections.OrderedDict: "$ordered", collections.Counter: "$counter"}[kind]
        pairs = [
            [encode(k, f"{path} key", leaf, levels - 1), encode(v, f"{path}[{k!r}]", leaf, levels - 1)]
            for k, v in value.items()
        ]
        return {tag: pairs}
    if kind in (tuple, set, frozenset):
        items = sorted(value, key=repr) if kind is not tuple else value
        return {f"${kind.__name__}": [encode(item, f"{path}[{i}]", leaf, levels - 1) for i, item in enumerate(items)]}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": [encode(value.real, path), encode(value.imag, path)]}
    if kind is range:
        return {"$range": [value.start, value.stop, value.step]}
    encoded = leaf(value, path) if leaf else UNKNOWN
    if encoded is UNKNOWN:
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot store: only plain data and "
            "tensors can be saved, so that loading never runs code. Save its fields instead, or give the object "
            "state_dict() and load_state_dict() that use plain data."
        )
    return encoded


def decode(value: Any, leaf: Decoder | None = None) -> Any:
    """Undo `encode`.

    Raises:
        ValueError: If a tag is unknown: the file was written by a newer version, or is not this format.
    """
    if isinstance(value, list):
        return [decode(item, leaf) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, leaf) for key, item in value.items()}
    tag, body = next(iter(value.items()))
    plain: dict[str, Callable[[Any], Any]] = {
        "$float": float,
        "$dict": lambda pairs: {decode(k, leaf): decode(v, leaf) for k, v in pairs},
        "$ordered": lambda pairs: collections.OrderedDict((decode(k, leaf), decode(v, leaf)) for k, v in pairs),
        "$counter": lambda pairs: collections.Counter({decode(k, leaf): decode(v, leaf) for k, v in pairs}),
        "$tuple": lambda items: tuple(decode(item, leaf) for item in items),
        "$set": lambda items: {decode(item, leaf) for item in items},
        "$frozenset": lambda items: frozenset(decode(item, leaf) for item in items),
        "$bytes": base64.b64decode,
        "$bytearray": lambda text: bytearray(base64.b64decode(text)),
        "$complex": lambda parts: complex(decode(parts[0]), decode(parts[1])),
        "$range": lambda parts: range(*parts),
    }
    if tag in plain:
        return plain[tag](body)
    if leaf is None:
        raise ValueError(f"unknown tag {tag!r} in a state file: it was written by a newer version, or is damaged.")
    return leaf(tag, body)


def dump_json(value: Any) -> bytes:
    """Compact, deterministic JSON. Refuses NaN, which `encode` has tagged."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Several byte strings as one: each after its length."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def split_parts(joined: bytes) -> list[bytes]:
    """Undo `join_parts`."""
    parts: list[bytes] = []
    start = 0
    while start < len(joined):
        end = start + 8 + int.from_bytes(joined[start : start + 8], "little")
        parts.append(joined[start + 8 : end])
        start = end
    return parts
