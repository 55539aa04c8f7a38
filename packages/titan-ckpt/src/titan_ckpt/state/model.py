"""A model's tensors by their plain names.

DDP, torch.compile and activation checkpointing add a component to each name. A step uses the names of the unwrapped
module, so it loads into any wrapping. A tensor with several names (tied weights) is listed once, also where the pieces of
a pipeline hold copies of it.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from titan_ckpt.state.sharding import is_dtensor

# The attribute of the wrapped module in torch.compile's OptimizedModule and torch's CheckpointWrapper.
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(slots=True)
class ModelState:
    """A model's state dict by plain name."""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The tensors. All but `detached` are live: a write into them changes the model."""
    detached: set[str] = field(default_factory=set[str])
    """Names of ``tensors`` that a hook or ``get_extra_state`` made: they are loaded with ``load_state_dict``."""
    tied: dict[str, str] = field(default_factory=dict[str, str])
    """Additional name of a tensor to its name in ``tensors``."""
    copies: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    """Further tensors of a name, equal to that in ``tensors``: a tied weight that two pieces of a pipeline hold here."""
    leaves: dict[str, Any] = field(default_factory=dict[str, Any])
    """Extra state that is not a tensor (``get_extra_state``)."""
    raw: dict[str, tuple[nn.Module, str]] = field(default_factory=dict[str, tuple[nn.Module, str]])
    """Name of a leaf or detached tensor to its module and the key in that module's state dict."""
    owners: dict[int, str] = field(default_factory=dict[int, str])
    """``id`` of each parameter to its name in ``tensors``."""

    def names_of(self) -> dict[str, list[str]]:
        """Name in ``tensors`` to all names of the tensor, that one first."""
        names = {name: [name] for name in self.tensors}
        for alias, first in self.tied.items():
            names[first].append(alias)
        return names

    def load(self, loaded: Mapping[str, Any]) -> None:
        """Load what is not a live tensor, by name: extra state, and entries that a hook made."""
        for model in dict.fromkeys(module for module, _ in self.raw.values()):
            mine = {raw: loaded[name] for name, (owner, raw) in self.raw.items() if owner is model and name in loaded}
            if mine:
                model.load_state_dict(mine, strict=False)


def model_state(models: Iterable[nn.Module], tied: Mapping[str, str] | None = None) -> ModelState:
    """The state of a model, or of its pieces on this rank (pipeline stages), which share one name space.

    Args:
        models: The pieces.
        tied: As `TrainState.tied`.

    Raises:
        ValueError: If two tensors or extra states have the same name, or a module is wrapped by FSDP1.
    """
    state = ModelState()
    first_of = tied or {}
    shared = set(first_of.values())
    seen: dict[Any, str] = {}
    for model in models:
        _refuse_fsdp1(model)
        prefixes = _transparent(model)
        live = {_identity(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for raw, value in model.state_dict(keep_vars=True).items():
            name = plain_name(raw, prefixes)
            if not isinstance(value, Tensor):
                if name in state.leaves:
                    raise ValueError(f"two modules of TrainState(model=[...]) have an extra state {name!r}.")
                state.leaves[name] = value
                state.raw[name] = (model, raw)
                continue
            if _identity(value) not in live:
                state.detached.add(name)
                state.raw[name] = (model, raw)
            first = seen.setdefault(_identity(value), first_of.get(name, name))
            if name not in shared and state.tensors.get(name, value) is not value:
                raise ValueError(
                    f"two tensors are called {name!r}. Give the modules of TrainState(model=[...]) the names they "
                    "have in the whole model."
                )
            held = state.tensors.setdefault(first, value)
            if first in shared and _identity(held) != _identity(value):
                state.copies.setdefault(first, []).append(value)
            if first != name:
                state.tied[name] = first
            state.owners[id(value)] = first
        for raw, param in model.named_parameters(remove_duplicate=False):
            name = plain_name(raw, prefixes)  # a state dict hook may have replaced the parameter's entry
            state.owners.setdefault(id(param), state.tied.get(name, name))
    return state


def plain_name(raw: str, transparent: frozenset[str]) -> str:
    """A name without the components of wrappers; ``transparent`` has the prefixes whose last component is a wrapper's."""
    parts = raw.split(".")
    kept = [
        part
        for i, part in enumerate(parts)
        if part not in _WRAPPER_ATTRIBUTES and ".".join(parts[: i + 1]) not in transparent
    ]
    return ".".join(kept)


def as_modules(model: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    """A list of models. An `nn.ModuleList` is one model."""
    if model is None:
        return []
    return [model] if isinstance(model, nn.Module) else list(model)


def _refuse_fsdp1(model: nn.Module) -> None:
    flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(module, flat) for module in model.modules()):
        raise ValueError(
            "the model is wrapped by FullyShardedDataParallel, whose flat parameters are not parts of the whole tensors. "
            "Shard it with torch.distributed.fsdp.fully_shard."
        )


def _transparent(model: nn.Module) -> frozenset[str]:
    # "module" is a common name, so it is dropped only for the two classes that add it. A checkpoint wrapper's component is
    # missing in state dicts but not in parameter names: take the prefixes with and without it.
    prefixes: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DistributedDataParallel | DataParallel):
            wrapped = f"{name}.module" if name else "module"
            prefixes.add(wrapped)
            prefixes.add(".".join(p for p in wrapped.split(".") if p not in _WRAPPER_ATTRIBUTES))
    return frozenset(prefixes)


def _identity(tensor: Tensor) -> Any:
    """A value that is equal for tensors that are the same view of the same memory."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    if local.layout is not torch.strided or hasattr(local, "__tensor_flatten__") or local.is_meta or not local.numel():
        return id(tensor)
    return (local.device, local.data_ptr(), local.dtype, tuple(tensor.shape), local.stride())
