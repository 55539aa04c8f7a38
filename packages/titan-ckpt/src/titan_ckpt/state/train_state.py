"""`TrainState`, and how it becomes tensors and plain data."""

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from titan_ckpt.format.tagged_json import child
from titan_ckpt.state.leaves import TensorSink, rng_state
from titan_ckpt.state.model import ModelState, as_modules, model_state
from titan_ckpt.state.optimizer import merge_groups, optim_state
from titan_ckpt.state.sharding import LocalShard

_T = TypeVar("_T")


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is plain data: a scheduler, a data loader, a counter."""

    def state_dict(self) -> dict[str, Any]:
        """The state: plain Python data, arrays and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Load what `state_dict` returned."""
        ...


class LeftOut(dict[str, Any]):
    """``TrainState.extra`` that was not given."""


@dataclass(slots=True)
class TrainState:
    """Everything a resume needs. A part that is left out is neither saved nor loaded.

    Every rank passes its own: its shards, replicas or pipeline stages of the model and optimizer, its data position and its
    random generators.
    """

    model: nn.Module | Sequence[nn.Module] | None = None
    """The model as it is trained (wrapped, sharded, compiled), or this rank's pieces with their full names."""
    optim: Optimizer | Sequence[Optimizer] | None = None
    """The optimizer or optimizers of ``model``'s parameters."""
    own_settings: bool | Collection[str] = False
    """Restore into the optimizer's groups as they are: their settings stay, parameters without saved state start from scratch,
    and saved state of parameters that the optimizer does not have is left out. Names, such as ``("lr", "weight_decay")``: the
    same, but only these settings stay. Optimizers that keep running values in their groups need the others. False gives groups
    the settings that they had when saved, and refuses other parameters."""
    optim_keys: Collection[str] | None = None
    """Restore these tensors of the optimizer's state alone, such as ``("ema",)``; its other state and its settings stay. None
    restores all."""
    sched: Stateful | Sequence[Stateful] | None = None
    """Learning-rate schedulers, equal on every rank. Rank 0's are saved."""
    data: Stateful | None = None
    """The data position of this rank. To resume on another number of data-parallel ranks, its state must be equal on all
    ranks (global counters), or it must have a method ``reshard(states)``, which gets the sequence of every saved rank's
    state, each read when it is looked at."""
    rng: bool = True
    """Whether to save and load the random generators of python, numpy, torch and CUDA."""
    extra: MutableMapping[str, Any] = field(default_factory=LeftOut)
    """Other values, equal on every rank: plain data, tensors, `Stateful` objects. A restore updates it in place, also with the
    step's values that are not in it: ``{}`` reads all. Tensors come back on the device of those at the same place, else on the
    CPU; `DTensor` in its layout, else whole."""
    shards: Mapping[str, LocalShard] = field(default_factory=dict[str, LocalShard])
    """For model tensors that are this rank's part of a larger tensor without being a `DTensor` of it: name to place.
    Optimizer state of the same shape has the same place. Each rank gives its own."""
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    """For pieces of a pipeline: further name of a tied tensor to its first name, of the whole model, the same on every rank.
    A step holds the tensor once, by its first name, and all copies are filled from it. `shards` names it by the first."""
    dp: tuple[int, int] | None = None
    """This rank's place among the data-parallel ranks, and their number. None means (rank, world size)."""

    def __post_init__(self) -> None:
        """Refuse values of the wrong type.

        Raises:
            TypeError: If a part is not what its field says.
            ValueError: If ``dp`` is not a place and a number of ranks.
        """
        given: dict[str, tuple[list[Any], tuple[str, ...], str]] = {
            "model": (as_modules(self.model), ("state_dict", "modules"), "an nn.Module or a list of them"),
            "optim": (listed(self.optim), ("param_groups", "state"), "an Optimizer or a list of them"),
            "sched": (listed(self.sched), ("state_dict", "load_state_dict"), "a scheduler or a list of them"),
            "data": (
                listed(self.data),
                ("state_dict", "load_state_dict"),
                "an object with state_dict and load_state_dict",
            ),
            "extra": ([self.extra], ("items", "__setitem__"), "a dict"),
            "shards": ([*self.shards.values()], ("shape", "offsets"), "a dict of LocalShard"),
        }
        for name, (values, needed, what) in given.items():
            wrong = [value for value in values if not all(hasattr(value, method) for method in needed)]
            if wrong:
                raise TypeError(f"TrainState({name}=) got a {type(wrong[0]).__name__}. Pass {what}.")
        dp: Any = self.dp
        if dp is not None and not (isinstance(dp, tuple | list) and len(dp) == 2 and 0 <= dp[0] < dp[1]):
            raise ValueError(
                f"TrainState(dp={dp!r}) is not (place, number of data-parallel ranks), with place < number."
            )


def check_state(state: Any) -> None:
    """Raise a TypeError for anything but a `TrainState`, and for keys of ``extra`` that are not strings."""
    if not isinstance(state, TrainState):
        raise TypeError(f"state is a {type(state).__name__}. Pass a TrainState, such as TrainState(model=model).")
    for key in cast("dict[Any, Any]", state.extra):
        if not isinstance(key, str):
            raise TypeError(
                f"extra has the key {key!r}, which is a {type(key).__name__}. Its entries are found again by name: use strings, "
                "or put the dict below one, such as extra={'counts': {1: 2}}."
            )


def shard_of(
    shards: Mapping[str, LocalShard], section: str, key: str, shape: tuple[int, ...], model: ModelState
) -> LocalShard | None:
    """The place of a tensor in a larger one; None if it is whole. ``shape`` is its shape on this rank."""
    if section == "model":
        return shards.get(key)
    name = key.rpartition("/")[0]
    if section != "optim" or name not in shards or name not in model.tensors:
        return None
    return shards[name].of_state(shape, tuple(model.tensors[name].shape))


@dataclass(slots=True)
class Collected:
    """A state taken apart."""

    model: ModelState
    tensors: list[tuple[str, str, Tensor]]
    """(section, key, tensor), live."""
    shared: dict[str, Any]
    """Plain data that rank 0 merges into one file."""
    own: dict[str, Any]
    """Plain data of this rank's own file; may be empty."""


def collect(state: TrainState, rank: int, size: int) -> Collected:
    """Take a state apart for saving.

    Raises:
        TypeError: If a value is neither plain data nor a tensor. The message gives its path.
        ValueError: If names clash, or a parameter of the optimizer is not in the model.
    """
    check_state(state)
    model = model_state(as_modules(state.model), state.tied)
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
    # Equal on all ranks: rank 0's is saved. Every rank encodes it, so that every rank raises an error.
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


def merge_shared(step: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain data of all ranks as one: rank 0's, and every rank's part of model and optimizer."""
    return {
        "step": step,
        "dp": [shared["dp"] for shared in ranks],
        "has": sorted({name for shared in ranks for name in shared["has"]}),
        "model": {key: value for shared in ranks for key, value in shared["model"].items()},
        "optim": {
            "groups": merge_groups(shared["optim"]["groups"] for shared in ranks),
            "leaves": {key: value for shared in ranks for key, value in shared["optim"]["leaves"].items()},
            "others": ranks[0]["optim"].get("others", []),
        },
        "sched": ranks[0]["sched"],
        "extra": ranks[0]["extra"],
    }


def listed(value: "_T | Sequence[_T] | None") -> "list[_T]":
    """A list of one, several or no values."""
    if value is None:
        return []
    return [*value] if isinstance(value, Sequence) else [value]
