"""Dtypes at the border of every module of a unit, on every torch alike.

FSDP2 of torch 2.11 casts the inputs of only the first module of a unit that runs, and the outputs of only the last;
newer versions cast each one's. These hooks do it for each; where torch has done so already, they change nothing.
"""

from typing import Any

import torch
from torch import nn


def cast_at_borders(modules: list[nn.Module], inputs: torch.dtype, outputs: torch.dtype | None) -> None:
    """Cast floating-point tensors going into each of ``modules``, and coming out where ``outputs`` is given."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _cast(args, inputs), _cast(kwargs, inputs)

    def after(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output if outputs is None else _cast(output, outputs)

    for module in modules:
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
