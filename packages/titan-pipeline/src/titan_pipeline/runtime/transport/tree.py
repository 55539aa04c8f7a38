"""Stage outputs of any structure as a flat tuple of tensors and back.

A stage hands over what its module returns: tensors, or tuples, lists, dicts and dataclasses of tensors, None and plain
values. Tensors travel as they are; the structure around them travels as bytes in the message's header.

Those bytes are a pickle, as torch's own object collectives send: the ranks of one process group run the same program and
trust each other. No file and nothing from outside the group is read this way. A class in the structure must be importable
on every rank. Plain tuples of tensors take no pickle at all (`is_flat`).
"""

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class _Leaf(NamedTuple):
    """Stands for the tensor of that number."""

    number: int


class TensorTree(tuple[Tensor, ...]):
    """The tensors of a structure, in order, and how to put it together again."""

    structure: bytes

    @classmethod
    def of(cls, tensors: Iterable[Tensor], structure: bytes) -> "TensorTree":
        """Tensors with a structure that is packed already."""
        tree = cls(tensors)
        tree.structure = structure
        return tree

    @classmethod
    def pack(cls, value: Any, differentiable: Callable[[Tensor], bool]) -> "TensorTree":
        """Take a structure apart, and note which of its tensors need a gradient."""
        tensors: list[Tensor] = []

        def leaf(tensor: Tensor) -> _Leaf:
            tensors.append(tensor)
            return _Leaf(len(tensors) - 1)

        skeleton = _replaced(value, Tensor, leaf)
        return cls.of(tensors, pickle.dumps((skeleton, [differentiable(t) for t in tensors])))

    def unpack(self, prepare: Callable[[Tensor, bool], Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
        """The structure with tensors that went through ``prepare(tensor, differentiable)``, and these tensors."""
        skeleton, differentiable = pickle.loads(self.structure)
        tensors = tuple(prepare(t, d) for t, d in zip(self, differentiable, strict=True))
        return _replaced(skeleton, _Leaf, lambda leaf: tensors[leaf.number]), tensors


def is_flat(value: Any, training: bool) -> bool:
    """Whether ``value`` is a tuple of tensors, each of which needs a gradient if it can: it travels as it is."""
    return type(value) is tuple and all(
        isinstance(x, Tensor) and (x.requires_grad or not training or not (x.is_floating_point() or x.is_complex()))
        for x in cast(tuple[Any, ...], value)
    )


def _replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """``value`` with every instance of ``kind`` in it replaced."""
    if isinstance(value, kind):
        return by(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{n: _replaced(getattr(value, n), kind, by) for n in names})
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return cast(Any, type(value))({k: _replaced(v, kind, by) for k, v in items})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cast(Any, type(value))(*(_replaced(v, kind, by) for v in cast(tuple[Any, ...], value)))
    if isinstance(value, tuple | list):
        return cast(Any, type(value))(_replaced(v, kind, by) for v in cast(tuple[Any, ...], value))
    return value


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes, for backends that know few data types."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
