"""Which parameters form which unit, in which dtype, on which dim: the decisions behind `titan_fsdp.plan`."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_fsdp.loaded import is_dtensor
from titan_fsdp.names import expand, matches, named_modules, named_parameters
from titan_fsdp.planning.data import PlannedParam, PlannedUnit, Sizes
from titan_fsdp.planning.policy import Policy, Reshard, Unit
from titan_fsdp.planning.units import FEWEST_UNITS, Group, owner

MeshOrSizes = DeviceMesh | Mapping[str, int]


def sizes_of(mesh: MeshOrSizes, mode: str | None) -> Sizes:
    """Shard and replicate sizes of a mesh or mapping, checked against the mode (None: any)."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim == 1:
            sizes = Sizes(replicate=mesh.size()) if mode == "ddp" else Sizes(shard=mesh.size())
        elif mesh.ndim == 2:
            sizes = Sizes(replicate=mesh.size(0), shard=mesh.size(1), replicated=True)
        else:
            raise ValueError(
                f"the mesh has {mesh.ndim} axes; give the 1-D data-parallel one or 2-D (replicate, shard)."
            )
        if mode == "hsdp" and mesh.ndim != 2:
            raise ValueError(
                "mode='hsdp' needs a 2-D mesh (replicate, shard), got a 1-D one. Use mode='fsdp' or slice two."
            )
        if mode in ("fsdp", "ddp") and mesh.ndim != 1:
            raise ValueError(
                f"mode={mode!r} needs a 1-D mesh, got 2-D {tuple(mesh.shape)}. Use mode='hsdp' or slice one axis."
            )
        return sizes
    unknown = set(mesh) - {"shard", "replicate"}
    if unknown:
        raise ValueError(
            f"sizes name {', '.join(sorted(unknown))}; only 'shard' and 'replicate' are data-parallel sizes."
        )
    sizes = Sizes(**mesh, replicated=mode == "hsdp" or (mode is None and "replicate" in mesh))
    for name, size in mesh.items():
        if size < 1:
            raise ValueError(f"sizes[{name!r}]={size} is not a number of ranks. Use 1 or more.")
    if mode == "ddp" and sizes.shard > 1:
        raise ValueError(f"mode='ddp' with shard={sizes.shard}: ddp replicates. Use {{'replicate': …}} or mode='hsdp'.")
    if mode == "fsdp" and sizes.replicate > 1:
        raise ValueError(f"mode='fsdp' with replicate={sizes.replicate}: use mode='hsdp' to shard and replicate.")
    return sizes


def check_tensor_parallel(model: nn.Module, mesh: MeshOrSizes) -> None:
    if not isinstance(mesh, DeviceMesh):
        return
    axes = set(mesh.mesh_dim_names or ())
    for name, parameter in named_parameters(model):
        if is_dtensor(parameter) and axes & set(parameter.device_mesh.mesh_dim_names or ()):
            raise ValueError(
                f"parameter {name!r} is already a DTensor over {parameter.device_mesh.mesh_dim_names}, which shares an "
                f"axis with the data-parallel mesh {tuple(axes)}. Tensor parallelism must use another axis."
            )


def planned_units(
    model: nn.Module, groups: list[Group], policy: Policy, sizes: Sizes, own: dict[str, Sizes]
) -> tuple[tuple[PlannedUnit, ...], tuple[str, ...]]:
    everything = [fqn for g in groups for fqn in g.fqns]
    members: dict[str | None, list[PlannedParam]] = {}
    ignored: list[str] = []
    dims = {fqn: (g.unit.shard_dim, _group_sizes(g.unit, sizes, own)) for g in groups for fqn in g.fqns}
    names: dict[int, list[str]] = {}  # of a tied parameter all
    for name, parameter in named_parameters(model, duplicates=True):
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in named_parameters(model):
        if any(matches(known, policy.ignore) for known in names[id(parameter)]):
            ignored.append(name)
            continue
        local = parameter.to_local() if is_dtensor(parameter) else parameter
        if local.ndim == 0:
            raise ValueError(f"parameter {name!r} is a scalar, which cannot be sharded. Make it 1-D: torch.zeros(1).")
        if parameter.requires_grad:
            _check_reducible(name, local)
        key = owner(name.rpartition(".")[0], everything)
        shard_dim, unit_sizes = dims.get(key or "", (0, sizes))
        dim = _shard_dim(name, tuple(local.shape), shard_dim, unit_sizes.shard)
        members.setdefault(key, []).append(
            PlannedParam(name, tuple(local.shape), local.dtype, parameter.requires_grad, dim)
        )
    last = next((g for g in reversed(groups) if g.host is None), None)
    units: list[PlannedUnit] = []
    for group in groups:
        params = tuple(p for fqn in group.fqns for p in members.get(fqn, []))
        if not params:
            continue
        # A nested float32 unit does as the unit it was taken from.
        host = group.host or group.fqns
        at_end = host == ("root",) or (last is not None and host == last.fqns)
        of_unit = _group_sizes(group.unit, sizes, own)
        reshard = _reshard(group.unit, host, group.fqns, policy, of_unit.shard, last=at_end)
        units.append(_unit(group, params, reshard, policy, of_unit))
    root = Group(("",), Unit("*"))
    reshard = _reshard(root.unit, ("root",), ("root",), policy, sizes.shard, last=True)
    units.append(_unit(root, tuple(members.get(None, [])), reshard, policy, sizes))
    for unit in units:
        _check_reshard_size(unit)
    if not policy.pp:  # in a stage, a pattern may name what another stage has
        _check_patterns(model, policy, units)
    return tuple(units), tuple(ignored)


def _check_reducible(name: str, local: torch.Tensor) -> None:
    if local.is_complex():
        raise ValueError(
            f"parameter {name!r} is {str(local.dtype).removeprefix('torch.')}, and its gradient would be reduced without its "
            "imaginary part. Keep torch.view_as_real(values) as the parameter, and take torch.view_as_complex of it in forward."
        )
    if local.numel() == 0:
        raise ValueError(
            f"parameter {name!r}, shape {tuple(local.shape)}, has no elements, so its gradient cannot be reduced. Leave it out, "
            "freeze it (requires_grad_(False)), or name it in Policy.ignore."
        )


def _group_sizes(unit: Unit, sizes: Sizes, own: dict[str, Sizes]) -> Sizes:
    if unit.mesh is None:
        return sizes
    if unit.mesh not in own:
        raise ValueError(
            f"Unit({unit.match!r}, mesh={unit.mesh!r}) names a mesh not given. Pass meshes={{{unit.mesh!r}: …}}."
        )
    return own[unit.mesh]


def _unit(
    group: Group, params: tuple[PlannedParam, ...], reshard: bool | int, policy: Policy, sizes: Sizes
) -> PlannedUnit:
    name = "+".join(group.fqns) or "root"
    dtype = torch.float32 if group.fp32 else policy.mp.param_dtype
    return PlannedUnit(name, group.fqns, params, reshard, dtype, policy.mp.reduce_dtype, sizes, group.unit.mesh)


def _shard_dim(name: str, shape: tuple[int, ...], wanted: int | str, shards: int) -> int:
    if wanted == "auto":
        if shape[0] >= shards:
            return 0
        return next((d for d, n in enumerate(shape) if n % shards == 0 and n), 0)
    dim = int(wanted)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"shard_dim={dim} does not exist in parameter {name!r} of shape {shape}. Use 'auto'.")
    dim %= len(shape)
    if dim > 0 and shape[dim] % shards:
        raise ValueError(
            f"shard_dim={dim} of parameter {name!r}, shape {shape}, is not divisible by {shards} ranks. Use 0."
        )
    return dim


def _reshard(
    unit: Unit, names: tuple[str, ...], group: tuple[str, ...], policy: Policy, shards: int, *, last: bool
) -> bool | int:
    value: Reshard = policy.reshard if unit.reshard is None else unit.reshard
    general = unit.reshard is None
    for pattern, override in policy.reshard_overrides.items():
        if any(expand(pattern, [*names, *group])):
            value, general = override, False
    if policy.mode == "ddp":
        return False
    if isinstance(value, str):
        return {"always": True, "never": False}.get(value, not (policy.pp or last))
    if isinstance(value, bool):
        return value
    if general and unit.mesh is not None and shards % value:  # it was chosen for the shards of the other units
        return True
    return {shards: True, 1: False}.get(value, value)  # as torch has it


def _check_reshard_size(unit: PlannedUnit) -> None:
    shards = unit.sizes.shard
    if not isinstance(unit.reshard, bool) and shards % unit.reshard:
        choices = [k for k in range(2, shards) if shards % k == 0]
        raise ValueError(
            f"reshard={unit.reshard} of unit {unit.name!r} must divide its {shards} shards. Use 'always' or 'never'"
            f"{f', or one of {choices}' if choices else ''}."
        )


def _check_patterns(model: nn.Module, policy: Policy, units: list[PlannedUnit]) -> None:
    """Refuse patterns that name nothing: what they should protect would not be."""
    parameters = [name for name, _ in named_parameters(model, duplicates=True)]
    modules = [name for name in named_modules(model) if name]
    for option, patterns, known in (
        ("mp.keep_fp32", policy.mp.keep_fp32, [*modules, *parameters]),
        ("ignore", policy.ignore, parameters),
    ):
        for pattern in patterns:
            if not any(matches(name, [pattern]) for name in known):
                raise ValueError(
                    f"{option}: {pattern!r} matches nothing of the model and would do nothing. Its names are "
                    f"{', '.join(known[:8])}, …; a pattern matches a whole name, and * any part of it."
                )
    names = [fqn or "root" for unit in units for fqn in unit.fqns]
    for pattern in policy.reshard_overrides:
        if not expand(pattern, names):
            raise ValueError(
                f"reshard_overrides[{pattern!r}] matches no unit. The units are {', '.join(names[:8])}, …."
            )


def plan_warnings(policy: Policy, units: tuple[PlannedUnit, ...], sizes: Sizes) -> tuple[str, ...]:
    notes: list[str] = []
    total = sum(u.numel for u in units)
    if len(units) == 1 and sizes.total > 1:
        notes.append("no repeated block was found: the whole model is gathered at once. Name units to save memory.")
    large = [u for u in units if len(units) > 1 and u.numel * FEWEST_UNITS > total and sizes.total > 1]
    if large:
        shares = ", ".join(f"{u.name} ({u.numel / total:.0%})" for u in large)
        notes.append(
            f"more than a fifth of the parameters are gathered at once in {shares}. Name smaller units to save memory; "
            "a tied weight stays in the root."
        )
    for unit in units:
        for p in unit.params:
            if 0 < p.shape[p.shard_dim] < unit.sizes.shard and p.numel > 1024:
                notes.append(
                    f"{p.fqn} has {p.shape[p.shard_dim]} rows for {unit.sizes.shard} ranks: some hold nothing. "
                    "Use Unit(…, shard_dim='auto')."
                )
    if policy.mode == "hsdp" and sizes.replicate == 1:
        notes.append("hsdp with one replica: mode='fsdp' does the same without the all-reduce.")
    return tuple(notes)
