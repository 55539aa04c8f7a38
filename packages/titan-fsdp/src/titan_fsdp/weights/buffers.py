"""Values of buffers that were built on meta: rotary tables, position numbers, running statistics.

A buffer is never passed to a weight init: it holds what its module computes, not a weight. Its value comes from

1. the model's own methods (``reset_parameters``, ``_init_weights``), where they fill it entirely; or
2. the constructor of the module that owns it, run once more (see `titan_fsdp.weights.rebuild`).

What neither gives is refused. Values are computed on the CPU and then copied, so a table has the same bits on every
device. A tensor that is a plain attribute of a module is built in the second way where that is possible. Elsewhere it
stays on meta, where using it is an error: many such tensors are scratch that the module makes anew.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_fsdp.names import clean_fqn
from titan_fsdp.weights.conventions import Conventions, join
from titan_fsdp.weights.rebuild import rebuild


@dataclass(frozen=True)
class Tables:
    """Values for one module's buffers and plain tensor attributes that are on meta."""

    module: nn.Module
    values: dict[str, Tensor]

    def write(self, device: torch.device) -> None:
        """Put the values where they belong; the buffers have been allocated."""
        for leaf, value in self.values.items():
            buffer = self.module._buffers.get(leaf)
            if buffer is not None:
                buffer.copy_(value)
            else:
                setattr(self.module, leaf, value.to(device))


def meta_tables(model: nn.Module, seed_of: Callable[[str], int]) -> list[Tables]:
    """The values of what is on meta in ``model``: every buffer, and tensor attributes where they can be built.

    Args:
        model: The model, without wrappers around it.
        seed_of: From an FQN to the seed for buffers that are drawn at random.

    Raises:
        ValueError: A value cannot be computed. The message names the buffer, the reason, and what to do.
    """
    tables: list[Tables] = []
    conventions: Conventions | None = None
    built: dict[int, nn.Module] = {}
    for raw, module in model.named_modules():
        buffers = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        attributes = [n for n, v in module.__dict__.items() if isinstance(v, Tensor) and v.is_meta]
        if not buffers and not attributes:
            continue
        path = clean_fqn(raw)
        conventions = conventions or Conventions(model)
        values = conventions.buffers(path, buffers, seed_of(path))
        missing = [leaf for leaf in buffers if leaf not in values]
        if missing:
            values |= _constructed(conventions, path, missing, seed_of(path), built)
        if attributes:
            with suppress(ValueError):
                values |= _constructed(conventions, path, attributes, seed_of(path), built)
        tables.append(Tables(module, values))
    return tables


def _constructed(
    conventions: Conventions, path: str, leaves: list[str], seed: int, built: dict[int, nn.Module]
) -> dict[str, Tensor]:
    chain = conventions.chain(path)
    try:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return rebuild(chain, leaves, built)
    except ValueError as err:
        cls = type(chain[0][1]).__name__
        raise ValueError(
            f"buffer {', '.join(repr(join(path, leaf)) for leaf in leaves)} of {cls} is on meta and its value is "
            f"unknown: no reset_parameters() or _init_weights() fills it, and {err}. Fill it in a reset_parameters() "
            f"method of {cls}, or create it on a real device before materialize: a buffer that is not on meta keeps "
            "its value."
        ) from err
