"""Gather the next units early: explicit prefetch in registered order, or in the order the first forward shows.

Explicit prefetch issues the next k all-gathers from inside a unit's forward (and backward), for when the CPU cannot
run far enough ahead to issue them in time. It changes when collectives happen, never how many.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_fsdp.planning.policy import Prefetch


def set_prefetch(model: nn.Module, units: list[Any], prefetch: Prefetch | str | None) -> None:
    """Set the prefetch lists of ``units`` (without the root) now, or after the first forward has shown their order.

    Args:
        model: The root, whose end of forward ends the recording.
        units: One module a unit, in registration order.
        prefetch: The policy's field.
    """
    if prefetch is None:
        return
    wanted = prefetch if isinstance(prefetch, Prefetch) else Prefetch(order="recorded")
    if wanted.order == "registered":
        _set(units, wanted)
    else:
        _record(model, units, wanted)


def _set(units: list[FSDPModule], prefetch: Prefetch) -> None:
    for i, unit in enumerate(units):
        if prefetch.forward:
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + prefetch.forward])
        if prefetch.backward:
            unit.set_modules_to_backward_prefetch(units[max(0, i - prefetch.backward) : i][::-1])


def _record(model: nn.Module, units: list[Any], prefetch: Prefetch) -> None:
    order: list[FSDPModule] = []
    handles: list[Any] = []

    def seen(module: nn.Module, _: Any) -> None:
        if isinstance(module, FSDPModule) and module not in order:
            order.append(module)

    def done(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        for handle in handles:
            handle.remove()
        _set(order, prefetch)

    handles.extend(unit.register_forward_pre_hook(seen) for unit in units)
    handles.append(model.register_forward_hook(done))
