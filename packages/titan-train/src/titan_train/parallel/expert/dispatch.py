"""Send every token to the ranks that hold its experts, and bring the results back.

Problem: rank r of n holds experts r * E / n and following; the K experts of a token may be on any ranks, and nobody knows
before routing how many rows go where.

Steps (GShard, arXiv:2006.16668; without capacity, as MegaBlocks, arXiv:2211.15841):

1. Sort this rank's rows by expert, so that what goes to one rank is contiguous, in the order of the ranks.
2. Tell every rank how many rows each of its experts gets: an all-to-all of E integers. The sizes of the next step must be
   known on the host, which is the layer's one host sync.
3. All-to-all of the rows. They arrive sorted by (source, expert).
4. Sort them by (expert, source), stably: each expert then sees all ranks' rows in the order of one process that held the
   whole batch, so that its gradient sums up in the same order.
5. The experts compute; then the way back: unsort, all-to-all with the sizes swapped, add each token's rows by weight.

Cost: 2 * T * K rows of width d out and as many in, each in forward and in backward; T * K * (n - 1) / n of them travel if
the load is even. Activations follow the load: with all tokens on one rank's experts that rank holds them all.

Sizes change from step to step, which fragments the allocator and makes a compiler specialise: ``pad_rows_to`` rounds the
rows that the experts see up to a multiple. What padding rows hold is undefined; they are cut off again in forward and in
backward, and never mix with the others.

Shapes: n ranks, E experts, e = E / n here, T tokens, K experts a token, R rows received, d width.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from titan_train.models.common.moe.dispatch import gather_tokens, permute_rows, sort_rows, spread_tokens


class ExpertParallelDispatch(nn.Module):
    """Routed experts that are spread over ranks; takes the place of `LocalDispatch`."""

    def __init__(self, group: dist.ProcessGroup, *, pad_rows_to: int = 1) -> None:
        """Dispatch over ``group``, whose rank r holds the r-th part of the experts."""
        super().__init__()
        self._group = group
        self._multiple = pad_rows_to

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        counts: Tensor,
        experts: nn.Module,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Apply routed experts; collective over the group.

        Args:
            x: This rank's tokens ``[T, d]``; ranks may have different numbers of them.
            weights: ``[T, K]`` float32.
            chosen: Experts of each token among all E, ``[T, K]`` int64.
            counts: Rows of each of the E experts, ``[E]`` int64.
            experts: This rank's, called as ``experts(rows, counts)`` with counts ``[e]``.
            beside: Computes something to be added to the result, ``[T, d]``: the shared expert, whose products hide the
                way back.

        Returns:
            Weighted sums ``[T, d]``, in the dtype of ``x``.
        """
        order, inverse = sort_rows(chosen.flatten())
        rows = spread_tokens(x, order, inverse, chosen.shape[1])

        received = self._exchange_counts(counts)  # [n, e]
        sent_sizes, received_sizes = self._sizes(counts, received)
        arrived = functional.wait_tensor(self._exchange(rows, received_sizes, sent_sizes))

        by_expert, by_source = self._order_of_arrivals(received, sum(received_sizes))
        sorted_rows = permute_rows(arrived, by_expert, by_source)
        out = permute_rows(self._compute(sorted_rows, received.sum(0), experts), by_source, by_expert)

        returning = self._exchange(out, sent_sizes, received_sizes)
        added = None if beside is None else beside()
        out = gather_tokens(functional.wait_tensor(returning), weights, order, inverse)
        return out if added is None else out + added

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """How many rows each rank sends to each of this rank's experts, ``[n, e]``."""
        exchanged = functional.all_to_all_single(counts, None, None, self._group)
        return functional.wait_tensor(exchanged).view(self._group.size(), -1)

    def _sizes(self, counts: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
        """Rows sent to each rank and received from each; the one host sync."""
        both = torch.stack([counts.view(self._group.size(), -1).sum(1), received.sum(1)])
        sent, arriving = both.tolist()
        return sent, arriving

    def _exchange(self, rows: Tensor, output_sizes: list[int], input_sizes: list[int]) -> Tensor:
        """Send rows; the result has to be waited for."""
        return functional.all_to_all_single_autograd(rows, output_sizes, input_sizes, self._group)

    def _order_of_arrivals(self, received: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """The stable order that takes rows from (source, expert) to (expert, source), and its inverse."""
        n, e = received.shape
        expert = torch.arange(e, device=received.device).repeat(n)
        return sort_rows(expert.repeat_interleave(received.flatten(), output_size=num_rows))

    def _compute(self, rows: Tensor, counts: Tensor, experts: nn.Module) -> Tensor:
        padding = -rows.shape[0] % self._multiple
        if padding == 0:
            return experts(rows, counts)
        return experts(F.pad(rows, (0, 0, 0, padding)), counts)[: rows.shape[0]]
