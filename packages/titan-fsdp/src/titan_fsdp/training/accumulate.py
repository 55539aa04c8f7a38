"""Gradient accumulation: what is kept between microbatches, memory against communication.

| keep        | between microbatches                       | communication of m microbatches            |
|-------------|--------------------------------------------|--------------------------------------------|
| `sharded`   | sharded gradients                          | all of it, every microbatch                |
| `unsharded` | full gradients                             | parameters every time, gradients once      |
| `zero1`     | full gradients and full parameters         | parameters once, gradients once            |
| `hsdp-ar`   | sharded gradients of this replica          | the all-reduce between replicas only once  |

The gradients are equal up to rounding in all four. Divide the loss by the number of microbatches yourself.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from titan_fsdp.loaded import compute_device
from titan_fsdp.names import named_modules
from titan_fsdp.planning.collectives import Accumulate, check_keep
from titan_fsdp.planning.data import PlanData
from titan_fsdp.torch_private import drop_unreduced, fsdp_modules
from titan_fsdp.wrapping.apply import applied_plan, reached_parameters


@contextmanager
def accumulate(model: nn.Module, index: int, total: int, keep: Accumulate = "sharded") -> Generator[None]:
    """Run forward and backward of microbatch ``index`` of ``total`` inside this context.

    Args:
        model: A model from `WrapPlan.apply`, or a plain one, for which nothing happens.
        index: Microbatch, from 0. 0 begins a step: gradients that an unfinished step left unreduced are dropped.
        total: Microbatches in the step.
        keep: See the table above. In ddp mode ``sharded`` reduces every microbatch and the others
            only the last; with a communication hook it is always only the last.

    Raises:
        ValueError: ``index`` is out of range, or ``keep="hsdp-ar"`` without replicas.
    """
    check_keep(keep)
    if not 0 <= index < total:
        raise ValueError(f"microbatch index={index} is not in 0 … total-1={total - 1}.")
    last = index == total - 1
    if isinstance(model, DistributedDataParallel):
        with _ddp(model, sync=last):
            yield
        return
    modules = fsdp_modules(model)
    plan = applied_plan(model)
    if not modules:
        yield
        return
    if plan is None:
        raise ValueError("accumulate needs to know how the model was wrapped. Wrap it with plan(…).apply(model).")
    mode = plan.policy.mode
    if keep == "hsdp-ar" and mode == "fsdp":
        raise ValueError(
            "keep='hsdp-ar' defers the all-reduce between replicas, and mode='fsdp' has none. Use 'sharded'."
        )
    if (keep == "zero1" and mode == "ddp") or (keep == "hsdp-ar" and mode == "ddp"):
        keep = "unsharded"
    if index == 0:
        drop_unreduced(modules)
        if reached := reached_parameters(model):
            reached.clear()
    _set(model, plan, modules, keep, last)
    try:
        yield
    finally:
        if last:
            _set(model, plan, modules, "sharded", True)


def drop_unreached(model: nn.Module) -> None:
    """Leave parameters that no rank used in this step without gradient, as in one process.

    With ``unused_parameters=True`` FSDP2 reduces zeros for what a rank did not use, and an optimizer decays what has a gradient
    of zeros. For any other model this does nothing. Call it on every rank after the step's last backward: it is one small
    all-reduce over the ranks of each mesh, and only a rank that did not use everything waits for it.
    """
    reached = reached_parameters(model)
    if reached is None:
        return
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    for mesh, parameters in by_mesh.items():
        here = [parameter in reached for parameter in parameters]
        device = compute_device(parameters[0])
        used = torch.ones(len(here), device=device) if all(here) else torch.tensor(here, device=device).float()
        for dim in range(mesh.ndim):
            dist.all_reduce(used, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        for parameter, anywhere in zip(parameters, here if all(here) else used.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None
    reached.clear()


def _set(model: nn.Module, plan: PlanData, modules: list[FSDPModule], keep: Accumulate, last: bool) -> None:
    root: Any = model
    root.set_requires_gradient_sync(last or keep in ("sharded", "hsdp-ar"))
    root.set_requires_all_reduce(last or keep != "hsdp-ar")
    if plan.policy.mode == "ddp":
        return
    root.set_reshard_after_backward(last or keep != "zero1")
    by_name = named_modules(model)
    for unit in plan.units:
        if isinstance(unit.reshard, bool):  # torch can change a bool at run time, not a number of ranks
            module: Any = by_name[unit.fqns[0]]
            module.set_reshard_after_forward(unit.reshard and keep != "zero1", recurse=False)


@contextmanager
def _ddp(model: DistributedDataParallel, *, sync: bool) -> Generator[None]:
    """Reduce only the last: DistributedDataParallel would reduce again what it reduced before."""
    if sync:
        yield
        return
    with model.no_sync():
        yield
