"""What a step's activations are like: by block their size, by float8 layer what the cast loses. On this rank, on demand.

Each figure waits for the device, so this is for a step now and then (`metrics.activations_every`).
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import titan_fp8
import torch
from torch import Tensor, nn

from titan_train.parallel.stages import layers_of


@contextmanager
def recorded_activations(parts: Sequence[nn.Module]) -> Generator[dict[str, Any]]:
    """Record the forwards and backwards inside the block.

    Args:
        parts: The model, or this rank's pipeline stages.

    Yields:
        Filled when the block ends: ``blocks``, the root mean square and the largest magnitude of each block's output, by
        the block's number; with float8 layers also ``float8``, by layer and by tensor (input, weight, grad) the largest
        magnitude and the share of values that underflow.
    """
    found: dict[str, Any] = {}
    blocks: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        casts = [stack.enter_context(titan_fp8.record_stats(part)) for part in parts]
        for part in parts:
            for name, block in _blocks(part):
                stack.callback(block.register_forward_hook(_recorder(blocks, name)).remove)
        yield found
    found["blocks"] = blocks
    float8 = {
        name: {tensor: [stats.amax, stats.underflow] for tensor, stats in tensors.items()}
        for cast in casts
        for name, tensors in cast.items()
    }
    if float8:
        found["float8"] = float8


def _blocks(part: nn.Module) -> list[tuple[str, nn.Module]]:
    names = {id(module): name for name, module in part.named_modules()}
    try:
        return [(names[id(block)], block) for block in layers_of(part)]
    except AttributeError:  # a model that does not say which its blocks are
        return [(name, child) for name, child in part.named_children()]


def _recorder(blocks: dict[str, dict[str, float]], name: str) -> Any:
    def record(_module: nn.Module, _args: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output  # pyright: ignore[reportUnknownVariableType]
        if isinstance(first, Tensor) and first.is_floating_point():
            with torch.no_grad():
                values = first.detach().float()
                blocks[name] = {"rms": float(values.square().mean().sqrt()), "amax": float(values.abs().max())}

    return record
