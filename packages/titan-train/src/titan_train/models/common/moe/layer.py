"""A mixture of experts in place of a feed-forward: route, dispatch, compute, add, and watch the balance.

Every token goes to K of E experts and through the shared expert; nothing is dropped, however uneven the load. What the
layer must learn about the load costs no extra pass, and is written down in backward, by one autograd function on the
weights' way: backward runs once for each micro-batch, while forward may run again under activation checkpointing. The
same function hands the auxiliary losses their gradient, so a pipeline stage needs no second output.

The balance loss is taken over each row of the batch, as DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, equations
17 to 20): the sum over experts of f * P, with f the share of the row's choices that fell on the expert, times E, and P
the mean of the row's normalised scores for it. It adds over rows, so micro-batches, data parallelism and accumulation do
not change it; where rows are cut over ranks, `MoE.sequence_group` names them and f is summed over them. The z-loss
(arXiv:2202.08906) is the mean over a row of the squared log-sum-exp of the logits. Both are means over the rows of the
whole step, whose number `set_aux_scale` sets; until then, and in eval mode, they give no gradient.

Padding is not observed: it counts in no load, bias or loss, as if rows ended before it. Its tokens are all alike and would choose
the same experts, for which the ranks of the others would wait; they go to all experts in turn.

Shapes: B rows, S tokens of a row, T = B * S, d width, E experts, K experts a token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import _functional_collectives as functional

from titan_train.models.common.args import MoEArgs
from titan_train.models.common.moe.dispatch import LocalDispatch
from titan_train.models.common.moe.experts import Experts
from titan_train.models.common.moe.router import Router, Routing


class MoE(nn.Module):
    """A mixture-of-experts feed-forward."""

    expert_bias: Tensor | None
    load: Tensor
    losses: Tensor

    def __init__(self, args: MoEArgs, shared_experts: nn.Module | None = None) -> None:
        """Build the layer.

        Args:
            args: Its shape.
            shared_experts: What every token goes through, ``[B, S, d]`` to ``[B, S, d]``, or None.
        """
        super().__init__()
        self.args = args
        self.router = Router(args)
        self.experts = Experts(args.num_experts, args.dim, args.expert_ffn_dim)
        self.shared_experts = shared_experts
        self.dispatch: nn.Module = LocalDispatch()
        """Brings rows to the experts; expert parallelism replaces it."""
        self.register_buffer("expert_bias", torch.zeros(args.num_experts) if args.bias_rate > 0 else None)
        self.sequence_group: dist.ProcessGroup | None = None
        """The ranks that hold parts of the same rows (context and sequence parallelism)."""
        self.aux_scale = 0.0
        """What the gradient of a row's auxiliary losses is multiplied by; 0, until `set_aux_scale` sets it, is none."""
        self.count_on(self.router.gate.weight.device)

    def reset_parameters(self) -> None:
        """Start the expert bias at zero; the parameters belong to the submodules."""
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[B, S, d]``; each row is a sequence, or this rank's part of one.
            padding: Which of these tokens only fill a row, ``[B, S]`` bool; None: there are none.

        Returns:
            ``[B, S, d]``.

        Raises:
            ValueError: ``padding`` is of other tokens than ``x``.
        """
        if padding is not None and padding.shape != x.shape[:-1]:
            raise ValueError(
                f"a mixture of experts was given padding of {list(padding.shape)} for tokens of {list(x.shape[:-1])}. Under "
                "sequence parallelism, give the layer the style 'positions' in parallel.tp_plan: it then takes its rank's part."
            )
        tokens = x.flatten(0, -2)
        # where parameters are offloaded to the host, what is not a parameter is there too
        bias = None if self.expert_bias is None else self.expert_bias.to(x.device)
        if self.load.device != x.device:
            self.count_on(x.device)
        routing: Routing = self.router(tokens, bias)
        chosen = routing.experts
        if padding is not None:
            in_turn = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen) % self.args.num_experts
            chosen = torch.where(padding.reshape(-1, 1), in_turn, chosen)
        by_row = count_choices(chosen, x.shape[0], self.args.num_experts)
        observed = self.training and torch.is_grad_enabled()
        weights = self._observe(routing, by_row, padding) if observed else routing.weights
        shared = self.shared_experts
        beside = None if shared is None else lambda: shared(x).flatten(0, -2)
        return self.dispatch(tokens, weights, chosen, by_row.sum(0), self.experts, beside).view_as(x)

    def _observe(self, routing: Routing, by_row: Tensor, padding: Tensor | None) -> Tensor:
        """The routing weights; their backward counts the load and gives the auxiliary losses their gradient."""
        args, rows = self.args, by_row.shape[0]
        if padding is not None:
            by_row = count_choices(routing.experts, rows, args.num_experts, padding)
        trained = self.aux_scale != 0 and (args.balance_loss > 0 or args.z_loss > 0)
        with torch.no_grad():
            of_row = by_row
            if self.sequence_group is not None and trained:
                of_row = functional.all_reduce(by_row, "sum", self.sequence_group)
            of_row = of_row.to(routing.scores.dtype)
            length = of_row.sum(-1, keepdim=True) / args.experts_per_token  # tokens of the whole row, [B, 1]
            if padding is not None:
                length = length.clamp(min=1)  # nothing but padding
            share = of_row * args.num_experts / (length * args.experts_per_token)
        scores, logits = routing.scores, routing.logits
        if not trained:  # only looked at
            scores, logits = scores.detach(), logits.detach()
        if args.scores == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        scores, squares = (t.unflatten(0, (rows, -1)) for t in (scores, logits.logsumexp(-1).square()))
        if padding is not None:
            scores, squares = scores.masked_fill(padding.unsqueeze(-1), 0.0), squares.masked_fill(padding, 0.0)
        balance = (scores.sum(1) / length * share).sum()
        z = (squares.sum(1, keepdim=True) / length).sum()
        aux = args.balance_loss * balance + args.z_loss * z
        tokens = by_row.sum(-1, keepdim=True) / args.experts_per_token
        noted = torch.stack([balance.detach(), z.detach(), (tokens / length).sum().to(balance.dtype)])
        counts = by_row.sum(0)
        return _Observe.apply(routing.weights, aux, counts, noted, self.load, self.losses, self.aux_scale)  # pyright: ignore[reportReturnType]

    def _apply(self, fn: Any, recurse: bool = True) -> "MoE":
        # A model cast to bfloat16 keeps the bias in float32, where steps of 1e-3 do not vanish; counts restart.
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        self.count_on(self.router.gate.weight.device)
        return self

    def count_on(self, device: torch.device) -> None:
        """Start counting anew on ``device``, where the rows are; forward does it by itself, at the price of a graph break."""
        # Not buffers: DistributedDataParallel would overwrite every rank's counts with those of rank 0.
        self.load = torch.zeros(self.args.num_experts, dtype=torch.int64, device=device)
        self.losses = torch.zeros(3, device=device)


def count_choices(experts: Tensor, rows: int, num_experts: int, padding: Tensor | None = None) -> Tensor:
    """How often each row's tokens, or those that are no ``padding`` ``[rows, S]``, chose each expert: ``[T, K]`` to ``[rows, E]``
    int64.
    """
    ones = torch.ones_like(experts)
    if padding is not None:
        ones = ones.masked_fill(padding.reshape(-1, 1), 0)
    counts = torch.zeros(rows, num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add(1, experts.view(rows, -1), ones.view(rows, -1))


class _Observe(Function):
    """Identity on the weights; in backward, adds to the step's counts and passes ``scale`` to the auxiliary loss."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        aux: Tensor,
        counts: Tensor,
        noted: Tensor,
        load: Tensor,
        losses: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(counts, noted)
        ctx.load, ctx.losses, ctx.scale = load, losses, scale
        ctx.aux_dtype = aux.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        counts, noted = ctx.saved_tensors
        ctx.load.add_(counts)
        ctx.losses.add_(noted)
        grad = grad_outputs[0]
        return grad, grad.new_full((), ctx.scale, dtype=ctx.aux_dtype), None, None, None, None, None
