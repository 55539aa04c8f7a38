"""Asynchronous tensor parallelism: a gather or a scatter, and the matrix product beside it, in one overlapped loop.

Problem: a region starts with an all-gather and ends with a reduce-scatter, and the products wait for them.

Idea: cut both into n steps (arXiv:2302.05442; Wang et al., ASPLOS 2023). A product does not need the whole gathered input
at once: rank r multiplies its own part while it receives the next rank's, then that one, and so on around the ring:

    step k of rank r:   multiply part (r + k) mod n        while   part (r + k) goes to r - 1 and r + k + 1 comes in

A reduce-scatter turns the loop inside out. The sum for one rank travels around the ring and collects a summand on each;
a rank computes its summand for the next sum while the last one is on its way:

    step k of rank r:   compute the summand for rank (r - k - 1) mod n   while   the sum of step k - 1 travels to r + 1

The gradient of either is the other: of the gathered product, a scattered sum; of the scattered sum, a gathered product.
The weight's gradient needs the gathered input once more. Only this rank's part is kept from forward to backward, 1/n
of what an all-gather before a linear keeps; the parts go around again, against the direction of the sums, behind the same
products.

Cost: the same bytes as the collectives, in n - 1 messages each; n small products in the place of a large one. All
messages can be hidden if a message takes no longer than a part's product. A sum that travels is rounded to the
activations' dtype at each hop, as in a ring reduce-scatter.

In a pipeline whose schedule splits the backward, the parts go around in the weight pass, and the sums in the pass before.

Limits: no autocast; in a compiled graph each function is an opaque call (`micro_pipeline` is what the compiler has for itself).

Shapes: n ranks; s tokens a rank, S = n * s in all; K inputs, F outputs of a linear; weights ``[F, K]`` as `torch.nn.Linear`.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from titan_cp.methods.compiling import graph_break
from torch import Tensor


def all_gather_matmul(part: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Gather the tokens of all ranks and multiply them by each of ``weights``.

    Args:
        part: This rank's tokens, shape ``[..., s, K]``, as many on every rank.
        weights: Each ``[F_i, K]``, of any sizes.
        group: The ranks.

    Returns:
        For each weight ``[..., S, F_i]``.
    """
    call = _GatherMatmul.apply
    return cast("tuple[Tensor, ...]", _call(call, part, group, *weights))


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: dist.ProcessGroup, bias: Tensor | None = None) -> Tensor:
    """Multiply by ``weight``, sum over the ranks, and keep this rank's tokens of the sum.

    Args:
        x: Shape ``[..., S, K]``, S a multiple of n; each rank has other columns.
        weight: ``[F, K]``, the same columns.
        group: The ranks.
        bias: ``[F]``, added to this rank's summand: give it to one rank.

    Returns:
        Shape ``[..., s, F]``.
    """
    call = _MatmulScatter.apply
    return cast(Tensor, _call(call, x, weight, bias, group))


@graph_break
def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(part, *weights)
        return _gather_products(part, weights, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        part, *weights = ctx.saved_tensors
        group: dist.ProcessGroup = ctx.group
        whole = _RingGather(part, group) if any(ctx.needs_input_grad[2:]) else None
        outs: list[Tensor] = [_with_batch(grad) for grad in grads]
        s = part.shape[-2]

        def summand(rank: int) -> Tensor:
            pieces = [out[:, rank * s : (rank + 1) * s].reshape(-1, out.shape[-1]) for out in outs]
            total = pieces[0] @ weights[0]
            for piece, weight in zip(pieces[1:], weights[1:], strict=True):
                total.addmm_(piece, weight)
            return total

        grad_part = _sum_around_ring(summand, group, whole).view(part.shape) if ctx.needs_input_grad[0] else None
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if whole is not None:
            rows = whole.finish().flatten(0, 1)
            for i, out in enumerate(outs):
                if ctx.needs_input_grad[2 + i]:
                    grad_weights[i] = out.flatten(0, -2).t() @ rows
        return grad_part, None, *grad_weights


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        batched = _with_batch(x)
        s = x.shape[-2] // group.size()

        def summand(rank: int) -> Tensor:
            rows = batched[:, rank * s : (rank + 1) * s].reshape(-1, x.shape[-1])
            return rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())

        return _sum_around_ring(summand, group).view(*x.shape[:-2], s, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        group: dist.ProcessGroup = ctx.group
        grad: Tensor = grads[0]
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        gathered: Tensor | None = None
        if wants_weight or wants_bias:
            gathered = grad.new_empty((_with_batch(grad).shape[0], group.size(), *grad.shape[-2:]))
        products = _gather_products(grad, [weight.t()] if wants_x else [], group, keep=gathered)
        grad_weight = grad_bias = None
        if gathered is not None:
            rows = gathered.view(-1, grad.shape[-1])
            grad_weight = rows.t() @ x.flatten(0, -2) if wants_weight else None
            grad_bias = rows.sum(0) if wants_bias else None
        return products[0] if products else None, grad_weight, grad_bias, None


def _gather_products(
    part: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, keep: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The products of every rank's part with every weight; the parts themselves go into ``keep`` ``[B, n, s, K]``."""
    n, (batch, s, _) = group.size(), _with_batch(part).shape
    outs = [part.new_empty((batch, n, s, weight.shape[0])) for weight in weights]

    def multiply(rank: int, tokens: Tensor) -> None:
        rows = tokens.view(batch * s, -1)
        for out, weight in zip(outs, weights, strict=True):
            if batch == 1:
                torch.mm(rows, weight.t(), out=out[0, rank])
            else:  # the rows of one rank are not beside each other in the output
                out[:, rank] = (rows @ weight.t()).view(batch, s, -1)
        if keep is not None:
            keep[:, rank] = tokens

    _pass_around_ring(_with_batch(part).contiguous(), multiply, group)
    return tuple(out.view(*part.shape[:-2], n * s, out.shape[-1]) for out in outs)


def _pass_around_ring(own: Tensor, use: Callable[[int, Tensor], None], group: dist.ProcessGroup) -> None:
    """Show every rank's tensor to ``use(rank, tensor)``, this rank's first, each while the next one is on its way."""
    n, rank = group.size(), group.rank()
    current = own
    for step in range(n):
        last = step == n - 1
        incoming = None if last else torch.empty_like(current)
        works = [] if incoming is None else _exchange(current, incoming, to=rank - 1, source=rank + 1, group=group)
        use((rank + step) % n, current)
        _wait(works)
        if incoming is not None:
            current = incoming


def _sum_around_ring(
    summand: Callable[[int], Tensor], group: dist.ProcessGroup, meanwhile: "_RingGather | None" = None
) -> Tensor:
    """The sum over ranks of ``summand(this rank)``, each summand computed while a sum is on its way."""
    n, rank = group.size(), group.rank()
    total = summand((rank - 1) % n)
    for step in range(1, n):
        incoming = torch.empty_like(total)
        works = _exchange(total, incoming, to=rank + 1, source=rank - 1, group=group)
        if meanwhile is not None:
            meanwhile.advance()
        following = summand((rank - step - 1) % n)
        _wait(works)
        total = incoming.add_(following)  # not into the product, which selective checkpointing may keep
    return total


class _RingGather:
    """The tokens of all ranks, one hop at a time, behind something else."""

    def __init__(self, part: Tensor, group: dist.ProcessGroup) -> None:
        """Start the first hop."""
        self._group, self._rank, self._n = group, group.rank(), group.size()
        batched = _with_batch(part)
        self._parts = batched.new_empty((self._n, *batched.shape))
        self._parts[self._rank] = batched
        self._hop = 0
        self._works: list[dist.Work] = []
        self._start()

    def advance(self) -> None:
        """Finish the hop that is under way, and start the next one."""
        _wait(self._works)
        self._works = []
        self._start()

    def finish(self) -> Tensor:
        """The rest of the hops, and all tokens: ``[B, S, K]``."""
        while self._works:
            self.advance()
        return self._parts.movedim(0, 1).flatten(1, 2)

    def _start(self) -> None:
        if self._hop == self._n - 1:
            return
        send, receive = ((self._rank + self._hop + ahead) % self._n for ahead in (0, 1))
        self._works = _exchange(
            self._parts[send], self._parts[receive], to=self._rank - 1, source=self._rank + 1, group=self._group
        )
        self._hop += 1


def _exchange(send: Tensor, receive: Tensor, *, to: int, source: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start one hop: both tensors must stay as they are until every returned work has been waited for."""
    n = group.size()
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, group=group, group_peer=to % n),
            dist.P2POp(dist.irecv, receive, group=group, group_peer=source % n),
        ]
    )


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _with_batch(x: Tensor) -> Tensor:
    """``[..., S, K]`` as ``[B, S, K]``."""
    return x.flatten(0, -3) if x.ndim > 3 else x if x.ndim == 3 else x.unsqueeze(0)
