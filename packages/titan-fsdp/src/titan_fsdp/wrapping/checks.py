"""Misuse that torch lets pass until it hangs, fails far from the cause, or trains nothing. Caught before step 1."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from titan_fsdp.loaded import is_dtensor, is_fsdp_module
from titan_fsdp.names import clean_fqn, named_parameters, unwrap

_SNAPSHOT = "_titan_fsdp_snapshot"


def check_not_wrapped(model: nn.Module) -> None:
    """Raise ValueError if ``model`` or a part of it is already wrapped for data parallelism."""
    for name, module in model.named_modules():
        if is_fsdp_module(module) or isinstance(module, DistributedDataParallel):
            what = "FSDP2" if is_fsdp_module(module) else "DistributedDataParallel"
            raise ValueError(
                f"module {clean_fqn(name) or 'root'!r} is already wrapped by {what}: it would be sharded twice. "
                "Plan and apply once, on the plain model; name inner modules as units of the policy instead."
            )


def check_optimizer(model: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Check that ``optimizer`` updates the parameters that ``model`` now has.

    Wrapping replaces parameters. An optimizer built before steps the old ones: the loss never falls, and torch says
    nothing.

    Args:
        model: The wrapped model, or the pipeline stages of this rank.
        optimizer: Built from ``model.parameters()``.

    Raises:
        ValueError: It holds parameters that the model does not, or none of them.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    names = {id(p): name for m in models for name, p in named_parameters(m)}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [p for p in held if id(p) not in names]
    if stale:
        raise ValueError(
            f"{len(stale)} of the optimizer's {len(held)} parameters are not the model's: it was built before wrapping "
            "or materializing, and would train nothing. Build it afterwards, from model.parameters()."
        )
    trainable = {id(p) for m in models for _, p in named_parameters(m) if p.requires_grad}
    if trainable and not trainable.intersection(map(id, held)):
        raise ValueError(
            "the optimizer holds none of the model's trainable parameters. Build it from model.parameters()."
        )


def check_wrapping(model: nn.Module) -> None:
    """Check a wrapped model just before its first forward: nothing on meta, nothing changed since `WrapPlan.apply`.

    Raises:
        ValueError: A parameter is still on the meta device, was replaced or redistributed after wrapping (tensor
            parallelism after FSDP, a new weight), or a module was wrapped once more.
    """
    wrapped: Snapshot | None = getattr(model, _SNAPSHOT, None)
    now = take_snapshot(model)
    for name, parameter in named_parameters(model):
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is still on the meta device. Call materialize(model, device, init) first."
            )
    if wrapped is None:
        return
    for name in now.layouts.keys() | wrapped.layouts.keys():
        if now.layouts.get(name) != wrapped.layouts.get(name):
            raise ValueError(
                f"parameter {name!r} changed after FSDP was applied: it was "
                f"{wrapped.layouts.get(name, 'absent')} and is "
                f"{now.layouts.get(name, 'absent')}. Tensor parallelism and module surgery come before plan.apply."
            )
    extra = sorted(now.modules - wrapped.modules)
    if extra:
        raise ValueError(
            f"module {extra[0]!r} was wrapped after the modules around it (top-down), so they hold its parameters. "
            "Name it as a unit of the policy: plan.apply wraps inner modules first."
        )


def check_on_first_forward(model: nn.Module) -> None:
    """Remember how ``model`` is wrapped now, and run `check_wrapping` once, when it is first called."""
    setattr(model, _SNAPSHOT, take_snapshot(model))
    handles: list[Any] = []

    def check(module: nn.Module, _: Any) -> None:
        check_wrapping(module)
        handles.pop().remove()

    handles.append(model.register_forward_pre_hook(check, prepend=True))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How each parameter lies on its mesh, and which modules are wrapped, by FQN."""

    layouts: dict[str, str]
    modules: frozenset[str]


def take_snapshot(model: nn.Module) -> Snapshot:
    """The present state of ``model``."""
    layouts = {name: _layout(parameter) for name, parameter in named_parameters(model)}
    modules = [clean_fqn(n) for n, m in unwrap(model).named_modules() if is_fsdp_module(m)]
    return Snapshot(layouts, frozenset(modules))


def _layout(parameter: nn.Parameter) -> str:
    if not is_dtensor(parameter):
        return f"plain {tuple(parameter.shape)}"
    return f"{tuple(parameter.shape)} {parameter.placements} over {parameter.device_mesh}"
