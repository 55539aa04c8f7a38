"""Build a model from its configuration: one of a registered family by name, or any module by dotted path."""

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titan_train.models.registry import find_model
from titan_train.nearest import did_you_mean
from titan_train.trust.factory import describe_error, import_factory

_Args = TypeVar("_Args")
_RANDOM_FILLS = frozenset({Tensor.normal_, Tensor.uniform_})


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


def build_model(config: ModelChoice, *, vocab_size: int | None, device: torch.device | str = "meta") -> nn.Module:
    """Build a model. Its weights are not initialised: see `titan_train.models.init_for`.

    Args:
        config: Which model, and changes to it.
        vocab_size: The tokenizer's; None keeps the shipped model's own. ``args.vocab_size`` may pad it further.
        device: Where parameters are created; "meta" takes no memory.

    Returns:
        A float32 module whose ``forward(tokens)`` returns logits.

    Raises:
        ValueError: An argument that the model does not have or whose value cannot work, a vocabulary below the
            tokenizer's, a sequence longer than the model's learned positions, or a dotted path that leads nowhere.
    """
    with torch.device(device), _SkipRandomFill():
        if config.name.startswith("hf:"):
            from titan_train.models.hf.build import build_hf

            return build_hf(config, vocab_size=vocab_size)
        if ":" in config.name:
            return _build_own(config, vocab_size)
        return find_model(config.name)[0].build(model_args(config, vocab_size=vocab_size))


class _SkipRandomFill(TorchFunctionMode):
    """Leaves out the random initialisation of meta tensors: they have no values, and torch loads its compiler for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM_FILLS or getattr(func, "__module__", None) == nn.init.__name__:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)


def model_args(config: ModelChoice, *, vocab_size: int | None) -> Any:
    """The arguments of the model that ``config`` names, with its changes; arguments and errors as in `build_model`."""
    args = _override(find_model(config.name)[1], config, vocab_size)
    longest = getattr(args, "max_seq_len", config.seq_len)
    if config.seq_len > longest:
        raise ValueError(
            f"model.seq_len={config.seq_len} is longer than the {longest} learned positions of {config.name}: the nearest "
            f"valid choice is {longest}, or set model.args.max_seq_len={config.seq_len}."
        )
    return args


def _override(shipped: _Args, config: ModelChoice, vocab_size: int | None) -> _Args:
    """The shipped arguments with the configuration's changes, each checked for name and type."""
    types = typing.get_type_hints(type(shipped))
    changes: dict[str, Any] = {} if vocab_size is None else {"vocab_size": vocab_size}
    for key, value in config.args.items():
        if key not in types:
            raise ValueError(
                f"model.args.{key}={value!r}: {config.name} has no such argument. {did_you_mean(key, types)}"
                f"It takes {', '.join(types)}."
            )
        wanted = types[key]
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            current = getattr(shipped, key)
            raise ValueError(
                f"model.args.{key}={value!r} must be of type {wanted.__name__}, not {type(value).__name__}; "
                f"{config.name} has {current!r}."
            )
        changes[key] = value
    if vocab_size is not None and changes["vocab_size"] < vocab_size:
        raise ValueError(
            f"model.args.vocab_size={changes['vocab_size']} is less than the tokenizer's {vocab_size}: some tokens "
            f"would have no embedding. The nearest valid choice is {vocab_size}; or leave it out."
        )
    return dataclasses.replace(typing.cast("Any", shipped), **changes)


def _build_own(config: ModelChoice, vocab_size: int | None) -> nn.Module:
    """Call the user's callable with ``args``, and with ``vocab_size`` where its signature has it."""
    build = import_factory(config.name)
    signature = inspect.signature(build)
    arguments: dict[str, Any] = dict(config.args)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if vocab_size is not None and ("vocab_size" in signature.parameters or takes_any):
        arguments.setdefault("vocab_size", vocab_size)
    for key, value in config.args.items():
        if key not in signature.parameters and not takes_any:
            raise ValueError(
                f"model.args.{key}={value!r}: {config.name} has no such argument. "
                f"{did_you_mean(key, signature.parameters)}It takes {', '.join(signature.parameters) or 'none'}."
            )
    try:
        signature.bind(**arguments)
    except TypeError as err:
        raise ValueError(
            f"model.args={dict(config.args)} does not fit {config.name}{signature}: {err}. Set it under [model.args]."
        ) from None
    try:
        model: Any = build(**arguments)
    except Exception as err:  # the user's own code
        raise ValueError(f"model.name={config.name!r}: building the model failed: {describe_error(err)}") from err
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model.name={config.name!r} returned a {type(model).__name__}; it must return a torch.nn.Module."
        )
    return model
