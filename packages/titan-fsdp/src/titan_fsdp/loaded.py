"""Whether something is a DTensor or wrapped by FSDP2, asked without importing either: together they take a second of CPU.

Nothing can be one before its module was imported. Planning and estimating a model on the meta device never imports them.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """``isinstance(value, DTensor)``."""
    return isinstance(value, _class("torch.distributed.tensor", "DTensor"))


def is_fsdp_module(value: object) -> "TypeGuard[FSDPModule]":
    """``isinstance(value, FSDPModule)``."""
    return isinstance(value, _class("torch.distributed.fsdp", "FSDPModule"))


def is_fsdp_class(value: type[Any]) -> bool:
    """``issubclass(value, FSDPModule)``."""
    return issubclass(value, _class("torch.distributed.fsdp", "FSDPModule"))


def _class(module: str, name: str) -> Any:
    """The class, or no class at all where its module was not imported, or is being imported."""
    return getattr(sys.modules.get(module), name, ())
