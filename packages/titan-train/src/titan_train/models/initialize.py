"""Initial weights, one full parameter at a time, by name.

Weights made this way do not depend on the number of ranks: whoever materializes a model calls ``init(fqn, tensor,
generator)`` for each parameter, with a generator seeded from the name, and keeps the part it owns.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from titan_fsdp import clean_fqn, unwrap
from torch import Tensor, nn

InitFn = Callable[[str, Tensor, torch.Generator], None]


def init_for(model: nn.Module) -> InitFn:
    """How to fill each parameter of ``model``.

    A model that defines ``init_weights(fqn, tensor, generator)``, as the shipped ones do, says it itself. For any other
    module, each parameter and each buffer on meta gets what ``reset_parameters`` of the submodule that holds it would
    give (torch's own initialisation for torch's own layers).

    Args:
        model: Shipped or a user's own, on any device, with any wrappers.

    Returns:
        A function that fills a full plain tensor in place, drawing only from the generator.

    Raises:
        ValueError: A parameter or a buffer on meta has neither, so nobody knows its initial value; the message names
            it. Raised here, or by the function if a ``reset_parameters`` turns out to leave it as it is.
    """
    inner = unwrap(model)
    own = cast("InitFn | None", getattr(inner, "init_weights", None))
    if own is not None:
        return lambda fqn, tensor, generator: own(clean_fqn(fqn), tensor, generator)

    owners = {clean_fqn(name): module for name, module in inner.named_modules()}
    unknown = sorted(
        f"{path}.{name}".lstrip(".")
        for path, module in owners.items()
        for name, value in _own_tensors(module).items()
        if (isinstance(value, nn.Parameter) or value.is_meta) and _reset_of(module) is None
    )
    if unknown:
        raise ValueError(_UNKNOWN.format(model=type(inner).__name__, names=", ".join(unknown[:5])))

    def reset(fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        owner, _, name = clean_fqn(fqn).rpartition(".")
        _reset_one(owners[owner], name, tensor, generator)
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(_UNKNOWN.format(model=type(inner).__name__, names=fqn))

    return reset


_UNKNOWN = (
    "{model} does not say how {names} start: give the model a method init_weights(fqn, tensor, generator) that fills "
    "one parameter or buffer in place, or the submodule that holds it a method reset_parameters() that does."
)


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    # nn.MultiheadAttention has the underscore
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that the module itself holds, by name."""
    return {name: value for name, value in (*module._parameters.items(), *module._buffers.items()) if value is not None}


def _reset_one(module: nn.Module, name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Run ``reset_parameters`` on a throw-away copy of what the module itself holds, and keep the tensor asked for.

    A floating-point tensor that ``reset_parameters`` leaves out stays NaN.
    """
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    twin._buffers = dict(module._buffers)
    for key, value in _own_tensors(module).items():
        stand_in = tensor if key == name else torch.empty(value.shape, dtype=value.dtype, device=tensor.device)
        if isinstance(value, nn.Parameter):
            twin._parameters[key] = nn.Parameter(stand_in.detach(), requires_grad=False)
        else:
            twin._buffers[key] = stand_in
    reset = _reset_of(twin)
    assert reset is not None
    # reset_parameters draws from the global generator: lend it one draw of ours, then put its state back
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    devices = [tensor.device] if tensor.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        reset()
