"""Whether something is a DTensor or wrapped by FSDP2, asked without importing either: together they take a second of CPU.

Nothing can be one before its module was imported. Planning and estimating a model on the meta device never imports them.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """``isinstance(value, DTensor)``."""
    return isinstance(value, _class("torch.distributed.tensor", "DTensor"))


def compute_device(parameter: Tensor) -> torch.device:
    """Where a parameter is computed with: its mesh's device, where FSDP brings one that is offloaded to the CPU."""
    if not is_dtensor(parameter):
        return parameter.device
    kind = parameter.device_mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def is_fsdp_module(value: object) -> "TypeGuard[FSDPModule]":
    """``isinstance(value, FSDPModule)``."""
    return isinstance(value, _class("torch.distributed.fsdp", "FSDPModule"))


def is_fsdp_class(value: type[Any]) -> bool:
    """``issubclass(value, FSDPModule)``."""
    return issubclass(value, _class("torch.distributed.fsdp", "FSDPModule"))


def _class(module: str, name: str) -> Any:
    """The class, or no class at all where its module was not imported, or is being imported."""
    return getattr(sys.modules.get(module), name, ())
