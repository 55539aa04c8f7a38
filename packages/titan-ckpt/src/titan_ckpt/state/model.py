"""A model's tensors by their plain names, whatever wraps the modules.

DDP, torch.compile and activation-checkpoint wrappers add a path component; a checkpoint uses the
names of the unwrapped module, so that any wrapping can load what any other saved. A tensor that appears under
several names (tied weights) is listed once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Attributes by which wrappers hold the wrapped module, in names no user's module takes: torch.compile's
# OptimizedModule, torch's CheckpointWrapper.
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(slots=True)
class ModelState:
    """What a model's state dict holds, by plain name."""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The tensors. All but `detached` are live: writing into them changes the model."""
    detached: set[str] = field(default_factory=set[str])
    """Names of ``tensors`` that a hook or ``get_extra_state`` made: to be given to ``load_state_dict``."""
    tied: dict[str, str] = field(default_factory=dict[str, str])
    """Further names of a tensor to the one in ``tensors``."""
    leaves: dict[str, Any] = field(default_factory=dict[str, Any])
    """Extra state that is not a tensor (``get_extra_state``)."""
    raw: dict[str, tuple[nn.Module, str]] = field(default_factory=dict[str, tuple[nn.Module, str]])
    """Leaf or detached name to the module whose state dict holds it and its name there."""
    owners: dict[int, str] = field(default_factory=dict[int, str])
    """``id`` of each parameter to its name in ``tensors``: how an optimizer's parameters are named."""

    def names_of(self) -> dict[str, list[str]]:
        """Each of ``tensors`` to all its names, that one first."""
        names = {name: [name] for name in self.tensors}
        for alias, first in self.tied.items():
            names[first].append(alias)
        return names


def model_state(models: Iterable[nn.Module]) -> ModelState:
    """List the tensors of one model, or of its pieces on this rank (pipeline stages), which share one name space.

    Raises:
        ValueError: If two different tensors, or extra states, have one name, or a module is wrapped by FSDP1.
    """
    state = ModelState()
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
            first = seen.setdefault(_identity(value), name)
            if name in state.tensors and state.tensors[name] is not value:
                raise ValueError(
                    f"two tensors are called {name!r}. Give the modules of TrainState(model=[...]) the names they "
                    "have in the whole model."
                )
            if first == name:
                state.tensors[name] = value
            else:
                state.tied[name] = first
            state.owners[id(value)] = first
        for raw, param in model.named_parameters(remove_duplicate=False):
            name = plain_name(raw, prefixes)  # a state dict hook may have replaced the parameter's entry
            state.owners.setdefault(id(param), state.tied.get(name, name))
    return state


def plain_name(raw: str, transparent: frozenset[str]) -> str:
    """``raw`` without the components that wrappers added.

    Args:
        raw: A key of a state dict, or a parameter's name.
        transparent: Prefixes (without final dot) whose last component is a wrapper's.
    """
    parts = raw.split(".")
    kept = [
        part
        for i, part in enumerate(parts)
        if part not in _WRAPPER_ATTRIBUTES and ".".join(parts[: i + 1]) not in transparent
    ]
    return ".".join(kept)


def as_modules(model: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    """One model, several or none as a list. An `nn.ModuleList` is one model."""
    if model is None:
        return []
    return [model] if isinstance(model, nn.Module) else list(model)


def _refuse_fsdp1(model: nn.Module) -> None:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped by FullyShardedDataParallel, whose flat parameters have no place in the whole tensors. "
            "Shard it with torch.distributed.fsdp.fully_shard."
        )


def _transparent(model: nn.Module) -> frozenset[str]:
    # "module" is a common name, so it is dropped only below the two classes that add it. State dicts of checkpoint
    # wrappers lack the wrapper's component, parameter names have it: take the prefixes with and without.
    prefixes: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DistributedDataParallel | DataParallel):
            wrapped = f"{name}.module" if name else "module"
            prefixes.add(wrapped)
            prefixes.add(".".join(p for p in wrapped.split(".") if p not in _WRAPPER_ATTRIBUTES))
    return frozenset(prefixes)


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory read the same way."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "__tensor_flatten__") or local.is_meta or not local.numel():
        return id(tensor)
    return (local.device, local.data_ptr(), local.dtype, tuple(tensor.shape), local.stride())
