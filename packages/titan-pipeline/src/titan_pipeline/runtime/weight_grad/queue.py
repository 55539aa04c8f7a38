"""The weight gradients that wait for their W action."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_pipeline.runtime.weight_grad.accumulate import accumulate

ELSEWHERE = (
    "this forward was recorded by a WeightGradEngine, but its backward runs outside of the engine: its weight gradients "
    "would be lost. Run the backward through the stage, or inside engine.deferring()."
)

Rule = Callable[..., Any]
"""``rule(engine, module, plain_forward, *args, **kwargs)``: the module's output, deferring if the engine asks to."""


Note = tuple[Sequence[Tensor], Callable[..., Sequence[Tensor]], tuple[Any, ...]]
"""Parameters, and what gives their gradients: ``compute(*given)``."""


class WeightGradQueue:
    """The weight gradients of one microbatch that are not computed yet."""

    def __init__(self, through_autograd: bool = False) -> None:
        self.notes: list[Note] = []
        self._through_autograd = through_autograd

    def run(self) -> None:
        """Compute them, in the order they were noted, and accumulate each parameter once."""
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            for parameters, compute, given in self.notes:
                for parameter, grad in zip(parameters, compute(*given), strict=True):
                    known = totals.get(id(parameter))
                    totals[id(parameter)] = (parameter, grad if known is None else known[1] + grad)
            self.notes.clear()
            accumulate(totals.values(), self._through_autograd)


class Deferring(Protocol):
    """What a rule needs of the engine."""

    anchor: Tensor
    """Differentiable input of deferring functions, in the place of the parameter."""
    active: bool
    queue: WeightGradQueue | None
    """Where notes go while a backward of the stage runs."""

    def defer(self, parameter: Tensor, compute: Callable[..., Tensor], *given: Any) -> None:
        """Note a weight gradient for later: ``compute(*given)``, which keeps what is given alive until then."""
        ...
