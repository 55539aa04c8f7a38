"""Memory of a step, without ranks: closed forms for parameters, a forward on fake tensors for activations.

The timeline of FSDP2 is replayed over the plan's units. Forward: a unit's parameters are gathered into a flat buffer
and copied out, the buffer lives until the next unit has copied out its own; units kept after forward pile up.
Backward, last unit first: the gathered parameters, the buffer of the unit prefetched next, the full gradients, then
the largest operator's two gradients, the reduction's input (held until the next unit's reduction) and the sharded
gradients that remain. The peak is the
largest sum met on the way.

Activations are the tensors autograd saves, measured per unit with saved-tensor hooks while the model runs on fake
tensors: no memory, no kernels. Limits: temporaries inside one operator, allocator fragmentation and what activation
checkpointing recomputes are not in it; units are taken to run in registration order.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan_fsdp.names import named_modules
from titan_fsdp.planning.collectives import Accumulate, Collectives, planned_collectives
from titan_fsdp.planning.data import PlanData, PlannedUnit
from titan_fsdp.torch_private import fake_tensors, surround


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on one rank, and the collectives of one step."""

    params: int
    """Sharded parameters."""
    grads: int
    """Sharded gradients."""
    optimizer: int
    """Optimizer state."""
    buffers: int
    """Buffers. Parameters that the policy ignores are in none of these figures."""
    gathered: int
    """Most parameters gathered at one time."""
    activations: int
    """Saved for backward, all units; 0 without inputs."""
    watched: tuple[int, ...]
    """What each module that `WrapPlan.estimate` was to watch saved of it, inside or outside of compiled code."""
    peak: int
    """Most bytes in forward or backward, from the second step on."""
    peak_before_end: int
    """Most bytes until the first unit's backward; from then on nothing that other units saved for backward is left."""
    collectives: Collectives | None
    """Of one step; None where torch decides."""


def estimate_step(
    plan: PlanData,
    model: nn.Module | None,
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] | None,
    optimizer_states: int,
    microbatches: int,
    keep: Accumulate,
    in_place: bool = False,
    watched: Sequence[nn.Module] = (),
) -> Estimate:
    """See `WrapPlan.estimate`."""
    if model is None and inputs:
        raise ValueError("estimate got inputs without a model to run them through. Pass estimate(model, inputs).")
    if watched and not in_place:
        raise ValueError(
            "estimate watches modules of the model that it runs, and a copy has others. Pass in_place=True."
        )
    measured, of_watched = [(0, 0)] * len(plan.units), [0] * len(watched)
    if model is not None and inputs:
        measured, of_watched = saved_bytes(plan, model, inputs, loss, in_place=in_place, watched=watched)
    saved, largest = [total for total, _ in measured], [size for _, size in measured]
    params = sum(_local(u, u.shard_numel()) for u in plan.units)
    grads = sum(_local(u, u.shard_numel(trainable_only=True)) for u in plan.units)
    optimizer = grads * optimizer_states
    base = params + optimizer + plan.buffer_bytes
    if plan.policy.offload is not None:
        base = plan.buffer_bytes  # the shards, their gradients and the optimizer state are in host memory
    forward, gathered = _forward_peak(plan, saved)
    backward, at_end = _backward_peak(plan, saved, largest, microbatches, keep)
    return Estimate(
        params=params,
        grads=grads,
        optimizer=optimizer,
        buffers=plan.buffer_bytes,
        gathered=gathered,
        activations=saved[-1] if saved else 0,
        watched=tuple(of_watched),
        peak=base + max(forward, backward, at_end),
        peak_before_end=base + max(forward, backward),
        collectives=planned_collectives(plan, microbatches, keep),
    )


def saved_bytes(
    plan: PlanData,
    model: nn.Module,
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] | None,
    *,
    in_place: bool = False,
    watched: Sequence[nn.Module] = (),
) -> tuple[list[tuple[int, int]], list[int]]:
    """For each unit: bytes saved for backward when its forward has ended, cumulative, and its largest saved tensor.

    The root's entry is the total and what is saved after the last unit. Beside it, what each watched module saves.
    """
    bare = (model if in_place else copy.deepcopy(model)).to("meta").to(plan.policy.mp.param_dtype)
    with fake_tensors():
        return _saved_bytes(plan, bare, inputs, loss, watched)


def _saved_bytes(
    plan: PlanData,
    model: nn.Module,
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] | None,
    watched: Sequence[nn.Module],
) -> tuple[list[tuple[int, int]], list[int]]:
    dtype = plan.policy.mp.param_dtype
    pretend_on_cpu(model)
    args = [fake_input(a, dtype) if isinstance(a, Tensor) else a for a in inputs]
    storages = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    held: list[Tensor] = []  # keeps storages alive, so that their addresses stay unique
    total = 0
    largest = 0
    after: dict[str, tuple[int, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total, largest
        address = tensor.untyped_storage()._cdata
        if address not in storages:
            storages.add(address)
            held.append(tensor)
            total += tensor.untyped_storage().nbytes()
            largest = max(largest, tensor.untyped_storage().nbytes())
        return tensor

    def mark(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            nonlocal largest
            after[name] = (total, largest)
            largest = 0

        return hook

    of_watched = [0] * len(watched)

    def watch(number: int) -> Callable[..., Any]:
        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before = total
            output = call(*args, **kwargs)
            of_watched[number] += total - before
            return output

        return around

    for number, module in enumerate(watched):
        surround(module, watch(number))
    modules = named_modules(model)
    for unit in plan.units[:-1]:
        modules[unit.fqns[-1]].register_forward_hook(mark(unit.name))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*args)
        if loss is not None:
            output = loss(output)
    return [after.get(unit.name, (total, largest)) for unit in plan.units[:-1]] + [(total, largest)], of_watched


def fake_input(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=dtype, requires_grad=tensor.requires_grad)


def pretend_on_cpu(model: nn.Module) -> None:
    """Replace meta tensors by fake ones that say they are on a CPU, ties kept.

    Attention then takes its fused kernel, as it will in the run; on meta it would be taken apart and save its scores.
    """
    fakes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                fake = fakes.setdefault(id(p), nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad))
                module._parameters[name] = fake
        for name, b in list(module._buffers.items()):
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype)


def _local(unit: PlannedUnit, numel: int) -> int:
    return numel * (unit.params[0].dtype.itemsize if unit.params else 0)


def gather_buffer(unit: PlannedUnit) -> int:
    """Bytes of the flat all-gather output, which one shard does not need."""
    return unit.gather_bytes if unit.sizes.shard > 1 else 0


def kept_gathered(unit: PlannedUnit) -> int:
    """Bytes that stay gathered from a unit's forward to its backward."""
    if isinstance(unit.reshard, bool):
        return 0 if unit.reshard else unit.gather_bytes
    return unit.gather_bytes // unit.reshard


def _forward_peak(plan: PlanData, saved: list[int]) -> tuple[int, int]:
    root = plan.units[-1]
    kept = root.gather_bytes
    peak, gathered, previous = kept + gather_buffer(root), kept, gather_buffer(root)
    for i, unit in enumerate(plan.units[:-1]):
        before = saved[i - 1] if i else 0
        own = unit.gather_bytes
        copy_out = kept + previous + gather_buffer(unit) + own + before
        compute = kept + gather_buffer(unit) + own + saved[i]
        peak = max(peak, copy_out, compute)
        gathered = max(gathered, kept + own)
        kept += kept_gathered(unit)
        previous = gather_buffer(unit)
    return max(peak, kept + previous + saved[-1]), gathered


def _backward_peak(
    plan: PlanData, saved: list[int], largest: list[int], microbatches: int, keep: Accumulate
) -> tuple[int, int]:
    """Most bytes until the first unit's backward, and from then on."""
    units = plan.units[:-1]
    root = plan.units[-1]
    # The root's parameters and full gradients live from the start of backward to its end.
    kept = root.gather_bytes + full_grads(root) + sum(kept_gathered(u) for u in units)
    # Gradients of earlier microbatches. Sharded ones take this microbatch's in; whole ones go as they are reduced.
    whole = keep in ("unsharded", "zero1")
    staying = _no_grads if plan.policy.offload is not None else _sharded_grads
    earlier = _accumulated_grads if whole else staying
    accumulated = sum(earlier(u) for u in plan.units) if microbatches > 1 else 0
    in_flight: deque[int] = deque(maxlen=plan.policy.comm.reduce_scatter_buffers)  # inputs of reductions
    done, peak, last = accumulated, accumulated + kept + saved[-1] + 2 * largest[-1], 0
    for i in range(len(units) - 1, -1, -1):
        unit = units[i]
        kept -= kept_gathered(unit)
        ahead = gather_buffer(units[i - 1]) if i and units[i - 1].reshard is not False else 0
        compute = kept + unit.gather_bytes + ahead + full_grads(unit) + saved[i]
        # At the largest operator, the gradients of its output and of its input are alive together.
        compute += 2 * largest[i]
        own = unit.reduce_numel * unit.reduce_dtype.itemsize
        new = 0 if accumulated and whole else full_grads(unit)
        reduce = kept + ahead + new + own + _sharded_grads(unit) + (saved[i - 1] if i else 0)
        reducing = sum(in_flight)
        reduce += _waited_for(in_flight)
        # A microbatch before the last, which reduces nothing if gradients are kept whole; then the last.
        most = max(accumulated + compute, done + compute + reducing, done + reduce)
        peak, last = (max(peak, most), 0) if i else (peak, most)
        done += staying(unit) - (earlier(unit) if accumulated else 0)
        in_flight.append(own)
    own = root.reduce_numel * root.reduce_dtype.itemsize
    return peak, max(last, done + full_grads(root) + own + _sharded_grads(root) + _waited_for(in_flight))


def _waited_for(in_flight: deque[int]) -> int:
    """Bytes that stay when the next unit copies its gradients: if no buffer is free, it waits for the oldest one."""
    return sum(in_flight) - (in_flight[0] if len(in_flight) == in_flight.maxlen else 0)


def full_grads(unit: PlannedUnit) -> int:
    return sum(p.numel for p in unit.params if p.trainable) * unit.param_dtype.itemsize


def _accumulated_grads(unit: PlannedUnit) -> int:
    """Whole gradients between microbatches: torch keeps them in the dtype of the reduction."""
    return sum(p.numel for p in unit.params if p.trainable) * unit.reduce_dtype.itemsize


def _sharded_grads(unit: PlannedUnit) -> int:
    return _local(unit, unit.shard_numel(trainable_only=True))


def _no_grads(_: PlannedUnit) -> int:
    """Of shards that the host keeps."""
    return 0
