"""What may cross between ranks beside tensors: plain values, written as JSON.

Problem: a structure that arrives as a pickle runs what its sender wrote into it, and the ports of a job have no
authentication.

Idea: None, bool, int, float, str, bytes (and data types and devices of torch), and tuples, lists and dicts of them say all
that a stage hands over, and reading them back runs nothing. A dataclass, a named tuple or another mapping is written as its
name and its fields, and read only by a rank whose own program has registered that class (`register_structure`); nothing is
imported by name. Whatever else a stage returns is refused by the rank that would send it.
"""

import collections
import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch

_T = TypeVar("_T")


class Leaf(NamedTuple):
    """Stands for the tensor of that number."""

    number: int


_registered: dict[str, type[Any]] = {}


def register_structure(kind: type[_T]) -> type[_T]:
    """Let objects of a class cross between ranks: call it on every rank, or decorate the class with it.

    Only the class's fields travel. The receiving rank calls the class with them; a dict class is made without a call, and has
    the items, but no attributes and no default factory.

    Args:
        kind: A dataclass, a named tuple, or a mapping or sequence that is made from a dict or a list.

    Returns:
        The class.

    Raises:
        ValueError: If it is none of these, or another class of that module has the same name.
    """
    if not (dataclasses.is_dataclass(kind) or issubclass(kind, tuple | list | Mapping)):
        raise ValueError(
            f"{kind.__qualname__} is not a dataclass, tuple, list or mapping, so its parts are unknown. Pass its parts."
        )
    if _registered.setdefault(_name(kind), kind) is not kind:
        raise ValueError(f"two classes are named {_name(kind)}. Rename one: a message names the class it holds.")
    return kind


def encode(value: Any, flags: list[bool]) -> bytes:
    """A structure of plain values and `Leaf`, and a flag for each of its tensors.

    Raises:
        ValueError: If it holds anything else; the message names where.
    """
    return json.dumps([_encoded(value, "the result"), flags], separators=(",", ":")).encode()


def decode(data: bytes) -> tuple[Any, list[bool]]:
    """What `encode` was given.

    Raises:
        ValueError: If this is not such a structure, or it holds a class that this rank has not registered.
    """
    try:
        value, flags = json.loads(data)
        return _decoded(value), flags
    except (LookupError, TypeError, AttributeError, StopIteration, RuntimeError) as err:
        raise ValueError(f"a message holds no structure of plain values: {err}") from err


def rebuilt(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """``value`` with every instance of ``kind`` in it replaced."""
    if isinstance(value, kind):
        return by(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{n: rebuilt(getattr(value, n), kind, by) for n in names})
    if isinstance(value, Mapping):
        items = {k: rebuilt(v, kind, by) for k, v in cast(Mapping[Any, Any], value).items()}
        if not isinstance(value, dict):
            return cast(Any, type(value))(items)
        made = copy.copy(cast(dict[Any, Any], value))  # a defaultdict is not made from a dict
        return _filled(made, items, attributes=_has_attributes(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cast(Any, type(value))(*(rebuilt(v, kind, by) for v in cast(tuple[Any, ...], value)))
    if isinstance(value, tuple | list):
        return cast(Any, type(value))(rebuilt(v, kind, by) for v in cast(tuple[Any, ...], value))
    return value


def _has_attributes(value: Any) -> bool:
    """Whether a dict's items are its attributes too."""
    return getattr(value, "__dict__", None) is value


def _filled(made: dict[Any, Any], items: dict[Any, Any], *, attributes: bool) -> Any:
    if attributes:
        made.__dict__ = made
    for k, v in items.items():
        made[k] = v
    return made


def _encoded(value: Any, where: str) -> Any:
    kind = cast(type[Any], type(value))
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if kind is Leaf:
        return ["tensor", value.number]
    if kind in (tuple, list):
        return [kind.__name__, [_encoded(v, f"{where}[{i}]") for i, v in enumerate(value)]]
    if kind is dict:
        return ["dict", [[_encoded(k, where), _encoded(v, f"{where}[{k!r}]")] for k, v in value.items()]]
    if _registered.get(_name(kind)) is not kind:
        known = (
            "its class"
            if dataclasses.is_dataclass(kind) or isinstance(value, tuple | list | Mapping)
            else "a dataclass"
        )
        raise ValueError(
            f"{where} is a {_name(kind)}, which cannot be sent to another rank. Return tensors, None, bool, int, float, str, "
            f"bytes, and tuples, lists and dicts of them; or hand over {known} that every rank has registered with "
            "titan_pipeline.runtime.register_structure."
        )
    if dataclasses.is_dataclass(kind):
        parts: Any = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind) if f.init}
    else:
        parts = dict(cast(Mapping[Any, Any], value)) if isinstance(value, Mapping) else list(value)
    return [_name(kind), _encoded(parts, where), _has_attributes(value)]


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    name, body, *attributes = cast(list[Any], value)
    if name == "bytes":
        return bytes.fromhex(body)
    if name == "device":
        return torch.device(body)
    if name == "dtype":
        return next(d for d in vars(torch).values() if isinstance(d, torch.dtype) and str(d) == f"torch.{body}")
    if name == "tensor":
        return Leaf(int(body))
    if name in ("tuple", "list"):
        parts = [_decoded(v) for v in body]
        return tuple(parts) if name == "tuple" else parts
    if name == "dict":
        return {_decoded(k): _decoded(v) for k, v in body}
    kind = _registered.get(name)
    if kind is None:
        raise ValueError(
            f"a message holds a {name}, which this rank has not registered. Call "
            "titan_pipeline.runtime.register_structure with it on every rank, before the first step."
        )
    parts = _decoded(body)
    if dataclasses.is_dataclass(kind):
        return kind(**parts)
    if issubclass(kind, dict):
        return _filled(cast(Any, kind).__new__(kind), parts, attributes=any(attributes))
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


register_structure(collections.OrderedDict)
register_structure(torch.Size)
