"""Optimizer state by parameter name, independent of the order of parameters and of the layout.

An optimizer numbers its parameters, and another layout numbers them in another way. So state is stored as
``<parameter name>/<state name>``, and the settings of a group are found by the names of its parameters.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from titan_ckpt.format.index import Index
from titan_ckpt.state.dtypes import DTYPES
from titan_ckpt.state.sharding import LocalShard, is_dtensor

# Which kernel steps is this process's choice, not the run's: fused ones do not take every layout or device.
_OWN = ("params", "param_names", "fused", "foreach", "capturable")


@dataclass(frozen=True, slots=True)
class OptimState:
    """An optimizer's state by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """``<parameter>/<state>`` to tensor."""
    leaves: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Parameter to its state that is not a tensor."""
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Per group: ``hyper`` (settings) and ``params`` (names)."""
    others: list[dict[Any, Any]] = field(default_factory=list[dict[Any, Any]])
    """Per optimizer: state that belongs to no parameter."""


class _Param(NamedTuple):
    """A parameter of an optimizer."""

    name: str
    tensor: Tensor
    optim: Optimizer


def optim_state(optims: Iterable[Optimizer], owners: Mapping[int, str]) -> OptimState:
    """Collect the state of optimizers; ``owners`` has the name of each of the model's parameters by ``id``.

    Raises:
        ValueError: If a parameter is not in the model or has two optimizers, the name of a state contains a slash, or there is
            state of a tensor that is in no group.
    """
    optims, found, seen = list(optims), OptimState(), set[int]()
    for group, params in _groups(optims, owners):
        hyper = {key: value for key, value in group.items() if key not in _OWN}
        found.groups.append({"hyper": hyper, "params": [param.name for param in params]})
        for name, param, optim in params:
            if id(param) in seen:
                raise ValueError(
                    f"{name!r} belongs to two optimizers, whose states would get the same name. Remove it from one of them."
                )
            seen.add(id(param))
            for key, value in optim.state.get(param, {}).items():
                if not isinstance(key, str) or "/" in key:
                    raise ValueError(f"optimizer state of {name!r} has the name {key!r}. Use a string without '/'.")
                if isinstance(value, Tensor):
                    found.tensors[f"{name}/{key}"] = _laid_out(value, param)
                else:
                    found.leaves.setdefault(name, {})[key] = value
    for optim in optims:
        state: dict[Any, Any] = dict(optim.state)  # typed as if all keys were parameters
        stray = next((k for k, value in state.items() if isinstance(k, Tensor) and id(k) not in seen and value), None)
        if stray is not None:
            raise ValueError(
                f"{type(optim).__name__} holds state of a tensor of shape {list(stray.shape)} that is in none of its groups, so "
                "it has no name to be found by. Key the state by a parameter or by a string, or delete it from optimizer.state."
            )
        found.others.append(_of_no_parameter(state))
    return found


def merge_groups(ranks: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The encoded groups of all ranks. Groups with equal settings are joined."""
    merged: dict[str, tuple[Any, dict[str, None]]] = {}
    for groups in ranks:
        for group in groups:
            text = json.dumps(group["hyper"], sort_keys=True)
            merged.setdefault(text, (group["hyper"], {}))[1].update(dict.fromkeys(group["params"]))
    return [{"hyper": hyper, "params": list(params)} for hyper, params in merged.values()]


class OptimRestore:
    """Restores optimizers in two phases: it lists the tensors to fill, and puts them in place once they are filled.

    Args:
        optims: The optimizers to fill.
        owners: ``id`` of each parameter to its name.
        index: The step's index.
        saved: ``{"groups", "leaves", "others"}``, decoded from the step.
        shards: As `TrainState.shards`.
        place: Puts the tensors in decoded state where they belong: ``place(value, the present one, its parameter)``; for state
            of no parameter, the last is a tensor on the device of the first one.
        stored_dtypes: Parameter to the dtype it was saved in.
        strict: Refuse parameters without saved settings. False keeps their current state, and gives moments that had
            their parameter's dtype the dtype that it has now.
        own_settings: As `TrainState.own_settings`.
        keys: As `TrainState.optim_keys`.

    Raises:
        ValueError: If a parameter has no saved settings, a group joins parameters with different saved settings, or the
            layout of a state is unknown.
    """

    def __init__(
        self,
        optims: list[Optimizer],
        owners: Mapping[int, str],
        index: Index,
        saved: Mapping[str, Any],
        shards: Mapping[str, LocalShard],
        *,
        place: Callable[[Any, Any, Tensor | None], Any],
        stored_dtypes: Mapping[str, torch.dtype],
        strict: bool,
        own_settings: bool | Collection[str] = False,
        keys: Collection[str] | None = None,
    ) -> None:
        self.targets: dict[str, tuple[str, Tensor]] = {}
        """Key in the ``optim`` section to the tensor to fill, after its key here: a tied parameter may have another name."""
        self.used: set[str] = set()
        """Saved parameters that the optimizers have."""
        self.names: set[str] = set()
        """Parameters of the optimizers."""
        self.unknown: list[str] = []
        """Parameters of the optimizers without saved settings."""
        self._index, self._saved, self._shards = index, saved, shards
        self._place = place
        self._stored_dtypes, self._strict = stored_dtypes, strict
        self._own_settings = own_settings
        self._hypers: dict[str, dict[str, Any]] = {}
        """Parameter to the saved settings of its group that are restored."""
        stays = () if isinstance(own_settings, bool) else own_settings
        for group in saved["groups"]:
            hyper = {key: value for key, value in group["hyper"].items() if key not in stays}
            self._hypers |= dict.fromkeys(group["params"], hyper)
        self._keys = keys
        self._stored: dict[str, list[str]] = {}
        for key in index.tensors.get("optim", {}):
            param_name, _, state_name = key.rpartition("/")
            if keys is None or state_name in keys:
                self._stored.setdefault(param_name, []).append(state_name)
        self._finish: list[Callable[[], Any]] = []
        for optim, others in zip(optims, saved.get("others", []) if keys is None else [], strict=False):
            devices = (param.device for group in optim.param_groups for param in group["params"])
            # A parameter itself would give its layout too.
            near = next((torch.empty(0, device=device) for device in devices), None)
            new = place(others, _of_no_parameter(optim.state), near)
            self._finish.append(lambda optim=optim, new=new: optim.state.update(new))
        for group, params in _groups(optims, owners):
            self._match_group(group, params)

    def finish(self) -> None:
        """Put the filled tensors and the settings in place."""
        for step in self._finish:
            step()

    def _match_group(self, group: dict[str, Any], params: list[_Param]) -> None:
        names = {param.name: self._stored_name(param.name) for param in params}
        self.names.update(names)
        unknown = [name for name, old in names.items() if old not in self._hypers]
        if unknown and self._strict and not self._own_settings:
            raise ValueError(
                f"the step has no optimizer state for {unknown[:4]} ({len(unknown)} parameters in all): they were not "
                "given to the optimizer when it was saved. Give the optimizer the same parameters, or pass strict=False "
                "to start with new state for them."
            )
        self.unknown += unknown
        known = [param for param in params if names[param.name] in self._hypers]
        keeps_all = self._own_settings is True or self._keys is not None
        found = [] if keeps_all else [self._hypers[names[param.name]] for param in known]
        if not all(_equal(hyper, found[0]) for hyper in found):
            raise ValueError(
                f"a parameter group joins parameters that had different settings when saved, {list(names)[:4]} "
                "among them. Build the optimizer with the groups it was saved with."
            )
        if found:
            self._finish.append(lambda: _set_hyper(group, found[0]))
        for param in known:
            self.used.add(names[param.name])
            self._match_param(param, names[param.name], group)

    def _match_param(self, param: _Param, old: str, group: Mapping[str, Any]) -> None:
        """Find a tensor to fill for each state of a parameter that was saved as ``old``."""
        saved: dict[str, Any] = self._saved["leaves"].get(old, {}) if self._keys is None else {}
        state: dict[str, Any] = self._place(saved, param.optim.state.get(param.tensor), param.tensor)
        for key in self._stored.get(old, []):
            stored = self._index.tensors["optim"][f"{old}/{key}"]
            dtype = DTYPES[stored.dtype]
            if not self._strict and dtype == self._stored_dtypes.get(old) and dtype.is_floating_point:
                dtype = param.tensor.dtype
            state[key] = _target(param, key, group, stored.shape, dtype, self._shards.get(param.name))
            target = _laid_out(state[key], param.tensor)
            _, filled = self.targets.setdefault(f"{old}/{key}", (f"{param.name}/{key}", target))
            if filled is not target:  # two parameters, but one tied weight in the step
                self._finish.append(lambda target=target, filled=filled: target.copy_(filled))

        def put() -> None:
            present = {} if self._keys is None else param.optim.state.get(param.tensor, {})
            if state or param.tensor in param.optim.state:
                param.optim.state[param.tensor] = {**present, **state}

        self._finish.append(put)

    def _stored_name(self, name: str) -> str:
        """The name a parameter was saved under: its own, or that of a tied one."""
        tied = self._index.tied
        canonical = tied.get(name, name)
        aliases = (alias for alias, first in tied.items() if first == canonical)
        return next((alias for alias in (name, canonical, *aliases) if alias in self._hypers), name)


def _groups(optims: Iterable[Optimizer], owners: Mapping[int, str]) -> Iterator[tuple[dict[str, Any], list[_Param]]]:
    for optim in optims:
        for number, group in enumerate(optim.param_groups):
            strangers = [i for i, param in enumerate(group["params"]) if id(param) not in owners]
            if strangers:
                raise ValueError(
                    f"parameter {strangers[0]} of group {number} of {type(optim).__name__} is not a parameter of the "
                    "model in TrainState. Build the optimizer after wrapping the model, and pass that model."
                )
            yield group, [_Param(owners[id(param)], param, optim) for param in group["params"]]


def _of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _laid_out(value: Tensor, param: Tensor) -> Tensor:
    """State that an optimizer keeps as a plain tensor for a `DTensor` parameter, in the parameter's layout."""
    if not is_dtensor(param) or is_dtensor(value):
        return value
    part: Any = param.detach()
    local = tuple(part.to_local().shape)
    if tuple(value.shape) != local or local == tuple(param.shape):
        return value
    mesh, placements = param.device_mesh, param.placements
    return type(param).from_local(value, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def _target(
    owner: _Param,
    key: str,
    group: Mapping[str, Any],
    stored: tuple[int, ...],
    dtype: torch.dtype,
    shard: LocalShard | None,
) -> Tensor:
    """The tensor for state ``key`` of a parameter: the present one if it fits, else a new one.

    ``stored`` is the saved shape.
    """
    param = owner.tensor
    present = owner.optim.state.get(param, {}).get(key)
    like_param = stored == (tuple(param.shape) if shard is None else shard.shape)
    shape = tuple(param.shape) if like_param else stored
    if shard is not None and not like_param and isinstance(present, Tensor):
        here = tuple(_laid_out(present, param).shape)
        place = shard.of_state(here, tuple(param.shape))
        shape = here if place is not None and place.shape == stored else stored
    if isinstance(present, Tensor) and tuple(_laid_out(present, param).shape) == shape and present.dtype == dtype:
        return present
    if key == "step":  # a counter, on the device only if the optimizer reads it there
        device = param.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        return torch.zeros(stored, dtype=dtype, device=device)
    if like_param:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    whole = tuple(param.shape) if shard is None else shard.shape
    if len(stored) == len(whole) and all(n == w or (n and not w % n) for n, w in zip(stored, whole, strict=True)):
        return _by_block(
            param, [w if n == 1 else w // max(n, 1) for n, w in zip(stored, whole, strict=True)], whole, dtype
        )
    if is_dtensor(param) and stored:
        raise ValueError(
            f"optimizer state {key!r} of {owner.name!r} has shape {list(stored)}, unlike its parameter's "
            f"{list(param.shape)}: how it is sharded is not known yet. Take one optimizer step, then restore."
        )
    return torch.zeros(stored, dtype=dtype, device=param.device)


def _by_block(param: Tensor, blocks: Sequence[int], whole: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in the layout of a parameter, with one value for so many elements of each dimension; for all: one on every rank."""
    reduced = [block == w > 1 for block, w in zip(blocks, whole, strict=True)]

    def shape(sizes: torch.Size) -> torch.Size:
        return torch.Size(1 if one else n // b for n, one, b in zip(sizes, reduced, blocks, strict=True))

    if not is_dtensor(param):
        return torch.zeros(shape(param.shape), dtype=dtype, device=param.device)
    from torch.distributed.tensor import Replicate  # seconds, where nothing is sharded

    part: Any = param.detach()
    local = torch.zeros(shape(part.to_local().shape), dtype=dtype, device=param.device)
    cut = [getattr(placement, "dim", None) for placement in part.placements]
    placements = [
        Replicate() if dim is not None and reduced[dim] else placement
        for dim, placement in zip(cut, part.placements, strict=True)
    ]
    size = shape(param.shape)
    stride = torch.empty(size, device="meta").stride()
    return type(part).from_local(local, part.device_mesh, placements, run_check=False, shape=size, stride=stride)


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one is other:  # those of one saved group are
        return True
    pairs: list[tuple[Any, Any]] = [(value, other.get(key)) for key, value in one.items()]
    return len(one) == len(other) and all(
        type(a) is type(b) and (torch.equal(a, b) if isinstance(a, Tensor) else a == b) for a, b in pairs
    )


def _set_hyper(group: dict[str, Any], hyper: Mapping[str, Any]) -> None:
    for key, value in hyper.items():
        if key in _OWN:  # of an older step
            continue
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value) if not isinstance(value, Tensor) else group[key].copy_(value)
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value  # several groups may get it
