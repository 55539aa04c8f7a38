"""Which experts each token goes to, and with which weight.

The gate gives every token a logit for each expert, always in float32: a rounding there would send tokens elsewhere. The
scores are the logits' sigmoid (DeepSeek-V3) or softmax (Qwen3, DeepSeek-V2); the K experts with the highest scores get
the token. Two things change the choice but not the weights:

- a bias for each expert, which balancing moves (`titan_train.models.common.moe.balance`; arXiv:2408.15664);
- groups: experts are split into equal groups, and only experts of the best groups can be chosen, so that a token
  travels to few nodes. A group's score is the highest of its experts' (DeepSeek-V2, arXiv:2405.04434, section 2.2.2) or
  the sum of its best two (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

Shapes: T tokens, d width, E experts, K experts a token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.models.common.args import MoEArgs


class Routing(NamedTuple):
    """Where tokens go."""

    weights: Tensor
    """Weight of each chosen expert, ``[T, K]`` float32."""
    experts: Tensor
    """The chosen experts, ``[T, K]`` int64, best first."""
    logits: Tensor
    """Of the gate, ``[T, E]`` float32."""
    scores: Tensor
    """Sigmoid or softmax of the logits, ``[T, E]`` float32."""


class Gate(nn.Module):
    """A linear layer without bias that computes in float32 for any dtype of its weight."""

    keeps_output_dtype = True
    """Kept in float32 by `parallel.keep_fp32`, its logits stay so."""

    def __init__(self, dim: int, num_experts: int) -> None:
        """Build the weight ``[E, d]``."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weight, where the model does not fill it itself."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, d]`` to ``[T, E]`` float32 (float64 if the weight is)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))


class Router(nn.Module):
    """Token-choice top-k routing."""

    keeps_output_dtype = True
    """As of the gate: the weights too."""

    def __init__(self, args: MoEArgs) -> None:
        """Build the gate."""
        super().__init__()
        self.args = args
        self.gate = Gate(args.dim, args.num_experts)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Routing:
        """Route tokens.

        Args:
            x: Tokens ``[T, d]``.
            bias: Added to the scores for the choice alone, ``[E]``.
        """
        args = self.args
        logits = self.gate(x)
        scores = logits.sigmoid() if args.scores == "sigmoid" else logits.softmax(-1)
        experts = self._choose(scores.detach() if bias is None else scores.detach() + bias)
        weights = scores.gather(-1, experts)
        if args.normalize_weights:
            # sigmoid scores of a confident "none of them" are all near zero: keep the division finite
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(weights * args.route_scale, experts, logits, scores)

    def _choose(self, preference: Tensor) -> Tensor:
        """The K experts of the highest preference, ``[T, K]``, from the best groups only."""
        args = self.args
        if args.num_groups > 1:
            grouped = preference.unflatten(-1, (args.num_groups, -1))
            counted = 1 if args.group_score == "max" else min(2, grouped.shape[-1])
            of_group = grouped.topk(counted, dim=-1).values.sum(-1)
            best = of_group.topk(args.top_groups, dim=-1).indices
            closed = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, best, False)
            preference = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
        return preference.topk(args.experts_per_token, dim=-1).indices
