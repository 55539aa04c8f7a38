"""Recognizing a DTensor without importing ``torch.distributed.tensor``, which takes most of a second of CPU."""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """Whether ``value`` is a DTensor. Where the module was never imported there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
