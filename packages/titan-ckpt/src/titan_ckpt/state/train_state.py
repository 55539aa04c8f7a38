"""What a training loop consists of, and how it becomes tensors and plain data."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from titan_ckpt.format.tagged_json import child
from titan_ckpt.state.leaves import TensorSink, rng_state
from titan_ckpt.state.model import ModelState, as_modules, model_state
from titan_ckpt.state.optimizer import optim_state
from titan_ckpt.state.sharding import LocalShard

_T = TypeVar("_T")


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say its state as plain data and take it back: schedulers, data loaders, counters."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of plain Python data, arrays and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take back what `state_dict` gave."""
        ...


@dataclass(slots=True)
class TrainState:
    """Everything a resume needs. Leave out what should be neither saved nor loaded.

    Every rank passes its own: the same model and optimizer (sharded, replicated, or its pipeline stages), its own
    data position and random generators.
    """

    model: nn.Module | Sequence[nn.Module] | None = None
    """The model as it is trained (wrapped, sharded, compiled), or this rank's pieces of it under their full names."""
    optim: Optimizer | Sequence[Optimizer] | None = None
    """The optimizer or optimizers over ``model``'s parameters."""
    sched: Stateful | Sequence[Stateful] | None = None
    """Learning-rate schedulers, the same on every rank; rank 0's are saved."""
    data: Stateful | None = None
    """The data position of this rank. To resume on another number of data-parallel ranks, its state must be the same
    on all ranks (global counters), or it must have ``reshard(states)``, which gets every saved rank's state."""
    rng: bool = True
    """Whether to save and load the random generators: python, numpy, torch, CUDA."""
    extra: MutableMapping[str, Any] = field(default_factory=dict[str, Any])
    """Further values, the same on every rank; plain data, tensors, or `Stateful`. Loading updates it in place."""
    shards: Mapping[str, LocalShard] = field(default_factory=dict[str, LocalShard])
    """Name of a model tensor that is this rank's part of a larger one, without being a `DTensor` of it, to where it
    lies; optimizer state of the same shape lies there too. Each rank gives its own."""
    dp: tuple[int, int] | None = None
    """This rank's place among the data-parallel ranks and their number; None for (rank, world size)."""


def shard_of(
    shards: Mapping[str, LocalShard], section: str, key: str, shape: tuple[int, ...], model: ModelState
) -> LocalShard | None:
    """Where tensor ``key`` of a section, of that shape on this rank, lies in a larger one; None if it is whole."""
    if section == "model":
        return shards.get(key)
    name = key.rpartition("/")[0]
    if section != "optim" or name not in shards or name not in model.tensors:
        return None
    # a step counter or a factored moment is not cut as the parameter is
    return shards[name] if shape == tuple(model.tensors[name].shape) else None


@dataclass(slots=True)
class Collected:
    """A state taken apart."""

    model: ModelState
    tensors: list[tuple[str, str, Tensor]]
    """(section, key, tensor), live."""
    shared: dict[str, Any]
    """Plain data that rank 0 merges into one file."""
    own: dict[str, Any]
    """Plain data of this rank's own file; empty if there is none."""


def collect(state: TrainState, rank: int, size: int) -> Collected:
    """Take a state apart for saving.

    Raises:
        TypeError: If it holds something that is neither plain data nor a tensor. The message gives its path.
        ValueError: If names clash, or the optimizer's parameters are not the model's.
    """
    model = model_state(as_modules(state.model))
    strangers = [name for name in state.shards if name not in model.tensors]
    if strangers:
        raise ValueError(
            f"shards names {strangers[:4]}, which are not tensors of the model on this rank. Use the model's own names."
        )
    optim = optim_state(listed(state.optim), model.owners)
    sink = TensorSink()
    dp = state.dp or (rank, size)
    shared: dict[str, Any] = {
        "dp": list(dp),
        "tied": model.tied,
        "model": {key: sink.encode(value, child("model", key)) for key, value in model.leaves.items()},
        "optim": {
            "groups": [
                {"hyper": sink.encode(g["hyper"], f"optim.param_groups[{i}]"), "params": g["params"]}
                for i, g in enumerate(optim.groups)
            ],
            "leaves": {key: sink.encode(value, child("optim.state", key)) for key, value in optim.leaves.items()},
            "others": [sink.encode(value, f"optim[{i}].state") for i, value in enumerate(optim.others)],
        },
        "has": [name for name in ("model", "optim", "sched", "data") if getattr(state, name) is not None],
    }
    # The same on all ranks: rank 0 speaks for them. Encoded on each, so that an error is every rank's.
    replicated = {
        "sched": [sink.encode(s.state_dict(), f"sched[{i}]") for i, s in enumerate(listed(state.sched))],
        "extra": {
            key: sink.encode(value.state_dict() if isinstance(value, Stateful) else value, child("extra", key))
            for key, value in state.extra.items()
        },
    }
    if rank == 0:
        shared |= replicated
    own: dict[str, Any] = {}
    if state.rng:
        own["rng"] = sink.encode(rng_state(), "rng")
    if state.data is not None:
        own["data"] = sink.encode(state.data.state_dict(), f"data.rank-{rank}")
    tensors = [("model", key, tensor) for key, tensor in model.tensors.items()]
    tensors += [("optim", key, tensor) for key, tensor in optim.tensors.items()]
    tensors += [("extra", key, tensor) for key, tensor in sink.tensors.items()]
    return Collected(model, tensors, shared, own)


def listed(value: "_T | Sequence[_T] | None") -> "list[_T]":
    """One, several or none as a list."""
    if value is None:
        return []
    return [*value] if isinstance(value, Sequence) else [value]
