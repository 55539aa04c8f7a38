"""The few places where torch's public API does not serve, in one module. Checked on torch 2.11 to 2.15.

`replicate` is the FSDP2 engine without sharding; torch does not export it yet, under the same private path in every
version checked. Methods that a torch version lacks are asked for with hasattr, and named in the error.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from titan_fsdp.loaded import is_fsdp_class, is_fsdp_module

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["call", "fake_tensors", "fsdp_modules", "original_class", "replicate_engine", "split_factor"]


def replicate_engine() -> Callable[..., nn.Module]:
    """FSDP2's `replicate`."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate  # pyright: ignore[reportReturnType]


def fsdp_modules(model: nn.Module) -> "list[FSDPModule]":
    """Every module of ``model`` that FSDP2 (sharded or replicated) wraps, outermost first."""
    return [module for module in model.modules() if is_fsdp_module(module)]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class ``module`` had before FSDP2 swapped it."""
    for cls in type(module).__mro__:
        if issubclass(cls, nn.Module) and not is_fsdp_class(cls):
            return cls
    raise AssertionError(f"{type(module)} has no nn.Module in its bases")


def call(module: Any, method: str, *args: Any, since: str, why: str) -> None:
    """Call an FSDPModule method that not every supported torch has.

    Raises:
        ValueError: This torch lacks it; names the version that has it.
    """
    bound: Callable[..., None] | None = getattr(module, method, None)
    if bound is None:
        raise ValueError(
            f"{why} needs torch {since} or newer, which added {method}; this is torch {torch.__version__}."
        )
    bound(*args)


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which new tensors have shape, dtype and device but no memory, and operators no kernels."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # half a second, and only an estimate needs it

    return FakeTensorMode(allow_non_fake_inputs=True)


def split_factor(placement: Any) -> int:
    """How often a placement's dimension was already split by axes to its right (FSDP over tensor parallelism), else 1.

    torch names such placements ``_StridedShard`` and keeps the class private; the attribute is what tells it apart.
    """
    return int(getattr(placement, "split_factor", 1))
