"""Stage outputs of any structure as a flat tuple of tensors and back.

A stage hands over what its module returns: tensors, or tuples, lists, dicts and dataclasses of tensors, None and plain
values. Tensors travel as they are; the structure around them travels in the message's header, see
`titan_pipeline.runtime.transport.plain`. A tuple of tensors has none at all (`is_flat`).
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from titan_pipeline.runtime.transport.plain import Leaf, decode, encode, rebuilt


class TensorTree(tuple[Tensor, ...]):
    """The tensors of a structure, in order, and how to put it together again."""

    _skeleton: tuple[Any, list[bool]]
    """The structure, a `Leaf` in place of each tensor; and which of the tensors need a gradient."""

    @classmethod
    def pack(cls, value: Any, differentiable: Callable[[Tensor], bool]) -> "TensorTree":
        """Take a structure apart, and note which of its tensors need a gradient."""
        tensors: list[Tensor] = []

        def leaf(tensor: Tensor) -> Leaf:
            tensors.append(tensor)
            return Leaf(len(tensors) - 1)

        tree = cls(())
        tree._skeleton = rebuilt(value, Tensor, leaf), [differentiable(t) for t in tensors]
        return tree.holding(tensors)

    @classmethod
    def received(cls, tensors: Iterable[Tensor], structure: bytes) -> "TensorTree":
        """Tensors that arrived, with the `structure` that the sender wrote.

        Raises:
            ValueError: If the structure is not one, or of classes that this rank has not registered.
        """
        tree = cls(tensors)
        tree._skeleton = decode(structure)
        return tree

    def holding(self, tensors: Iterable[Tensor]) -> "TensorTree":
        """The same structure around other tensors."""
        tree = TensorTree(tensors)
        tree._skeleton = self._skeleton
        return tree

    @property
    def structure(self) -> bytes:
        """What travels beside the tensors.

        Raises:
            ValueError: If there is anything in the structure that cannot be sent.
        """
        return encode(*self._skeleton)

    def unpack(self, prepare: Callable[[Tensor, bool], Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
        """The structure with tensors that went through ``prepare(tensor, differentiable)``, and these tensors."""
        skeleton, differentiable = self._skeleton
        tensors = tuple(prepare(t, d) for t, d in zip(self, differentiable, strict=True))
        return rebuilt(skeleton, Leaf, lambda leaf: tensors[leaf.number]), tensors


def is_flat(value: Any, training: bool) -> bool:
    """Whether ``value`` is a tuple of tensors, each of which needs a gradient if it can: it travels as it is."""
    return type(value) is tuple and all(
        isinstance(x, Tensor) and (x.requires_grad or not training or not (x.is_floating_point() or x.is_complex()))
        for x in cast(tuple[Any, ...], value)
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes, for backends that know few data types."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
