"""Carry out a plan: inner units first, the root last, then everything that torch keeps as a setting of a module."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from titan_fsdp.names import is_meta, named_modules, named_parameters
from titan_fsdp.planning.data import PlanData, PlannedUnit, Sizes
from titan_fsdp.torch_private import (
    ddp_ignore,
    fsdp_modules,
    fsdp_roots,
    note_reached,
    replicate_engine,
    shard_groups,
)
from titan_fsdp.wrapping.borders import cast_at_borders
from titan_fsdp.wrapping.checks import check_not_wrapped, check_on_first_forward
from titan_fsdp.wrapping.compress import Bf16ReduceScatter, register_ddp_hook
from titan_fsdp.wrapping.prefetch import set_prefetch

__all__ = ["applied_plan", "apply_plan", "check_not_wrapped"]

_PLAN = "_titan_fsdp_plan"
_REACHED = "_titan_fsdp_reached"


def applied_plan(model: nn.Module) -> PlanData | None:
    """The plan that was applied to ``model``; None for a model this package did not wrap."""
    return getattr(model, _PLAN, None)


def reached_parameters(model: nn.Module) -> set[nn.Parameter] | None:
    """Those of which this rank had a gradient since the set was last cleared; None where none may be unused."""
    return getattr(model, _REACHED, None)


def apply_plan(
    plan: PlanData, model: nn.Module, mesh: DeviceMesh | None, meshes: Mapping[str, DeviceMesh]
) -> nn.Module:
    """Wrap ``model`` as ``plan`` says; see `WrapPlan.apply`."""
    check_not_wrapped(model)
    _check_same_model(plan, model)
    if mesh is None:
        _check_alone(plan)
        setattr(model, _PLAN, plan)
        return model
    _check_mesh(plan, mesh, meshes)
    _check_offload(plan)
    if plan.policy.comm.ddp_hook is not None:
        return _apply_ddp(plan, model, mesh)
    modules = named_modules(model)
    ignored = {p for name, p in named_parameters(model) if name in plan.ignored}
    # A unit must be wrapped before the unit around it, which takes every parameter that is left.
    for unit in sorted(plan.units, key=_depth, reverse=True):
        _wrap(plan, unit, [modules[fqn] for fqn in unit.fqns], meshes[unit.mesh] if unit.mesh else mesh, ignored)
    _configure(plan, model, modules, mesh.device_type)
    setattr(model, _PLAN, plan)
    check_on_first_forward(model)
    return model


def _depth(unit: PlannedUnit) -> int:
    return min(len(fqn.split(".")) if fqn else 0 for fqn in unit.fqns)


def _wrap(
    plan: PlanData, unit: PlannedUnit, modules: list[nn.Module], mesh: DeviceMesh, ignored: set[nn.Parameter]
) -> None:
    policy = plan.policy
    root = unit.name == "root"
    fp32_inside = unit.param_dtype != policy.mp.param_dtype
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=unit.param_dtype,
            reduce_dtype=unit.reduce_dtype,
            output_dtype=policy.mp.output_dtype if root else None,
        ),
        "offload_policy": OffloadPolicy() if policy.offload is None else CPUOffloadPolicy(policy.offload == "cpu"),
        "ignored_params": ignored or None,
    }
    if fp32_inside or (len(modules) > 1 and policy.mp.param != "fp32"):
        # A unit kept in float32 hands its result on in the dtype its neighbours compute in.
        hands_on = policy.mp.param_dtype if fp32_inside and not _is_in_fp32(plan, unit) else None
        cast_at_borders(modules, unit.param_dtype, hands_on)
    target: Any = modules if len(modules) > 1 else modules[0]
    if policy.mode == "ddp":
        replicate_engine()(target, **options)
        return
    dims = {id(p): planned.shard_dim for p, planned in _parameters(unit, modules) if planned.shard_dim}
    if dims:
        options["shard_placement_fn"] = lambda parameter: Shard(dims[id(parameter)]) if id(parameter) in dims else None
    fully_shard(target, reshard_after_forward=unit.reshard, **options)


def _is_in_fp32(plan: PlanData, unit: PlannedUnit) -> bool:
    """Whether what is around a unit is kept in float32 too."""
    kept = [u for u in plan.units if u.param_dtype != plan.policy.mp.param_dtype]
    around = [f"{fqn}." for other in kept for fqn in other.fqns]
    return all(fqn.startswith(tuple(around)) for fqn in unit.fqns)


def _parameters(unit: PlannedUnit, modules: list[nn.Module]) -> list[tuple[nn.Parameter, Any]]:
    planned = {p.fqn: p for p in unit.params}
    found: list[tuple[nn.Parameter, Any]] = []
    for fqn, module in zip(unit.fqns, modules, strict=True):
        for name, parameter in named_parameters(module):
            full = f"{fqn}.{name}" if fqn else name
            if full in planned:
                found.append((parameter, planned[full]))
    return found


def _configure(plan: PlanData, model: nn.Module, modules: dict[str, nn.Module], device: str) -> None:
    policy = plan.policy
    sizes_of = {id(modules[fqn]): unit.sizes for unit in plan.units for fqn in unit.fqns}
    may_differ = policy.unused_parameters and any(unit.sizes.total > 1 for unit in plan.units)
    for module in fsdp_modules(model):
        # On one rank the sum is the mean, and torch would write all gradients once more to divide them by one.
        is_mean = policy.grad_divide == "mean" or (policy.grad_divide == "sum" and sizes_of[id(module)].total == 1)
        if not is_mean:
            module.set_gradient_divide_factor(1.0 if policy.grad_divide == "sum" else float(policy.grad_divide))
            # Without this, torch asks the backend for PREMUL_SUM, which only NCCL has. With one shard torch divides
            # in the copy that replaces the reduce-scatter and would divide once more after a forced sum.
            module.set_force_sum_reduction_for_comms(sizes_of[id(module)].shard > 1)
        if policy.comm.reduce_scatter == "bf16":
            module.set_custom_reduce_scatter(Bf16ReduceScatter())  # pyright: ignore[reportArgumentType]
        if may_differ:
            module.set_reduce_scatter_unused_params(True)
    if may_differ:
        setattr(model, _REACHED, reached := set[nn.Parameter]())
        note_reached(fsdp_modules(model), reached)
    for root in fsdp_roots(model):  # each call below reaches all inside, with one group for all that share their ranks
        if policy.comm.reduce_scatter_group == "own":
            root.set_separate_reduce_scatter_group()
        if policy.comm.reduce_scatter_buffers > 1:
            root.set_reduce_scatter_max_input_buffers(policy.comm.reduce_scatter_buffers)
    if policy.comm.symmetric_memory:
        # Symmetric memory needs the communicator, which NCCL makes at a group's first collective. The barrier that torch has
        # for this goes to gloo where a group has both.
        for group in shard_groups(fsdp_modules(model)):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        for module in fsdp_modules(model):
            module.set_symm_mem_for_comm()
    # A module in several-module units shares one state: its first module stands for the unit.
    firsts = [modules[unit.fqns[0]] for unit in plan.units if unit.params and unit.name != "root"]
    set_prefetch(model, [m for m in firsts if isinstance(m, FSDPModule)], policy.prefetch)


def _apply_ddp(plan: PlanData, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if is_meta(model):
        raise ValueError(
            "comm.ddp_hook uses DistributedDataParallel, which cannot wrap meta parameters. Call materialize(model, …) "
            "before plan.apply(model)."
        )
    if plan.ignored:
        ignored = {p for name, p in named_parameters(model) if name in plan.ignored}
        ddp_ignore(model, ignored)
    device = None if mesh.device_type == "cpu" else [torch.get_device_module(mesh.device_type).current_device()]
    group = mesh.get_group()
    wrapped = DistributedDataParallel(
        model, device_ids=device, process_group=group, find_unused_parameters=plan.policy.unused_parameters
    )
    register_ddp_hook(wrapped, plan.policy, group)
    setattr(wrapped, _PLAN, plan)
    return wrapped


def _check_same_model(plan: PlanData, model: nn.Module) -> None:
    planned = {p.fqn for unit in plan.units for p in unit.params} | set(plan.ignored)
    actual = {name for name, _ in named_parameters(model)}
    if planned != actual:
        missing, extra = sorted(planned - actual), sorted(actual - planned)
        raise ValueError(
            f"the model is not the one that was planned: it lacks {missing[:3]} and adds {extra[:3]}. "
            "Call plan(model, …) again after changing the model."
        )


def _check_alone(plan: PlanData) -> None:
    if plan.sizes.total > 1 or dist.is_initialized():
        raise ValueError(f"the plan was made from sizes {plan.sizes}, so apply needs a mesh: plan.apply(model, mesh).")
    mp = plan.policy.mp
    if mp.param != "fp32" or mp.output is not None or plan.policy.offload is not None:
        raise ValueError(
            "without a process group the model stays plain, and its dtypes and place cannot be managed. Start one with "
            "world size 1 and pass its mesh, or use mp=MixedPrecision() and offload=None."
        )
    divide = plan.policy.grad_divide
    if not isinstance(divide, str) and divide != 1:
        raise ValueError(
            f"grad_divide={divide:g}: without a process group the model stays plain, and nothing divides its gradients. Start "
            "one with world size 1 and pass its mesh, or use grad_divide='sum' and divide the loss."
        )


def _check_mesh(plan: PlanData, mesh: DeviceMesh, meshes: Mapping[str, DeviceMesh]) -> None:
    hsdp = plan.policy.mode == "hsdp"
    if mesh.ndim != (2 if hsdp else 1):
        raise ValueError(
            f"mode={plan.policy.mode!r} needs a {'2-D (replicate, shard)' if hsdp else '1-D'} mesh, got {mesh}."
        )
    pair = (mesh.size(0), mesh.size(1)) if hsdp else (mesh.size(), 1) if plan.policy.mode == "ddp" else (1, mesh.size())
    if Sizes(replicate=pair[0], shard=pair[1]) != plan.sizes:
        raise ValueError(
            f"the plan is for {plan.sizes}, but the mesh has replicate {pair[0]} × shard {pair[1]}. Plan again."
        )
    if plan.policy.comm.symmetric_memory and mesh.device_type != "cuda":
        raise ValueError(
            f"comm.symmetric_memory=True on {mesh.device_type}: symmetric memory is NCCL's. Use symmetric_memory=False."
        )
    for unit in plan.units:
        if unit.mesh is not None and unit.mesh not in meshes:
            raise ValueError(
                f"unit {unit.name!r} needs the mesh {unit.mesh!r}. Pass apply(model, mesh, {{{unit.mesh!r}: …}})."
            )


def _check_offload(plan: PlanData) -> None:
    if plan.policy.offload == "cpu" and not torch.accelerator.is_available():
        raise ValueError(
            "offload='cpu' pins host memory, which needs an accelerator's driver; there is none. Use 'cpu-nopin'."
        )
