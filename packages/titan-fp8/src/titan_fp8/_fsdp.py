"""Float8 all-gather for FSDP2: `apply_float8_all_gather` before ``fully_shard``, `sync_scales` after each optimizer step."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_fp8._linear import Float8Linear
from titan_fp8._patterns import clean_fqn
from titan_fp8._sharded import ShardedWeight


def apply_float8_all_gather(model: nn.Module) -> list[str]:
    """Have FSDP2 gather the weights of float8 layers in float8: half the bytes of bfloat16.

    Call it once, after tensor parallelism and before ``fully_shard``. Each weight becomes a parameter of a tensor
    subclass that carries FSDP2's hooks; name, shape, dtype and memory stay. State dicts hold plain tensors as before.

    Args:
        model: Converted by `convert_to_float8`. Works on the meta device.

    Returns:
        Names of the weights that will be gathered in float8. Not among them: layers converted with
        ``fsdp_all_gather=False``, or with a recipe that cannot, and weights that are DTensors.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, Float8Linear) or not module.fsdp_all_gather:
            continue
        if type(module.weight) is not nn.Parameter or isinstance(module.weight, DTensor):
            continue
        wrapped = ShardedWeight(module.weight.detach(), module.recipe.w)
        module.weight = nn.Parameter(wrapped, requires_grad=module.weight.requires_grad)
        names.append(f"{clean_fqn(name)}.weight" if name else "weight")
    return names


@torch.no_grad()
def sync_scales(model: nn.Module) -> int:
    """Find the scales of all float8-gathered weights in one all-reduce. Call it after ``optimizer.step()``.

    Needed for one scale a tensor, and for blocks that span ranks. Without the call each such weight makes an
    all-reduce of its own when it is gathered; with it, one carries them all.

    Args:
        model: After ``fully_shard``.

    Returns:
        Number of all-reduces made: 1 for each process group with such weights, 0 if none is needed.
    """
    pending: dict[dist.ProcessGroup, list[tuple[ShardedWeight, Tensor]]] = {}
    for module in model.modules():
        if not isinstance(module, Float8Linear) or not isinstance(module.weight, DTensor):
            continue
        weight = module.weight
        local = weight._local_tensor
        if not isinstance(local, ShardedWeight):
            continue
        shape = (weight.shape[0], weight.shape[1])
        mesh = shard_mesh(weight)
        if local.needs_amax(shape, mesh.size()):
            amax = local.local_amax(shape, mesh.size(), mesh.get_local_rank())
            pending.setdefault(mesh.get_group(), []).append((local, amax))
    for group, entries in pending.items():
        flat = torch.cat([amax.reshape(-1) for _, amax in entries])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
        parts = flat.split([amax.numel() for _, amax in entries])
        for (weight, amax), part in zip(entries, parts, strict=True):
            weight.set_amax(part.view(amax.shape))
    return len(pending)


def shard_mesh(weight: DTensor) -> DeviceMesh:
    """The one mesh axis that FSDP2 cuts a weight over (the last; before it may be replicas)."""
    mesh = weight.device_mesh
    if mesh.ndim == 1:
        return mesh
    names = cast("tuple[str, ...]", mesh.mesh_dim_names)
    return mesh[names[-1]]
