"""What parallelism must know about a model's structure: its repeated blocks, and what is not trained."""

import functools
import re
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Literal

import torch
from titan_fsdp import clean_fqn
from torch import nn

from titan_train.values import did_you_mean


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, outermost first: children of the containers that hold modules of one class, or of a list of layers
    of several classes.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for container in model.modules():
        blocks = list(container.children())
        repeats = isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        alike = len({type(b) for b in blocks}) == 1
        if repeats and blocks and (alike or _is_list_of_layers(container)) and id(container) not in inside:
            found += blocks
            inside |= {id(m) for block in blocks for m in block.modules()}
    return found


def _is_list_of_layers(container: nn.Module) -> bool:
    """Whether all of its modules have parts of their own, and no names but numbers."""
    named = dict(container.named_children())
    numbered = not isinstance(container, nn.Sequential) and all(name.isdecimal() for name in named)
    return numbered and all(any(True for _ in module.children()) for module in named.values())


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Make a module's forward ``around(forward, *args, **kwargs)``, in place; that of a deep copy computes with the copy."""
    inner: Any = module.forward
    if getattr(inner, "__self__", None) is not module:  # what is compiled is a function, which copies share

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        module.forward = forward
        return

    @functools.wraps(inner.__func__)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(inner if self is module else MethodType(inner.__func__, self), *args, **kwargs)

    module.forward = MethodType(method, module)


def hold_weights(model: nn.Module, weights: Literal["fp32", "bf16"]) -> None:
    """Hold a float32 model's parameters, not its buffers, as ``optimizer.weights`` says, in place; ties stay."""
    for parameter in model.parameters() if weights == "bf16" else ():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.bfloat16()


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training, in place.

    Args:
        model: The whole model, on any device.
        patterns: ``train.freeze``: regular expressions that are searched in the names, checked by the configuration.

    Raises:
        ValueError: A pattern is found in no name, or nothing is left to train.
    """
    named = {clean_fqn(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    for pattern in patterns:
        found = [parameter for name, parameter in named.items() if re.search(pattern, name)]
        if not found:
            distinct = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in named))
            raise ValueError(
                f"train.freeze: {pattern!r} is found in none of the {len(named)} parameter names: it would do nothing. "
                f"{did_you_mean(pattern, distinct)}Names look like {distinct[0]!r}."
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError(f"train.freeze={list(patterns)} leaves nothing to train. Remove a pattern.")
