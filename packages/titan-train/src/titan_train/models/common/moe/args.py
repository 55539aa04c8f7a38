"""The shape of one mixture-of-experts layer, and how it is balanced."""

from dataclasses import dataclass

from titan_train.models.shape import ExpertsShape


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEArgs:
    """One mixture-of-experts layer.

    Fields carry the names that models use in ``model.args``, where errors point.
    """

    dim: int
    """Width of the residual stream."""
    expert_ffn_dim: int
    """Width of one expert's hidden layer."""
    num_experts: int
    """Experts that tokens are routed to."""
    experts_per_token: int
    """Experts that each token is routed to."""
    num_shared_experts: int = 0
    """Experts that every token goes through; they are one feed-forward of this many times the width."""
    scores: str = "softmax"
    """Scores from the gate's logits: softmax or sigmoid."""
    normalize_weights: bool = True
    """Divide a token's weights by their sum."""
    route_scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    """Equal groups of experts; 1 lets a token choose among all."""
    top_groups: int = 1
    """Groups that a token's experts may come from."""
    group_score: str = "top2_sum"
    """A group's score from its experts': their maximum (max, DeepSeek-V2) or the sum of the best two (top2_sum, V3)."""
    bias_rate: float = 0.0
    """How far an expert's bias moves in a step towards an equal load; 0 is no bias."""
    balance_loss: float = 0.0
    """Coefficient of the sequence-wise balance loss; 0 turns it off."""
    z_loss: float = 0.0
    """Coefficient of the mean squared log-sum-exp of the gate's logits; 0 turns it off."""

    def __post_init__(self) -> None:
        for name in ("dim", "expert_ffn_dim", "num_experts", "experts_per_token", "num_groups", "top_groups"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"model.args.{name}={value} must be at least 1; the nearest valid choice is 1.")
        for name in ("num_shared_experts", "bias_rate", "balance_loss", "z_loss"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"model.args.{name}={value} must not be negative; 0 turns it off.")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"model.args.scores={self.scores!r} is not a score function: use 'softmax' or 'sigmoid'.")
        if self.group_score not in ("max", "top2_sum"):
            raise ValueError(
                f"model.args.group_score={self.group_score!r} is not a way to score a group: use 'max' (DeepSeek-V2) or "
                "'top2_sum' (DeepSeek-V3)."
            )
        if not self.route_scale > 0:
            raise ValueError(
                f"model.args.route_scale={self.route_scale} must be positive; 1 leaves weights as they are."
            )
        self._check_groups()

    def shape(self) -> ExpertsShape:
        """The layer's shape."""
        return ExpertsShape(
            self.num_experts,
            self.experts_per_token,
            self.expert_ffn_dim,
            self.num_shared_experts * self.expert_ffn_dim,
            max_groups=self.top_groups if self.num_groups > 1 else 0,
            normalized=self.normalize_weights,
        )

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups:
            choices = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            near = min(choices, key=lambda n: abs(n - self.num_groups))
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
