"""From meta parameters to initialised shards: the same weights for any number of ranks, mode and wrapping order.

Each parameter is filled at its full size with a generator seeded from (seed, FQN), then this rank's part of it is
kept. Nothing depends on ranks, on the order of parameters, or on whether FSDP came before. Buffers are computed by
their modules, in full. Cost: every rank draws every parameter; one full parameter in memory at a time; no
communication.

Limits: the CPU and CUDA generators draw different numbers, so weights are the same across runs on one device type.
"""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from titan_fsdp.loaded import is_dtensor
from titan_fsdp.names import clean_fqn, named_parameters, tied_groups, unwrap
from titan_fsdp.torch_private import split_factor
from titan_fsdp.weights.buffers import meta_tables
from titan_fsdp.weights.conventions import Init, conventional_init

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device | str,
    init: Init | None,
    seed: int = 0,
    *,
    skip: Callable[[str], bool] | None = None,
    buffer_device: torch.device | str | None = None,
) -> nn.Module:
    """Allocate ``model`` on ``device``, initialise every parameter, and compute every buffer that was on meta.

    Works before or after wrapping, in every mode, and without a process group. A buffer on meta gets the value that
    its module computes: see `titan_fsdp.weights.buffers`. A buffer that is not on meta keeps its value.

    Args:
        model: The model; changed in place. Parameters on meta or real; real ones are initialised anew.
        device: Where the parameters go. With CPU offload, ``"cpu"``.
        init: ``init(fqn, tensor, generator)`` fills the full plain tensor of parameter ``fqn`` in place; tied
            parameters are filled once, under their first name. It is never given a buffer. None: the model's own
            methods, see `conventional_init`.
        seed: Seed of all weights.
        skip: Whether the parameter of that FQN gets its value from elsewhere, such as a checkpoint: it is allocated and
            not filled, so that no full tensor of it is made.
        buffer_device: Where buffers go and weights are drawn; None is ``device``. With CPU offload, the device that
            computes: FSDP brings it the parameters, and nothing else. Weights are then those of a run without offload.

    Returns:
        ``model``.

    Raises:
        ValueError: ``init`` is None and a parameter is filled by no method of the model; the value of a buffer on
            meta is unknown; or the device is meta. Nothing has been allocated then.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("materialize(device='meta') would allocate nothing. Give the device to train on.")
    inner = unwrap(model)
    if init is None:
        init = conventional_init(inner)
    tables = meta_tables(inner, lambda path: _seed_of(path, seed))
    tied = tied_groups(inner)
    beside = device if buffer_device is None else torch.device(buffer_device)
    _allocate(inner, device, beside)
    _retie(inner, tied)
    for name, parameter in named_parameters(inner):
        if skip is not None and skip(name):
            continue
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=beside)
        init(name, full, generator_for(name, beside, seed))
        copy_full(parameter, full)
    for table in tables:
        table.write(beside)
    return model


def generator_for(name: str, device: torch.device, seed: int) -> torch.Generator:
    """A generator whose seed is a hash of (seed, name)."""
    return torch.Generator(device=device).manual_seed(_seed_of(name, seed))


def copy_full(target: Tensor, full: Tensor) -> None:
    """Copy this rank's part of ``full`` (global shape, plain) into ``target``, a DTensor or a plain tensor."""
    if not is_dtensor(target):
        target.copy_(full)
        return
    target.to_local().copy_(_local_part(full, target))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes signed 64-bit seeds


def _local_part(full: Tensor, target: "DTensor") -> Tensor:
    from torch.distributed.tensor import Shard

    coordinate = target.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds no part of the model"
    # FSDP over tensor parallelism splits what tensor parallelism left: those placements come after the others.
    axes = sorted(range(len(target.placements)), key=lambda axis: split_factor(target.placements[axis]) > 1)
    part = full
    for axis in axes:
        placement = target.placements[axis]
        if isinstance(placement, Shard) or split_factor(placement) > 1:
            dim = int(placement.dim)  # pyright: ignore[reportAttributeAccessIssue]
            part = _chunk(part, target.device_mesh.size(axis), coordinate[axis], dim)
    return part


def _chunk(tensor: Tensor, count: int, index: int, dim: int) -> Tensor:
    """Chunk ``index`` as torch.chunk cuts, empty where it has none."""
    size = tensor.size(dim)
    rows = -(-size // count)
    start = min(index * rows, size)
    return tensor.narrow(dim, start, min(rows, size - start))


def _allocate(model: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    real = [(module, leaf, b) for module, leaf, b in _buffers(model) if not b.is_meta]
    if any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        model.to_empty(device=device)
    else:
        model.to(device)
    for module, leaf, buffer in _buffers(model):
        module._buffers[leaf] = buffer.to(buffer_device)
    # Both give each module its own: what several share, such as a table of all blocks, is one tensor again.
    moved: dict[int, Tensor] = {}
    for module, leaf, buffer in real:
        if id(buffer) not in moved:
            moved[id(buffer)] = buffer.to(buffer_device)
        module._buffers[leaf] = moved[id(buffer)]


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every buffer with its module and its name there; one that several modules share comes with each of them."""
    return [(module, leaf, b) for module in model.modules() for leaf, b in module._buffers.items() if b is not None]


def _retie(model: nn.Module, tied: list[list[str]]) -> None:
    """``to_empty`` gives each name of a tied parameter its own tensor: point them at the first again."""
    paths = {clean_fqn(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    for names in tied:
        first = model.get_parameter(paths[names[0]])
        for name in names[1:]:
            parent, _, leaf = paths[name].rpartition(".")
            setattr(model.get_submodule(parent), leaf, first)
            assert model.get_parameter(paths[name]) is first, f"{name} lost its tie to {names[0]}"
