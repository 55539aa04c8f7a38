"""Grouped matrix products, as in a mixture of experts, with a deferrable weight gradient."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from titan_pipeline.runtime.weight_grad.queue import Deferring


def grouped_linear(engine: Deferring | None, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One matrix product per group of rows, as in a mixture of experts, with a deferrable weight gradient.

    Args:
        engine: The stage's engine; None, or one whose stage is not running, does not defer.
        x: Rows sorted by group, shape ``[N, K]``.
        weight: Shape ``[G, K, M]``.
        offsets: End of each group, shape ``[G]``, integer, ``offsets[-1] == N``.

    Returns:
        Shape ``[N, M]``.
    """
    ends = offsets.tolist()
    if engine is None or not engine.active or not weight.requires_grad:
        return _by_group(x, ends, lambda g, rows: rows.mm(weight[g]))
    return cast(Tensor, _GroupedLinear.apply(engine.anchor, x, weight.detach(), [weight], ends, engine))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, owner: list[Tensor], ends: list[int], engine: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.ends, ctx.engine = owner[0], ends, engine
        return _by_group(x, ends, lambda g, rows: rows.mm(weight[g]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        ends = ctx.ends
        grad_x = _by_group(grad, ends, lambda g, rows: rows.mm(weight[g].mH)) if ctx.needs_input_grad[1] else None
        ctx.engine.defer(ctx.parameter, _grouped_weight_grad, x, grad, ends)
        return None, grad_x, None, None, None, None


def _grouped_weight_grad(x: Tensor, grad: Tensor, ends: list[int]) -> Tensor:
    starts = [0, *ends[:-1]]
    return torch.stack([x[a:b].mH.mm(grad[a:b]) for a, b in zip(starts, ends, strict=True)])


def _by_group(rows: Tensor, ends: list[int], product: Callable[[int, Tensor], Tensor]) -> Tensor:
    starts = [0, *ends[:-1]]
    return torch.cat([product(g, rows[a:b]) for g, (a, b) in enumerate(zip(starts, ends, strict=True))])
