"""The four collectives of tensor parallelism, each with the backward that it needs.

| forward                | backward               | where                                                        |
| ---------------------- | ---------------------- | ------------------------------------------------------------ |
| gather the sequence    | sum, keep own part     | into a region, tokens split over the ranks                   |
| sum, keep own part     | gather the sequence    | out of a region, tokens split over the ranks                 |
| nothing                | sum                    | into a region, every rank holds all tokens                   |
| sum                    | nothing                | out of a region, every rank holds all tokens                 |

A *region* is what lies between a matrix cut by rows and one cut by columns: its input is whole on every rank, its output
a partial sum. The first two rows are sequence parallelism (arXiv:2205.05198): the same bytes on the wire as the last
two (arXiv:1909.08053), since an all-reduce is a reduce-scatter and an all-gather, but everything between two regions
(norms, residuals, dropout) is computed and kept for 1/n of the tokens.

Eagerly these are ``torch.distributed``'s own calls. In a compiled graph they are the functional collectives, which the
compiler can see, reorder and fuse with a neighbouring matrix product; that module is private to torch, and
``tests/parallel/tensor/test_compile.py`` names the versions it was checked on.

Shapes: n ranks; a part is ``[..., s, ...]`` and the whole ``[..., n * s, ...]`` along ``dim``.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.torch_version import TorchVersion

_LOSES_GRADIENTS = TorchVersion(torch.__version__) < "2.15"
"""torch 2.11, not 2.15: the gradient of a collective's result that leaves a compiled graph as it is becomes zero."""


def gather_parts(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, in rank order along ``dim``; the gradient is summed over the ranks and cut again.

    Args:
        part: Shape ``[..., s, ...]``, the same on every rank.
        dim: The dimension that was cut, not negative.
        group: The ranks.

    Returns:
        Shape ``[..., n * s, ...]``, contiguous.
    """
    return cast(Tensor, _Gather.apply(part, dim, group))


def scatter_sum(partial: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Own part of the sum over ranks; the gradient is gathered.

    Args:
        partial: Each rank's summand, shape ``[..., n * s, ...]``.
        dim: The dimension to cut, not negative.
        group: The ranks.

    Returns:
        Shape ``[..., s, ...]``, contiguous.
    """
    return cast(Tensor, _ScatterSum.apply(partial, dim, group))


def share(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``whole``, which every rank has and uses for a part of the work; the gradient is summed over the ranks."""
    return cast(Tensor, _Share.apply(whole, group))


def sum_partials(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, on every rank; the gradient is every rank's own, since all of them hold the same."""
    return cast(Tensor, _SumPartials.apply(partial, group))


def all_gather(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`gather_parts` without a gradient."""
    if torch.compiler.is_compiling():
        stacked = functional.all_gather_tensor(part.contiguous(), 0, group)
        # spelled as torch's micro-pipelining looks for it
        return stacked if dim == 0 else torch.cat(torch.chunk(stacked, group.size(), dim=0), dim=dim)
    n = group.size()
    stacked = part.new_empty((n * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(stacked, part.contiguous(), group=group)
    return unstack(stacked, n, dim)


def reduce_scatter(partial: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`scatter_sum` without a gradient."""
    if torch.compiler.is_compiling():
        return functional.reduce_scatter_tensor(partial.contiguous(), "sum", dim, group)
    n = group.size()
    parts = partial.unflatten(dim, (n, partial.shape[dim] // n)).movedim(dim, 0).contiguous()
    own = parts.new_empty(parts.shape[1:])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=group)
    return own


def all_reduce(partial: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """A new tensor: the sum (or "max") over ranks."""
    if torch.compiler.is_compiling():
        return functional.all_reduce(partial.contiguous(), op, group)
    total = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
    return total


def unstack(stacked: Tensor, n: int, dim: int) -> Tensor:
    """Parts one after the other along dimension 0, ``[n * a, ...]``, put one after the other along ``dim`` instead."""
    if dim == 0:
        return stacked
    return stacked.unflatten(0, (n, -1)).movedim(0, dim).flatten(dim, dim + 1).contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _with_gradient(all_gather(part, dim, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce_scatter(grads[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _with_gradient(reduce_scatter(partial, dim, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_gather(grads[0], ctx.dim, ctx.group), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_reduce(grads[0], ctx.group), None


class _SumPartials(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _with_gradient(all_reduce(partial, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _with_gradient(result: Tensor) -> Tensor:
    return result.clone() if _LOSES_GRADIENTS and torch.compiler.is_compiling() else result
