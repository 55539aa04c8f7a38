"""`MainGradients`: weight gradients summed over micro-batches in float32, by the products themselves.

Autograd sums the weight gradients of micro-batches in the weight's dtype. With bfloat16 weights, a sum of many small gradients
stops growing after eight bits; and each sum is a pass over memory that reads and writes more than the product wrote.
Megatron-LM calls the remedy gradient accumulation fusion: the product adds to a float32 buffer, ``weight.main_grad``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from titan_fp8.layers.accumulate import AccumulatingLinear
from titan_fp8.layers.linear import Float8Linear


class MainGradients:
    """Sums weight gradients of linear layers in float32 inside a ``with`` block, the backwards of one optimizer step::

        sums = titan_fp8.MainGradients(model)
        for microbatches in data:
            with sums:
                for x in microbatches:
                    loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    Inside, a backward adds to ``weight.main_grad`` and leaves ``weight.grad`` alone. On exit ``grad`` is the sum: the buffer
    itself for float32 weights, a rounded copy for others, whose optimizer may take the sums from `items` instead. Whatever
    reached ``grad`` another way (tied weights, compiled graphs, weight gradients that a pipeline runs apart) is added to it.

    A weight that no backward reached has a gradient of zeros, so that all ranks have one to reduce; an optimizer that decays
    weights decays it. Set its ``grad`` to None after the block where that is not meant.

    Take gradients with ``backward()``, not ``torch.autograd.grad``, which would find none for these weights. Nothing is reduced
    over ranks: with ``DistributedDataParallel``, reduce ``main_grad``. Sharded weights are left to FSDP, which sums in float32
    by itself.

    Args:
        models: Modules with `Float8Linear` and ``nn.Linear`` layers, after they were converted and wrapped. Layers that are
            exactly ``nn.Linear`` become a subclass in place, with the same parameters and names. Their weights may be replaced
            or moved between blocks; sums start anew then.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._layers: list[nn.Linear] = []
        self._sums: dict[nn.Parameter, Tensor] = {}
        for layer in (module for model in models for module in model.modules()):
            if type(layer) is nn.Linear:
                layer.__class__ = AccumulatingLinear
            if not isinstance(layer, (Float8Linear, AccumulatingLinear)):
                continue
            if type(layer.weight) is nn.Parameter:
                self._layers.append(layer)

    def __enter__(self) -> "MainGradients":
        weights = dict.fromkeys(layer.weight for layer in self._layers if type(layer.weight) is nn.Parameter)
        self._sums = {w: _buffer_for(w, self._sums.get(w)) for w in weights}
        for w, buffer in self._sums.items():
            if not w.requires_grad:
                continue
            if w.grad is buffer:  # gradients were not dropped: go on with the sum
                w.grad = None
            else:
                buffer.zero_()
            w.main_grad = buffer  # pyright: ignore[reportAttributeAccessIssue]
        return self

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for w, buffer in self._sums.items():
            if not hasattr(w, "main_grad"):
                continue
            if w.grad is not None:
                buffer.add_(w.grad)
            w.grad = buffer if w.dtype == torch.float32 else buffer.to(w.dtype)
            del w.main_grad  # pyright: ignore[reportAttributeAccessIssue]

    def items(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each weight with its float32 sum ``[N, K]``, of the last block."""
        return iter(self._sums.items())


def _buffer_for(w: nn.Parameter, before: Tensor | None) -> Tensor:
    """The weight's buffer of ``before``, or zeros where it does not fit."""
    if before is not None and before.shape == w.shape and before.device == w.device:
        return before
    return torch.zeros_like(w, dtype=torch.float32, requires_grad=False)
