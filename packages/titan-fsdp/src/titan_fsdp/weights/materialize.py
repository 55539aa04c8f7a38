"""From meta parameters to initialised shards: the same weights for any number of ranks, mode and wrapping order.

Each parameter is filled at its full size with a generator seeded from (seed, FQN), then this rank's part of it is
kept. Nothing depends on ranks, on the order of parameters, or on whether FSDP came before. Cost: every rank draws
every parameter; one full parameter in memory at a time; no communication.

Limits: the CPU and CUDA generators draw different numbers, so weights are the same across runs on one device type.
"""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titan_fsdp.names import clean_fqn, named_parameters, tied_groups, unwrap
from titan_fsdp.torch_private import original_class, split_factor

Init = Callable[[str, Tensor, torch.Generator], None]
"""Fills the full tensor of that FQN, in place, drawing only from the generator."""


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device | str, init: Init | None, seed: int = 0) -> nn.Module:
    """Allocate ``model`` on ``device`` and initialise every parameter, and every buffer that was on meta.

    Works before or after wrapping, in every mode, and without a process group.

    Args:
        model: The model; changed in place. Parameters on meta or real; real ones are initialised anew.
        device: Where the parameters go. With CPU offload, ``"cpu"``.
        init: ``init(fqn, tensor, generator)`` fills the full plain tensor of parameter or buffer ``fqn`` in place;
            tied parameters are filled once, under their first name. None: torch's convention, each submodule's
            ``reset_parameters()``, on full-size copies, with the random state seeded from (seed, FQN).
        seed: Seed of all weights.

    Returns:
        ``model``.

    Raises:
        ValueError: ``init`` is None and a module with parameters, or with buffers on meta, has no
            ``reset_parameters``; or the device is meta.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("materialize(device='meta') would allocate nothing. Give the device to train on.")
    inner = unwrap(model)
    if init is None:
        _check_convention(inner)
    tied = tied_groups(inner)
    on_meta = {clean_fqn(name) for name, b in inner.named_buffers() if b.is_meta}
    _allocate(inner, device)
    _retie(inner, tied)
    if init is not None:
        _fill(inner, device, init, seed, on_meta)
    else:
        _reset(inner, device, seed, on_meta)
    return model


def generator_for(name: str, device: torch.device, seed: int) -> torch.Generator:
    """A generator whose seed is a hash of (seed, name)."""
    return torch.Generator(device=device).manual_seed(_seed_of(name, seed))


def copy_full(target: Tensor, full: Tensor) -> None:
    """Copy this rank's part of ``full`` (global shape, plain) into ``target``, a DTensor or a plain tensor."""
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    target.to_local().copy_(_local_part(full, target))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes signed 64-bit seeds


def _local_part(full: Tensor, target: DTensor) -> Tensor:
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


def _allocate(model: nn.Module, device: torch.device) -> None:
    real = {name: b.detach().clone() for name, b in model.named_buffers() if not b.is_meta}
    if any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        model.to_empty(device=device)
        for name, buffer in model.named_buffers():
            if name in real:
                buffer.copy_(real[name])
    else:
        model.to(device)


def _retie(model: nn.Module, tied: list[list[str]]) -> None:
    """``to_empty`` gives each name of a tied parameter its own tensor: point them at the first again."""
    paths = {clean_fqn(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    for names in tied:
        first = model.get_parameter(paths[names[0]])
        for name in names[1:]:
            parent, _, leaf = paths[name].rpartition(".")
            setattr(model.get_submodule(parent), leaf, first)
            assert model.get_parameter(paths[name]) is first, f"{name} lost its tie to {names[0]}"


def _fill(model: nn.Module, device: torch.device, init: Init, seed: int, on_meta: set[str]) -> None:
    for name, parameter in named_parameters(model):
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        init(name, full, generator_for(name, device, seed))
        copy_full(parameter, full)
    for raw, buffer in model.named_buffers():
        name = clean_fqn(raw)
        if name in on_meta:
            init(name, buffer, generator_for(name, device, seed))


def _check_convention(model: nn.Module) -> None:
    for raw, module in model.named_modules():
        direct = [n for n, _ in module.named_parameters(recurse=False)]
        direct += [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
        if direct and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"module {clean_fqn(raw) or 'root'!r} ({original_class(module).__name__}) has {direct} and no "
                "reset_parameters(). Add one, or pass init=function(fqn, tensor, generator)."
            )


def _reset(model: nn.Module, device: torch.device, seed: int, on_meta: set[str]) -> None:
    """Run each module's ``reset_parameters`` on a stand-in that has full-size plain tensors."""
    filled: set[int] = set()
    for raw, module in model.named_modules():
        name = clean_fqn(raw)
        parameters = dict(module.named_parameters(recurse=False))
        buffers = dict(module.named_buffers(recurse=False))
        if not parameters and not any(_join(name, b) in on_meta for b in buffers):
            continue
        stand_in = _stand_in(module, parameters, buffers, device)
        devices = [device] if device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(_seed_of(name, seed))
            stand_in.reset_parameters()
        for leaf, parameter in parameters.items():
            if id(parameter) not in filled:  # a tied parameter keeps the values of its first name
                filled.add(id(parameter))
                copy_full(parameter, stand_in.get_parameter(leaf))
        for leaf, buffer in buffers.items():
            if _join(name, leaf) in on_meta:
                buffer.copy_(stand_in.get_buffer(leaf))


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf


def _stand_in(
    module: nn.Module, parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor], device: torch.device
) -> Any:
    stand_in: Any = object.__new__(original_class(module))
    stand_in.__dict__.update(copy.copy(module.__dict__))
    stand_in._parameters = dict(module._parameters)
    stand_in._buffers = dict(module._buffers)
    for leaf, parameter in parameters.items():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        stand_in._parameters[leaf] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    for leaf, buffer in buffers.items():
        stand_in._buffers[leaf] = buffer.clone()
    return stand_in
