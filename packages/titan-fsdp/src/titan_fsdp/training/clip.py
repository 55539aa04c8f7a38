"""The global gradient norm of a model whose parameters lie on different meshes, and clipping by it.

torch's clip stacks norms, which needs every gradient on one mesh; FSDP × TP with norms that tensor parallelism leaves
alone, or experts on their own mesh, break that. Here each rank takes the p-norms of its local shards, grouped by which
process groups split them; every group's sum of p-th powers is summed over exactly those groups, so a replicated
gradient counts once; then pipeline stages are summed. One small all-reduce for each distinct set of splits.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titan_fsdp.loaded import compute_device
from titan_fsdp.torch_private import split_factor

Split = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    params: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    pp_group: dist.ProcessGroup | None = None,
    sharded_over: Sequence[tuple[Iterable[Tensor], dist.ProcessGroup]] = (),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``; return the norm before.

    Every rank that holds part of the model must call it, with parameters in the same order.

    Args:
        params: Parameters (tied ones count once); those without gradient are skipped.
        max_norm: The bound; ``math.inf`` only measures.
        norm_type: p of the p-norm; ``math.inf`` for the largest magnitude.
        pp_group: The pipeline group: stages hold different parameters, whose norms are added.
        sharded_over: ``(parameters, group)`` pairs for parameters that are plain local slices of something split
            over ``group`` (expert or tensor parallelism without DTensor), in addition to their own mesh.
        error_if_nonfinite: Raise if the norm is NaN or infinite, on every rank alike.

    Returns:
        The global norm, a 0-dimensional float32 tensor, the same on every rank.

    Raises:
        ValueError: ``max_norm`` is negative or ``norm_type`` not positive.
        RuntimeError: The norm is not finite and ``error_if_nonfinite``.
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(f"max_norm={max_norm}, norm_type={norm_type}: use a bound of at least 0 and a positive p.")
    parameters = list({id(p): p for p in ([params] if isinstance(params, Tensor) else params)}.values())
    extra: dict[int, Split] = {}
    for members, group in sharded_over:
        for p in members:
            extra[id(p)] = (*extra.get(id(p), ()), group)
    buckets: dict[Split, list[Tensor]] = {}
    local: list[Tensor] = []
    for p in parameters:
        split = (*_split_of(p), *extra.get(id(p), ()))
        # Ranks must agree on the buckets, so a parameter opens its bucket whether or not it has a gradient here.
        bucket = buckets.setdefault(split, [])
        if p.grad is not None:
            grad = _whole(p)
            bucket.append(grad)
            local.append(grad)
    device = _device(parameters)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for split, grads in buckets.items():
        power = _power(grads, norm_type, device)
        for group in split:
            _reduce(power, norm_type, group)
        total = torch.maximum(total, power) if math.isinf(norm_type) else total + power
    if pp_group is not None:
        _reduce(total, norm_type, pp_group)
    norm = total if math.isinf(norm_type) else total.pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"the gradient norm of order {norm_type} is {float(norm)}: gradients hold NaN or infinity.")
    if local and not math.isinf(max_norm):
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for dtype_grads in _by_device_and_dtype(local):
            torch._foreach_mul_(dtype_grads, factor.to(dtype_grads[0].device))  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _split_of(parameter: Tensor) -> Split:
    """The process groups whose ranks hold different parts of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if (isinstance(placement, Shard) or split_factor(placement) > 1) and mesh.size(axis) > 1
    )


def _whole(parameter: Tensor) -> Tensor:
    """The local part of the gradient, laid out as the parameter; a partial sum is reduced first, and stored."""
    grad = parameter.grad
    assert grad is not None
    if not isinstance(grad, DTensor):
        return grad
    if isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
        parameter.grad = grad
    elif any(isinstance(placement, Partial) for placement in grad.placements):
        grad = grad.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in grad.placements])
        parameter.grad = grad
    return grad.to_local()


def _power(grads: list[Tensor], p: float, device: torch.device) -> Tensor:
    """Sum of p-th powers of magnitudes (or their maximum), float32."""
    result = torch.zeros((), dtype=torch.float32, device=device)
    for group in _by_device_and_dtype([g for g in grads if g.numel()]):
        wide = torch.promote_types(group[0].dtype, torch.float32)  # float64 and complex as they are
        each = torch._foreach_norm(group, p, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
        norms = torch.stack(each).to(device, torch.float32)
        result = torch.maximum(result, norms.max()) if math.isinf(p) else result + norms.pow(p).sum()
    return result


def _reduce(value: Tensor, p: float, group: dist.ProcessGroup) -> None:
    dist.all_reduce(value, op=dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group=group)


def _by_device_and_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _device(parameters: Sequence[Tensor]) -> torch.device:
    """Where to reduce: the mesh's device, which a gradient offloaded to the CPU is not on."""
    sharded = next((p for p in parameters if isinstance(p, DTensor)), None)
    if sharded is not None:
        return compute_device(sharded)
    return parameters[0].device if parameters else torch.device("cpu")
