"""Initial weights, one full parameter at a time, by name.

Weights made this way do not depend on the number of ranks: whoever materializes a model calls ``init(fqn, tensor,
generator)`` for each parameter, with a generator seeded from the name, and keeps the part it owns.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from titan_fsdp import clean_fqn, conventional_init, unwrap
from torch import Tensor, nn

from titan_train.models.traits import traits_of

InitFn = Callable[[str, Tensor, torch.Generator], None]


def init_for(model: nn.Module) -> InitFn:
    """How to fill each parameter of ``model``.

    A model that defines ``init_weights(fqn, tensor, generator)``, as the shipped ones do, fills them itself. Any other
    model is filled by its own ``_init_weights(module)`` and its submodules' ``reset_parameters()``; see
    `titan_fsdp.conventional_init`. Buffers are never passed to the result: their modules compute them.

    Args:
        model: Shipped or a user's own, on any device, with any wrappers.

    Returns:
        A function that fills a full plain parameter in place, drawing only from the generator.

    Raises:
        ValueError: The initial value of a parameter is unknown; the message names it. Raised here, or by the function
            if an ``init_weights`` or a ``reset_parameters`` turns out to leave part of it as it is.
    """
    inner = unwrap(model)
    own, first = traits_of(inner).init_weights, traits_of(inner).init_parameter
    # Hugging Face's models have a method of this name that takes nothing and fills the whole model.
    if own is not None and _takes_three(own):
        return _filled_whole(inner, own)
    try:
        init = conventional_init(inner)
    except ValueError as err:
        raise ValueError(
            f"{type(inner).__name__} does not say how its weights start: {err} In titan-train, the model may also have "
            "a method init_weights(fqn, tensor, generator) that fills every parameter, one at each call, in place."
        ) from err

    def fill(fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        if first is None or not first(clean_fqn(fqn), tensor, generator):
            init(clean_fqn(fqn), tensor, generator)

    return fill


def _takes_three(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind("fqn", "tensor", "generator")
    except TypeError:
        return False
    return True


def _filled_whole(model: nn.Module, own: InitFn) -> InitFn:
    """``own``, refused where it leaves elements as they were, which is whatever this process's memory held."""

    def fill(fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        looked_at = tensor.is_floating_point() and tensor.numel() > 0
        if looked_at:
            nn.init.constant_(tensor, float("nan"))
        own(clean_fqn(fqn), tensor, generator)
        if looked_at and bool(tensor.detach().max().isnan()):  # unlike isnan().any(), without a mask of its size
            raise ValueError(
                f"{type(model).__name__}.init_weights leaves elements of {clean_fqn(fqn)!r} as they were. Fill it whole, in "
                "place. Or name the method init_parameter, and return False for the others: it replaces what the modules' own "
                "reset_parameters fill, so every parameter still needs a module's method that fills it."
            )

    return fill
