"""Optimizer state by parameter name, so that neither the order of parameters nor the layout matters.

An optimizer numbers its parameters; a pipeline split or another wrapping renumbers them. Here state is keyed
``<parameter name>/<state name>``, and a group's hyperparameters are found through its parameters' names.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.format.index import Index
from titan_ckpt.state.dtypes import DTYPES
from titan_ckpt.state.sharding import LocalShard

_NOT_HYPERPARAMETERS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class OptimState:
    """An optimizer's state by name."""

    tensors: dict[str, Tensor]
    """``<parameter>/<state>`` to tensor."""
    leaves: dict[str, dict[str, Any]]
    """Parameter to state that is not a tensor."""
    groups: list[dict[str, Any]]
    """For each group: ``hyper`` (its settings) and ``params`` (names)."""
    others: list[dict[str, Any]]
    """For each optimizer: state that belongs to no parameter."""


def optim_state(optims: Iterable[Optimizer], owners: Mapping[int, str]) -> OptimState:
    """Collect the state of one or several optimizers.

    Args:
        optims: The optimizers.
        owners: ``id`` of each parameter of the model to its name.

    Raises:
        ValueError: If a parameter is not the model's or has two optimizers, or state names contain a slash.
    """
    optims = list(optims)
    _refuse_shared(optims, owners)
    tensors: dict[str, Tensor] = {}
    leaves: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group, params in _groups(optims, owners):
        hyper = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
        groups.append({"hyper": hyper, "params": [name for name, _, _ in params]})
        for name, param, optim in params:
            for key, value in optim.state.get(param, {}).items():
                if not isinstance(key, str) or "/" in key:
                    raise ValueError(f"optimizer state of {name!r} is called {key!r}; it must be a string without '/'.")
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = _laid_out(value, param)
                else:
                    leaves.setdefault(name, {})[key] = value
    others: list[dict[str, Any]] = []
    for optim in optims:
        state: dict[Any, Any] = dict(optim.state)  # typed as if all keys were parameters
        others.append({key: value for key, value in state.items() if isinstance(key, str)})
    return OptimState(tensors, leaves, groups, others)


def merge_groups(ranks: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Groups of all ranks (encoded), those with equal settings joined."""
    merged: dict[str, tuple[Any, dict[str, None]]] = {}
    for groups in ranks:
        for group in groups:
            text = json.dumps(group["hyper"], sort_keys=True)
            merged.setdefault(text, (group["hyper"], {}))[1].update(dict.fromkeys(group["params"]))
    return [{"hyper": hyper, "params": list(params)} for hyper, params in merged.values()]


class OptimRestore:
    """Loading an optimizer in two steps: name the tensors to fill, then, once they are, put them in place.

    Args:
        optims: The optimizers to fill.
        owners: ``id`` of each parameter to its name.
        index: The step's index.
        saved: ``{"groups", "leaves"}`` as decoded from the step.
        shards: Parameter to where it lies in a larger one, for those that do.
        stored_dtypes: Parameter to the dtype it was saved in.
        strict: Refuse parameters that were not optimized when the step was saved. False leaves their state as it is,
            and gives moments that had their parameter's dtype the dtype it has now.

    Raises:
        ValueError: If a parameter was not optimized when the step was saved, a group joins parameters that had
            different settings, or a state's layout cannot be known.
    """

    def __init__(
        self,
        optims: Iterable[Optimizer],
        owners: Mapping[int, str],
        index: Index,
        saved: Mapping[str, Any],
        shards: Mapping[str, LocalShard],
        *,
        stored_dtypes: Mapping[str, torch.dtype],
        strict: bool,
    ) -> None:
        self.targets: dict[str, Tensor] = {}
        """Key in the ``optim`` section to the tensor to fill."""
        self.used: set[str] = set()
        """Saved parameters that were found here."""
        self.names: set[str] = set()
        """Parameters here."""
        self.unknown: list[str] = []
        """Parameters here that have no saved state."""
        self._finish: list[Callable[[], None]] = []
        hypers = {name: group["hyper"] for group in saved["groups"] for name in group["params"]}
        stored: dict[str, list[str]] = {}
        for key in index.tensors.get("optim", {}):
            param_name, _, state_name = key.rpartition("/")
            stored.setdefault(param_name, []).append(state_name)
        optims = list(optims)
        for optim, others in zip(optims, saved.get("others", []), strict=False):
            self._finish.append(lambda optim=optim, others=others: optim.state.update(others))
        for group, params in _groups(optims, owners):
            names = {name: _stored_name(name, hypers, index) for name, _, _ in params}
            self.names.update(names)
            unknown = [name for name, old in names.items() if old not in hypers]
            if strict:
                _check_known(unknown)
            self.unknown += unknown
            known = [(name, param, optim) for name, param, optim in params if names[name] in hypers]
            found = [hypers[names[name]] for name, _, _ in known]
            self.used.update(names[name] for name, _, _ in known)
            if any(hyper is not found[0] for hyper in found):  # those that were equal are one
                raise ValueError(
                    f"a parameter group joins parameters that had different settings when saved, {list(names)[:4]} "
                    "among them. Build the optimizer with the groups it was saved with."
                )
            if found:
                self._finish.append(lambda group=group, hyper=found[0]: _set_hyper(group, hyper))
            for name, param, optim in known:
                old = names[name]
                state: dict[str, Any] = dict(saved["leaves"].get(old, {}))
                for key in stored.get(old, []):
                    kind = index.tensors["optim"][_stored_key(index, name, key)]
                    dtype = DTYPES[kind.dtype]
                    if not strict and dtype == stored_dtypes.get(old) and dtype.is_floating_point:
                        dtype = param.dtype
                    placed = _target(optim, found[0], param, name, key, kind.shape, dtype, shards.get(name))
                    state[key] = placed
                    target = _laid_out(placed, param)
                    filled = self.targets.setdefault(f"{old}/{key}", target)
                    if filled is not target:  # two parameters here, one tied weight in the step
                        self._finish.append(lambda target=target, filled=filled: (target.copy_(filled), None)[1])
                self._finish.append(lambda optim=optim, param=param, state=state: _set_state(optim, param, state))

    def finish(self) -> None:
        """Put the filled tensors and settings in place."""
        for step in self._finish:
            step()


def as_optims(optim: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """One optimizer, several or none as a list."""
    if optim is None:
        return []
    return [optim] if isinstance(optim, Optimizer) else list(optim)


def _groups(
    optims: Iterable[Optimizer], owners: Mapping[int, str]
) -> Iterable[tuple[dict[str, Any], list[tuple[str, Tensor, Optimizer]]]]:
    for optim in optims:
        for number, group in enumerate(optim.param_groups):
            strangers = [i for i, param in enumerate(group["params"]) if id(param) not in owners]
            if strangers:
                raise ValueError(
                    f"parameter {strangers[0]} of group {number} of {type(optim).__name__} is not a parameter of the "
                    "model in TrainState. Build the optimizer after wrapping the model, and pass that model."
                )
            yield group, [(owners[id(param)], param, optim) for param in group["params"]]


def _stored_name(name: str, hypers: Mapping[str, Any], index: Index) -> str:
    """The name a parameter was saved under: its own, or that of the one it was or is tied to."""
    if name in hypers:
        return name
    canonical = index.tied.get(name, name)
    if canonical in hypers:
        return canonical
    return next((alias for alias, first in index.tied.items() if first == canonical and alias in hypers), name)


def _check_known(unknown: Sequence[str]) -> None:
    if unknown:
        raise ValueError(
            f"the step has no optimizer state for {unknown[:4]} ({len(unknown)} parameters in all): they were not "
            "given to the optimizer when it was saved. Give the optimizer the same parameters, or pass strict=False "
            "to start with new state for them."
        )


def _refuse_shared(optims: Iterable[Optimizer], owners: Mapping[int, str]) -> None:
    seen: set[int] = set()
    for _, params in _groups(optims, owners):
        for name, param, _ in params:
            if id(param) in seen:
                raise ValueError(f"{name!r} belongs to two optimizers; their states of it would get one name.")
            seen.add(id(param))


def _laid_out(value: Tensor, param: Tensor) -> Tensor:
    """State that an optimizer keeps as a plain tensor beside its rank's part of a `DTensor` lies as that part does."""
    if not isinstance(param, DTensor) or isinstance(value, DTensor):
        return value
    part: Any = param.detach()
    local = tuple(part.to_local().shape)
    if tuple(value.shape) != local or local == tuple(param.shape):
        return value
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def _target(
    optim: Optimizer,
    hyper: Mapping[str, Any],
    param: Tensor,
    name: str,
    key: str,
    stored: tuple[int, ...],
    dtype: torch.dtype,
    shard: LocalShard | None,
) -> Tensor:
    """The tensor that is to be this state of ``param``: the present one if it fits, else a new one.

    Args:
        hyper: The group's settings, as they will be.
        stored: Shape of the saved state.
        dtype: Its dtype here.
    """
    present = optim.state.get(param, {}).get(key)
    whole = tuple(param.shape) if shard is None else shard.shape
    like_param = stored == whole
    shape = tuple(param.shape) if like_param else stored
    if isinstance(present, Tensor) and tuple(_laid_out(present, param).shape) == shape and present.dtype == dtype:
        return present
    if key == "step":  # a counter; on the device only where the optimizer reads it there
        device = param.device if hyper.get("fused") or hyper.get("capturable") else torch.device("cpu")
        return torch.zeros(stored, dtype=dtype, device=device)
    if like_param:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if isinstance(param, DTensor) and stored:
        raise ValueError(
            f"optimizer state {key!r} of {name!r} has shape {list(stored)}, unlike its parameter's "
            f"{list(param.shape)}: how it is sharded is not known yet. Take one optimizer step, then restore."
        )
    return torch.zeros(stored, dtype=dtype, device=param.device)


def _stored_key(index: Index, name: str, key: str) -> str:
    optim = index.tensors["optim"]
    canonical = index.tied.get(name, name)
    aliases = [name, canonical, *(alias for alias, first in index.tied.items() if first == canonical)]
    return next(f"{alias}/{key}" for alias in aliases if f"{alias}/{key}" in optim)


def _set_hyper(group: dict[str, Any], hyper: Mapping[str, Any]) -> None:
    for key, value in hyper.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value) if not isinstance(value, Tensor) else group[key].copy_(value)
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value  # other groups may get it too


def _set_state(optim: Optimizer, param: Tensor, state: dict[str, Any]) -> None:
    if state or param in optim.state:
        optim.state[param] = state
