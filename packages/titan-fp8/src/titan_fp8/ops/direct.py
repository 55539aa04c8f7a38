"""Calling an op without torch's dispatcher, where nobody is watching.

A custom op costs tens of microseconds of host time per call, and a linear layer's forward and backward make six. Eager
code on plain tensors does not need what that buys: schemas, fakes and hooks for modes. `run_op` runs the op's Python body
then, the same function that the dispatcher would reach, and goes through the custom op wherever something has to see
it: ``torch.compile``, a dispatch mode (selective checkpointing, FakeTensor, tracing, counting), a tensor subclass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_BODIES: dict[Any, Callable[..., Any]] = {}


def custom_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a functional custom op and remember its body for `run_op`."""

    def register(body: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, mutates_args=())(body)
        _BODIES[op] = body
        return op

    return register


def run_op(op: Any, x: Tensor, *args: Any) -> Any:
    """``op(x, *args)``, directly where that makes no difference but time. ``x`` stands for all operands.

    While gradients are recorded the custom op runs, which refuses to be differentiated.
    """
    if type(x) in _PLAIN and x.device.type in _DEVICES and not torch.is_grad_enabled() and not watched():
        return _BODIES[op](x, *args)
    return op(x, *args)


def watched() -> bool:
    """Whether something must see ops as ops: a compiler or a dispatch mode."""
    # There is no public call that tells whether a dispatch mode is active; checked on torch 2.11 and 2.15.
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


_PLAIN = (Tensor, nn.Parameter)
_DEVICES = ("cpu", "cuda")
