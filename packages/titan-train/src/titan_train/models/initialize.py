"""Initial weights, one full parameter at a time, by name.

Weights made this way do not depend on the number of ranks: whoever materializes a model calls ``init(fqn, tensor,
generator)`` for each parameter, with a generator seeded from the name, and keeps the part it owns.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from titan_train.models.names import clean_fqn, unwrap

InitFn = Callable[[str, Tensor, torch.Generator], None]


def init_for(model: nn.Module) -> InitFn:
    """How to fill each parameter of ``model``.

    A model that defines ``init_weights(fqn, tensor, generator)``, as the shipped ones do, says it itself. For any other
    module, each parameter gets what ``reset_parameters`` of the submodule that holds it would give (torch's own
    initialisation for torch's own layers).

    Args:
        model: Shipped or a user's own, on any device, with any wrappers.

    Returns:
        A function that fills a full plain tensor in place, drawing only from the generator.

    Raises:
        ValueError: A parameter has neither, so nobody knows its initial value; the message names all such.
    """
    inner = unwrap(model)
    own = cast("InitFn | None", getattr(inner, "init_weights", None))
    if own is not None:
        return lambda fqn, tensor, generator: own(clean_fqn(fqn), tensor, generator)

    owners = {clean_fqn(name): module for name, module in inner.named_modules()}
    unknown = sorted(
        f"{name}.{parameter}".lstrip(".")
        for name, module in owners.items()
        for parameter in module._parameters
        if module._parameters[parameter] is not None and _reset_of(module) is None
    )
    if unknown:
        raise ValueError(
            f"{type(inner).__name__} does not say how {', '.join(unknown[:5])}{' and others' if unknown[5:] else ''} "
            "start: give the model a method init_weights(fqn, tensor, generator) that fills one parameter in place, or "
            "the submodule that holds it a method reset_parameters()."
        )

    def reset(fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        owner, _, name = clean_fqn(fqn).rpartition(".")
        _reset_one(owners[owner], name, tensor, generator)

    return reset


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    # nn.MultiheadAttention has the underscore
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _reset_one(module: nn.Module, name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Run ``reset_parameters`` on a throw-away copy of the module's own parameters, and keep the one asked for."""
    twin = copy.copy(module)
    twin._parameters = {
        key: None
        if parameter is None
        else nn.Parameter(tensor.detach() if key == name else tensor.new_empty(parameter.shape), requires_grad=False)
        for key, parameter in module._parameters.items()
    }
    reset = _reset_of(twin)
    assert reset is not None
    # reset_parameters draws from the global generator: lend it one draw of ours, then put its state back
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    devices = [tensor.device] if tensor.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        reset()
