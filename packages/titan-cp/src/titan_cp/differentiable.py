"""Functions with one derivative: a second one is refused.

torch's ``once_differentiable`` leaves the first derivative without a way back to what it depends on, so that
``torch.autograd.grad`` passes over it and returns a second derivative without its part. Here the way back is there, and raises.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def differentiable_once(backward: _Backward) -> _Backward:
    """The ``backward`` of a `torch.autograd.Function` that nothing differentiates; under ``create_graph`` it keeps no graph."""

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        every = found if isinstance(found, tuple) else (found,)
        came_from = [x for x in grads if isinstance(x, Tensor) and x.requires_grad]
        tensors = [x for x in every if x is not None]
        if not tensors:
            return found
        # Where the incoming gradient depends on nothing, this one may still depend on the function's inputs.
        came_from.append(torch.empty(0, requires_grad=True))
        ends = iter(cast("tuple[Tensor, ...]", _End.apply(len(tensors), *tensors, *came_from)))
        return tuple(None if x is None else next(ends) for x in every)

    return cast(_Backward, call)


class _End(torch.autograd.Function):
    """The first tensors, as they are; they depend on the others in a way that nobody wrote down."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise RuntimeError(
            "a first derivative that has no derivative was differentiated twice: what computed it (a kernel, a collective) is "
            "differentiable once. Take second derivatives of a model on one device that computes this part in plain torch."
        )
