"""Tensors that live on another stage: shape, data type and device are known, the numbers are not.

While a stage walks the part of the forward that belongs to earlier stages, parameters, activations and large inputs are
`Absent`. Code may ask for their shape and compute with them: the result is absent too, and keeps the recipe. A value is
asked for only when the stage's own part uses it, or when Python branches on it (``if mask.all()``). It then comes from the
message of the stage before, or from the recipe, applied to what came.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from titan_pipeline.runtime.transport.plain import register_structure

Base = tuple[str | int, ...]
"""Where an absent tensor comes from: ``("param", name)``, ``("buffer", name)``, ``("input", argument, leaf)`` or
``("call", module, number of the call, leaf)``."""


@register_structure
class TensorSpec(NamedTuple):
    """What is known about an absent tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """The specification of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, str(tensor.device))


class AbsentOwner(Protocol):
    """Who gives absent tensors their values."""

    def operate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation with at least one absent tensor is called."""
        ...

    def lookup(self, base: Base) -> Tensor:
        """The value of a base."""
        ...


class Absent(Tensor):
    """A tensor of another stage."""

    owner: AbsentOwner
    base: Base | None
    recipe: "AbsentRecipe | None"
    leaf: int
    value: Tensor | None

    @staticmethod
    def __new__(
        cls: type["Absent"],
        spec: TensorSpec,
        owner: AbsentOwner,
        base: Base | None = None,
        recipe: Any = None,
        leaf: int = 0,
    ) -> "Absent":
        """Either with a base or with a recipe, whose result's leaf of that number it is."""
        made: Any = Tensor._make_wrapper_subclass(cls, spec.shape, dtype=spec.dtype, device=torch.device(spec.device))
        made.owner, made.base, made.recipe, made.leaf, made.value = owner, base, recipe, leaf, None
        return made

    def force(self) -> Tensor:
        """The value."""
        if self.value is None:
            self.value = self.owner.lookup(self.base) if self.base is not None else self._cooked()
        return self.value

    def _cooked(self) -> Tensor:
        assert self.recipe is not None
        return self.recipe.result()[self.leaf]

    def become(self, recipe: "AbsentRecipe") -> None:
        """An operation in place: from now on this is the recipe's result."""
        self.base, self.recipe, self.leaf, self.value = None, recipe, 0, None

    def before(self) -> "Absent":
        """What this is now, as a tensor of its own."""
        other = Absent(TensorSpec.of(self), self.owner, self.base, self.recipe, self.leaf)
        other.value = self.value
        return other

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is known, hand the rest to the owner."""
        name = getattr(func, "__name__", "")
        getter = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        if name in _KNOWN or (getter and getter not in _VIEWS):
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                return func(*args, **(kwargs or {}))
        if name == "__deepcopy__":
            return _copied(*args)
        absent = next(found for found in absents((args, kwargs)))
        return absent.owner.operate(func, args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only reached by what passes by torch's public functions."""
        raise NotImplementedError(
            f"{func} is called on a tensor of another stage in a way that cannot be followed. Move the cut (starts=...), "
            "or write the stages by hand."
        )


class AbsentRecipe:
    """An operation that was not run, and its result once it was."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool) -> None:
        self.name = getattr(func, "__name__", str(func))
        self._call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = (func, args, kwargs)
        self._in_place = in_place
        self._leaves: list[Any] = []

    def result(self) -> list[Any]:
        """The leaves of the operation's result; it runs once.

        Raises:
            ValueError: The operation draws random numbers, which every stage would draw for itself.
        """
        if self._call is None:
            return self._leaves
        func, args, kwargs = self._call
        if any(word in self.name for word in _RANDOM):
            raise ValueError(
                f"the forward calls {self.name} between two layers, and a later stage needs the result: both would draw "
                "their own random numbers. Move the cut (starts=...) to the layer that follows it."
            )
        args, kwargs = forced((args, kwargs))
        if self._in_place:
            changed = args[0].clone()
            func(changed, *args[1:], **kwargs)
            self._leaves = [changed]
        else:
            self._leaves = tree_leaves(func(*args, **kwargs))
        self._call = None
        return self._leaves


def forced(value: Any) -> Any:
    """``value`` with the values of all absent tensors in it."""
    return tree_map(lambda x: x.force() if type(x) is Absent else x, value)


def absents(value: Any) -> Iterable[Absent]:
    """The absent tensors in tuples, lists and dicts."""
    if type(value) is Absent:
        yield value
    elif isinstance(value, tuple | list):
        for item in cast(tuple[Any, ...], value):
            yield from absents(item)
    elif isinstance(value, dict):
        for item in cast(dict[Any, Any], value).values():
            yield from absents(item)


def changes_in_place(name: str) -> bool:
    """Whether an operation of that name changes its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    )


def _copied(absent: Absent, memo: dict[int, Any]) -> Absent:
    assert absent.base is not None
    made = Absent(TensorSpec.of(absent), copy.deepcopy(absent.owner, memo), absent.base)
    memo[id(absent)] = made
    return made


_KNOWN = frozenset({
    "size", "dim", "ndimension", "stride", "numel", "nelement", "is_floating_point", "is_complex", "is_contiguous",
    "element_size", "storage_offset", "__len__", "get_device", "is_signed", "is_inference", "__hash__", "requires_grad_",
})  # fmt: skip
"""Answered from shape, data type and device."""

_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
"""Attributes that are operations."""

_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_")
