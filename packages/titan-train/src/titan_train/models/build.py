"""Build a model from its configuration: one of a registered family by name, or any module by dotted path."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titan_train.models.arguments import ModelChoice, model_args
from titan_train.models.call import take_logits
from titan_train.models.parametrization import parametrize
from titan_train.models.registry import find_model
from titan_train.trust.factory import import_factory
from titan_train.trust.owner import describe_error
from titan_train.values import did_you_mean

_RANDOM_FILLS = frozenset({Tensor.normal_, Tensor.uniform_})


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
    with torch.device(device), SkipRandomFill():
        if config.name.startswith("hf:"):
            from titan_train.models.hf.build import build_hf

            return build_hf(config, vocab_size=vocab_size)
        if ":" in config.name:
            return _build_own(config, vocab_size)
        model = find_model(config.name)[0].build(model_args(config, vocab_size=vocab_size))
    if config.parametrization == "mup":
        parametrize(model, base_dim=config.base_dim, base_layers=config.base_layers)
    return model


class SkipRandomFill(TorchFunctionMode):
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


def _build_own(config: ModelChoice, vocab_size: int | None) -> nn.Module:
    """Call the user's callable with ``args``, and with ``vocab_size`` where its signature has it."""
    build = import_factory(config.name)
    signature = inspect.signature(build)
    arguments: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in config.args.items()
    }
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
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):  # masters are float32, and train.dtype what computes
            parameter.data = parameter.data.float()
    return take_logits(model)
