"""Bring every token to its experts and back, without dropping any.

Each token becomes K rows; a stable sort puts the rows of an expert next to each other, the experts compute, and the
inverse permutation brings the rows back, where a token's K results are added with their weights. The sum over a
token's experts is always taken in the order of its choices, so results do not depend on where the experts are.

The two moves are autograd functions because they are permutations: their gradients are gathers too, while autograd's
own would be scattered additions, which are slower and on GPUs not deterministic.

Shapes: T tokens, K experts a token, R = T * K rows, d width, E experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class LocalDispatch(nn.Module):
    """All experts are here: sort, compute, unsort."""

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        counts: Tensor,
        experts: nn.Module,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Apply routed experts.

        Args:
            x: Tokens ``[T, d]``.
            weights: ``[T, K]`` float32.
            chosen: Experts of each token, ``[T, K]`` int64.
            counts: Rows of each expert, ``[E]`` int64.
            experts: Called as ``experts(rows, counts)``.
            beside: Computes something to be added to the result, ``[T, d]``; a dispatch that travels does so meanwhile.

        Returns:
            Weighted sums ``[T, d]``, in the dtype of ``x``.
        """
        order, inverse = sort_rows(chosen.flatten())
        rows = spread_tokens(x, order, inverse, chosen.shape[1])
        out = gather_tokens(experts(rows, counts), weights, order, inverse)
        return out if beside is None else out + beside()


def sort_rows(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The stable order that sorts ``keys`` ``[R]``, and its inverse."""
    order = keys.argsort(stable=True)
    places = torch.arange(order.shape[0], device=order.device)
    return order, torch.empty_like(order).scatter_(0, order, places)


def spread_tokens(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Each token ``copies`` times, in ``order``: ``[T, d]`` to ``[T * copies, d]``."""
    return _Spread.apply(x, order, inverse, copies)  # pyright: ignore[reportReturnType]


def permute_rows(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """``rows[order]``, with a gradient that is a gather as well."""
    return _Spread.apply(rows, order, inverse, 1)  # pyright: ignore[reportReturnType]


def gather_tokens(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Undo `spread_tokens`, adding a token's rows by their weights ``[T, K]`` in float32: ``[T, d]``."""
    return _Gather.apply(rows, weights, order, inverse)  # pyright: ignore[reportReturnType]


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grad_outputs[0].index_select(0, inverse)
        return grad.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else grad, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        apart = rows.index_select(0, inverse).unflatten(0, weights.shape)
        return _cast((_cast(apart, weights.dtype) * weights.unsqueeze(-1)).sum(1), rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        grad = _cast(grad_outputs[0].index_select(0, order // weights.shape[1]), weights.dtype)
        grad_rows = grad * weights.flatten().index_select(0, order).unsqueeze(-1)
        grad_weights = (grad * _cast(rows, weights.dtype)).sum(-1).index_select(0, inverse)
        return _cast(grad_rows, rows.dtype), grad_weights.view_as(weights), None, None


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Not plain .to: torch 2.11 compiles an autograd function with a cast to the same dtype in it to wrong gradients.
    return x if x.dtype == dtype else x.to(dtype)
