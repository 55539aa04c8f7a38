"""Declaring an op once: from its check and the shape of its results come the custom op, its fake and its direct call.

A custom op costs tens of microseconds of host time per call, and a linear layer's forward and backward make six. Eager code on
plain tensors does not need what that buys: schemas, fakes and hooks for modes. `run_op` then runs the op's Python body, the
function that the dispatcher would reach. It goes through the custom op wherever something has to see it: ``torch.compile``, a
dispatch mode (selective checkpointing, FakeTensor, tracing, counting), a tensor subclass.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titan_fp8.dispatch import implementation

_BODIES: dict[Any, Callable[..., Any]] = {}
_BACKEND = inspect.Parameter("backend", inspect.Parameter.POSITIONAL_OR_KEYWORD, default="auto", annotation=str)


def float8_op(check: Callable[..., None]) -> Callable[[Callable[..., Any]], Any]:
    """Declare the functional custom op ``titan_fp8::<name>`` with a function that allocates its results.

    The op takes the function's parameters and ``backend``. It calls ``check`` with those parameters that ``check`` names, then
    the implementation that `titan_fp8.dispatch` chooses for the first operand's device and the values of its ``scaling``
    parameters. The fake calls ``check``, then the function.
    """

    def declare(results: Callable[..., Any]) -> Any:
        signature = inspect.signature(results)
        names = list(signature.parameters)
        defaults = [parameter.default for parameter in signature.parameters.values()]
        checked = [names.index(name) for name in inspect.signature(check).parameters]
        scalings = [place for place, name in enumerate(names) if name.startswith("scaling")]

        def operands(given: tuple[Any, ...]) -> tuple[Any, ...]:
            every = (*given[: len(names)], *defaults[len(given) :])
            check(*(every[place] for place in checked))
            return every

        @functools.wraps(results)
        def body(*given: Any) -> Any:
            every = operands(given)
            first = every[0][0] if isinstance(every[0], list) else every[0]
            case = "·".join([every[place] for place in scalings])
            backend = given[-1] if len(given) > len(names) else "auto"
            return implementation(results.__name__, first.device, backend, case)(*every)

        body.__signature__ = signature.replace(parameters=[*signature.parameters.values(), _BACKEND])  # pyright: ignore[reportAttributeAccessIssue]
        op = torch.library.custom_op(f"titan_fp8::{results.__name__}", mutates_args=())(body)
        op.register_fake(lambda *given: results(*operands(given)))
        _BODIES[op] = body
        return op

    return declare


def run_op(op: Any, x: Tensor, *args: Any) -> Any:
    """``op(x, *args)``, directly where that makes no difference but time. ``x`` stands for all operands.

    While gradients are recorded the custom op runs, which refuses to be differentiated.
    """
    if type(x) in _PLAIN and x.device.type in _DEVICES and not torch.is_grad_enabled() and not watched():
        return _BODIES[op](x, *args)
    return op(x, *args)


def watched() -> bool:
    """Whether something must see ops as ops: a compiler or a dispatch mode."""
    # torch has no public test for an active dispatch mode; checked on torch 2.11 and 2.15.
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


_PLAIN = (Tensor, nn.Parameter)
_DEVICES = ("cpu", "cuda")
