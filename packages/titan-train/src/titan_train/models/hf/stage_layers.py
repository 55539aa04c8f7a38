"""The layers of one pipeline stage, between two points where hidden states come in and go out.

A family does more than its plan says around its list of layers: it scales embeddings, adds positions, normalises. A stage
runs the same code of transformers. So what the stage before has sent is put in the place of the first layer's input, and what
the last layer gives is taken from there. Whatever the code does before and after then has no effect in this stage.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class StageLayers(nn.ModuleList):
    """A list of layers that the code of transformers goes through as through the one that it made."""

    _given: Tensor | None = None
    _further: Mapping[str, Any] | None = None
    _taken: list[Tensor] | None = None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    """What the last layer was called with, where anybody asks."""

    @contextmanager
    def between(
        self, given: Tensor | None, *, taken: bool, further: Mapping[str, Any] | None = None
    ) -> Generator[list[Tensor]]:
        """Inside, the first layer gets ``given``, and the list that comes back gets what the last layer gives.

        Args:
            given: Hidden states ``[B, S, d]``, or several streams of them; None leaves the first layer its own.
            taken: Whether to keep what the last layer gives.
            further: Keyword arguments that every layer is called with instead of its own.
        """
        kept: list[Tensor] = []
        self._given, self._taken, self._further = given, kept if taken else None, further
        try:
            yield kept
        finally:
            self._given = self._taken = self._further = None

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._ends())

    def __getitem__(self, idx: int | slice) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Layers are counted from this stage's first."""
        return self._ends()[idx]

    def _ends(self) -> list[Any]:
        layers: list[Any] = list(self.children())
        if self._further:
            layers = [_With(layer, self._further) for layer in layers]
        if layers and self.calls is not None:
            layers[-1] = _Noted(layers[-1], self.calls)
        if layers and self._given is not None:
            layers[0] = _First(layers[0], self._given)
        if layers and self._taken is not None:
            layers[-1] = _Last(layers[-1], self._taken)
        return layers


class _Call:
    """A layer that is called in another way; everything else is the layer's."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _With(_Call):
    def __init__(self, layer: Any, further: Mapping[str, Any]) -> None:
        super().__init__(layer)
        self._further = further

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._layer(*args, **{**keywords, **self._further})


class _First(_Call):
    def __init__(self, layer: Any, given: Tensor) -> None:
        super().__init__(layer)
        self._given = given

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if args:
            return self._layer(self._given, *args[1:], **keywords)
        return self._layer(**keywords | {"hidden_states": self._given})


class _Last(_Call):
    def __init__(self, layer: Any, taken: list[Tensor]) -> None:
        super().__init__(layer)
        self._taken = taken

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        out = self._layer(*args, **keywords)
        self._taken.append(out if isinstance(out, Tensor) else out[0])
        return out


class _Noted(_Call):
    def __init__(self, layer: Any, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__(layer)
        self._calls = calls

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self._calls[:] = [(args, keywords)]
        return self._layer(*args, **keywords)


class Gone(nn.Identity):
    """In the place of a module that another stage holds: hands on hidden states; of ids or positions it makes zeros."""

    def forward(self, input: Tensor, *_: Any, **__: Any) -> Tensor:
        """What is returned has no effect in this stage, and must only have a shape that can be computed with."""
        return input if input.is_floating_point() and input.ndim > 2 else input.new_zeros((*input.shape, 1)).float()
