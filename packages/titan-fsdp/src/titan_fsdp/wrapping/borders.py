"""Dtypes at the border of every module of a unit, on every torch alike.

FSDP2 of torch 2.11 casts the inputs of only the first module of a unit that runs, and the outputs of only the last;
newer versions cast each one's. These hooks do it for each; where torch has done so already, they change nothing.

What a module kept in float32 returns is cast here alone: torch would also cast a loss, whose value and gradient are then
rounded, and the results of a module that returns float32 whatever it computes in, such as a router of experts.
"""

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from titan_fsdp.names import unwrap


def cast_at_borders(modules: list[nn.Module], inputs: torch.dtype, outputs: torch.dtype | None) -> None:
    """Cast floating-point tensors going into each of ``modules``, and coming out where ``outputs`` is given.

    Scalars come out as they are, and so does all that a module with ``keeps_output_dtype = True`` returns.
    """

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _cast(args, inputs), _cast(kwargs, inputs)

    def after(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output if outputs is None else _cast(output, outputs, least_dims=1)

    for module in modules:
        module.register_forward_pre_hook(before, with_kwargs=True)
        if getattr(unwrap(module), "keeps_output_dtype", False) is not True:
            module.register_forward_hook(after)


def _cast(value: Any, dtype: torch.dtype, least_dims: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.ndim >= least_dims else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype, least_dims) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype, least_dims) for item in value))
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):  # pyright: ignore[reportUnknownArgumentType]
        return type(value)((key, _cast(item, dtype, least_dims)) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: _cast(getattr(value, f.name), dtype, least_dims) for f in dataclasses.fields(value)}
        )
    return value
