"""The arguments of a shipped model with a configuration's changes, each checked. No torch: the planner uses it."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from titan_train.models.registry import find_model
from titan_train.values import did_you_mean

_Args = TypeVar("_Args")
# Beyond these a size is a slip of the keyboard: torch counts elements in 63 bits, and a model is built layer by layer.
_MOST = 2**31 - 1
_MOST_OF = {
    "num_layers": 10_000,
    "num_dense_layers": 10_000,
    "mtp_depth": 100,
    "num_experts": 2**16,
    "num_shared_experts": 2**16,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
}


class ModelChoice(Protocol):
    """Which model to build; `titan_train.config.ModelConfig` is one."""

    @property
    def name(self) -> str:
        """A shipped configuration, or ``"package.module:callable"``."""
        ...

    @property
    def args(self) -> Mapping[str, Any]:
        """Changes to its arguments."""
        ...

    @property
    def seq_len(self) -> int:
        """Tokens in one training sequence."""
        ...

    @property
    def parametrization(self) -> str:
        """How weights and rates scale with width: "standard" or "mup"."""
        ...

    @property
    def base_dim(self) -> int:
        """Width of the model that settings were found on, for "mup"."""
        ...

    @property
    def base_layers(self) -> int:
        """Its layers; 0 does not scale by depth."""
        ...

    @property
    def lora_rank(self) -> int:
        """Rank of adapters beside a model of transformers; 0 is none."""
        ...

    @property
    def lora_alpha(self) -> float:
        """Adapters are scaled by it over their rank."""
        ...

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Last names of the linears with adapters; empty is all of the layers."""
        ...


def model_args(config: ModelChoice, *, vocab_size: int | None) -> Any:
    """The arguments of the model that ``config`` names, with its changes; arguments and errors as in `build_model`."""
    args = _override(find_model(config.name)[1], config, vocab_size)
    longest = getattr(args, "max_seq_len", None)
    if longest is not None and config.seq_len > longest:
        raise ValueError(
            f"model.seq_len={config.seq_len} is longer than the {longest} learned positions of {config.name}: the nearest "
            f"valid choice is {longest}, or set model.args.max_seq_len={config.seq_len}."
        )
    return args


def _override(shipped: _Args, config: ModelChoice, vocab_size: int | None) -> _Args:
    """The shipped arguments with the configuration's changes, each checked for name and type."""
    hints = typing.get_type_hints(type(shipped))
    changes: dict[str, Any] = {} if vocab_size is None else {"vocab_size": vocab_size}
    for key, value in config.args.items():
        if key not in hints:
            raise ValueError(
                f"model.args.{key}={value!r}: {config.name} has no such argument. {did_you_mean(key, hints)}"
                f"It takes {', '.join(hints)}."
            )
        wanted = _kinds(hints[key])
        if float in wanted and int not in wanted and type(value) is int:
            value = float(value)
        if not any(_fits(value, kind) for kind in wanted):
            current = getattr(shipped, key)
            of_one_type = any(typing.get_origin(kind) is tuple for kind in wanted)
            others = " of others" if type(value) is tuple and of_one_type else ""
            named = " or ".join(map(_type_name, wanted))
            raise ValueError(
                f"model.args.{key}={_shown(value)} must be {named}, not {_type_name(type(value))}{others}; "
                f"{config.name} has {_shown(current)}."
            )
        changes[key] = value
    if vocab_size is not None and changes["vocab_size"] < vocab_size:
        raise ValueError(
            f"model.args.vocab_size={changes['vocab_size']} is less than the tokenizer's {vocab_size}: some tokens "
            f"would have no embedding. The nearest valid choice is {vocab_size}; or leave it out."
        )
    _check_sizes(changes)
    return dataclasses.replace(typing.cast("Any", shipped), **changes)


def _kinds(hint: Any) -> list[Any]:
    """The types that a value of this annotation may have; none is that of None, which a configuration cannot write."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for member in typing.get_args(hint) if member is not type(None) for kind in _kinds(member)]
    return [str if typing.get_origin(hint) is typing.Literal else hint]


def _fits(value: Any, wanted: Any) -> bool:
    if typing.get_origin(wanted) is tuple:
        return type(value) is tuple and all(type(entry) is typing.get_args(wanted)[0] for entry in value)
    return type(value) is wanted


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list, each of type {typing.get_args(kind)[0].__name__}"
    return "a list" if kind is tuple else f"of type {kind.__name__}"


def _shown(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def _check_sizes(changes: Mapping[str, Any]) -> None:
    """Refuse numbers that no model has, before one is built with them."""
    for key, value in changes.items():
        most = _MOST_OF.get(key, _MOST)
        if isinstance(value, int) and not 0 <= value <= most:
            near = 0 if value < 0 else most
            raise ValueError(
                f"model.args.{key}={value} must be between 0 and {most}; the nearest valid choice is {near}."
            )
        if key == "norm_eps" and not 0 < value < 1:
            raise ValueError(f"model.args.norm_eps={value} must be between 0 and 1; 1e-5 is usual.")
