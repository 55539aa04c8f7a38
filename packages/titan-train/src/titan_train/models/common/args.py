"""What the arguments of several families have in common: their mixture of experts, and checks that relate two sizes. No torch."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from titan_train.models.shape import ExpertsShape
from titan_train.values import Count, Range, check_values, nearest_divisor

Scores = Literal["softmax", "sigmoid"]
_Off = Range(0, note="0 turns it off")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingArgs:
    """What families with experts let ``model.args`` say about them, besides their number and width."""

    experts_per_token: Count
    """Experts that each token is routed to."""
    num_shared_experts: Annotated[int, _Off] = 0
    """Experts that every token goes through; they are one feed-forward of this many times the width."""
    scores: Scores = "softmax"
    """Scores from the router's logits: softmax or sigmoid."""
    normalize_weights: bool = True
    """Divide a token's expert weights by their sum."""
    bias_rate: Annotated[float, _Off] = 0.0
    """How far an expert's bias moves in a step towards an equal load; 0 is no bias."""
    balance_loss: Annotated[float, _Off] = 0.0
    """Coefficient of the balance loss, taken over each sequence; 0 turns it off."""
    z_loss: Annotated[float, _Off] = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits; 0 turns it off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEArgs(RoutingArgs):
    """One mixture-of-experts layer.

    Fields carry the names that models use in ``model.args``, where errors point.
    """

    dim: Count
    """Width of the residual stream."""
    num_experts: Count
    """Experts that tokens are routed to."""
    expert_ffn_dim: Count
    """Width of one expert's hidden layer."""
    route_scale: Annotated[float, Range(above=0, note="1 leaves weights as they are")] = 1.0
    """Factor of the expert weights."""
    num_groups: Count = 1
    """Equal groups of experts; 1 lets a token choose among all."""
    top_groups: Count = 1
    """Groups that a token's experts may come from."""
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    """A group's score from its experts': their maximum (max, DeepSeek-V2) or the sum of the best two (top2_sum, V3)."""

    def __post_init__(self) -> None:
        check_values("model.args", self)
        self._check_groups()

    @classmethod
    def of(cls, args: Any) -> "MoEArgs":
        """The layer of a model whose arguments have these fields; those that they lack keep their defaults."""
        names = (field.name for field in dataclasses.fields(MoEArgs))
        return MoEArgs(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def experts_shape(self, *, shared_gate: bool = False) -> ExpertsShape:
        """The layer's shape; ``shared_gate`` as there."""
        return ExpertsShape(
            self.num_experts,
            self.experts_per_token,
            self.expert_ffn_dim,
            self.num_shared_experts * self.expert_ffn_dim,
            max_groups=self.top_groups if self.num_groups > 1 else 0,
            normalized=self.normalize_weights,
            shared_gate=shared_gate,
        )

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups:
            near = nearest_divisor(self.num_experts, self.num_groups)
            raise ValueError(
                f"model.args.num_groups={self.num_groups} does not divide num_experts={self.num_experts}: groups have "
                f"the same number of experts. The nearest valid choice is {near}."
            )
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"model.args.top_groups={self.top_groups} is more than num_groups={self.num_groups}. The nearest valid "
                f"choice is {self.num_groups}."
            )
        reachable = self.num_experts // self.num_groups * self.top_groups
        if self.experts_per_token > reachable:
            raise ValueError(
                f"model.args.experts_per_token={self.experts_per_token} is more than the {reachable} experts that a "
                f"token can reach (num_experts={self.num_experts}, num_groups={self.num_groups}, "
                f"top_groups={self.top_groups}). The nearest valid choice is {reachable}."
            )


def check_heads(dim: int, num_heads: int, *, remedy: str = "") -> None:
    """Raise ValueError unless heads of equal width make up ``dim``; ``remedy`` is what else could be set."""
    if dim % num_heads:
        near = max(1, round(dim / num_heads)) * num_heads
        raise ValueError(
            f"model.args.dim={dim} is not a multiple of num_heads={num_heads}. The nearest valid choice is dim={near}{remedy}."
        )


def check_key_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless every key head serves the same number of query heads."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"model.args.num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}: every key head serves the same "
            f"number of query heads. The nearest valid choice is {nearest_divisor(num_heads, num_kv_heads)}."
        )


def check_rotary_channels(name: str, channels: int) -> None:
    """Raise ValueError unless RoPE can turn pairs of these channels."""
    if channels < 2 or channels % 2:
        raise ValueError(
            f"model.args.{name}={channels} must be a positive even number: RoPE turns pairs of channels. The nearest valid "
            f"choice is {max(2, channels + channels % 2)}."
        )
