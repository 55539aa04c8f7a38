"""Float8 all-gather for FSDP2: `apply_float8_all_gather` before ``fully_shard``; the scales that span ranks."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_fp8.convert.convert import count_uses
from titan_fp8.convert.patterns import clean_fqn
from titan_fp8.layers.linear import Float8Linear
from titan_fp8.weights.sharded import ShardedWeight, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def apply_float8_all_gather(model: nn.Module) -> list[str]:
    """Have FSDP2 gather the weights of float8 layers in float8: half the bytes of bfloat16.

    Call it once, after tensor parallelism and before ``fully_shard``. Each weight becomes a parameter of a tensor
    subclass that carries FSDP2's hooks; name, shape, dtype and memory stay. State dicts hold plain tensors as before.

    Args:
        model: Converted by `convert_to_float8`. Works on the meta device.

    Returns:
        Names of the weights that will be gathered in float8. Not among them: layers converted with
        ``fsdp_all_gather=False``, or with a recipe that cannot, and weights that are DTensors or that modules share.
    """
    names: list[str] = []
    uses = count_uses(model)
    for name, module in model.named_modules():
        if not isinstance(module, Float8Linear) or not module.fsdp_all_gather:
            continue
        if type(module.weight) is not nn.Parameter or is_dtensor(module.weight) or uses[id(module.weight)] > 1:
            continue
        wrapped = ShardedWeight(module.weight.detach(), module.recipe.w)
        module.weight = nn.Parameter(wrapped, requires_grad=module.weight.requires_grad)
        names.append(f"{clean_fqn(name)}.weight" if name else "weight")
    return names


def sharded_weights(layers: Iterable[Float8Linear]) -> list[tuple[Float8Linear, ShardedWeight, "DTensor"]]:
    """The layers whose weights FSDP2 gathers in float8 and has sharded now; this rank's shard; the whole weight."""
    found: list[tuple[Float8Linear, ShardedWeight, DTensor]] = []
    for layer in layers:
        weight = layer.weight
        if is_dtensor(weight) and isinstance(weight._local_tensor, ShardedWeight):
            found.append((layer, weight._local_tensor, weight))
    return found


@torch.no_grad()
def sync_scales(weights: Iterable[tuple[Float8Linear, ShardedWeight, "DTensor"]]) -> int:
    """Find the scales that span ranks, of all these weights, in one all-reduce for each process group.

    Args:
        weights: From `sharded_weights`, their caches open.

    Returns:
        Number of all-reduces made: 0 if no scale spans ranks.
    """
    pending: dict[dist.ProcessGroup, list[tuple[Float8Linear, Tensor]]] = {}
    for layer, local, weight in weights:
        shape = (weight.shape[0], weight.shape[1])
        mesh = shard_mesh(weight)
        if local.needs_amax(shape, mesh.size()):
            amax = local.local_amax(shape, mesh.size(), mesh.get_local_rank())
            amax = amax.to(mesh.device_type)  # an offloaded shard is in host memory
            pending.setdefault(mesh.get_group(), []).append((layer, amax))
    for group, entries in pending.items():
        flat = torch.cat([amax.reshape(-1) for _, amax in entries])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
        parts = flat.split([amax.numel() for _, amax in entries])
        for (layer, amax), part in zip(entries, parts, strict=True):
            layer.shard_cache.amax = part.view(amax.shape)
    return len(pending)


def shard_mesh(weight: "DTensor") -> DeviceMesh:
    """The one mesh axis that FSDP2 cuts a weight over (the last; before it may be replicas)."""
    mesh = weight.device_mesh
    if mesh.ndim == 1:
        return mesh
    names = cast("tuple[str, ...]", mesh.mesh_dim_names)
    return mesh[names[-1]]
