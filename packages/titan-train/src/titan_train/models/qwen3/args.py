"""Shapes of the Qwen3 family, dense and mixture of experts.

Source: "Qwen3 Technical Report" (arXiv:2505.09388, tables 1 and 2) and the published configurations. Heads are 128 wide
whatever the model's width. Parameter counts are exact and held by a test.
"""

from dataclasses import dataclass

from titan_train.models.common.moe.args import MoEArgs
from titan_train.models.shape import AttentionWidths, Block, FeedForwardShape, ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Args:
    """The shape of one Qwen3-architecture decoder."""

    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Decoder blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; each serves ``num_heads / num_kv_heads`` query heads."""
    ffn_dim: int = 0
    """Width of the dense feed-forward's hidden layer; not used with experts."""
    head_dim: int = 128
    """Width of one head."""
    vocab_size: int = 151_936
    """Rows of the embedding and of the head."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool = False
    """The head is the embedding's matrix."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    num_experts: int = 0
    """Experts in every layer; 0 is the dense model."""
    experts_per_token: int = 8
    """Experts that each token is routed to."""
    expert_ffn_dim: int = 0
    """Width of one expert's hidden layer."""
    num_shared_experts: int = 0
    """Experts that every token goes through; Qwen3 has none."""
    scores: str = "softmax"
    """Scores from the router's logits: softmax or sigmoid."""
    normalize_weights: bool = True
    """Divide a token's expert weights by their sum."""
    bias_rate: float = 0.0
    """How far an expert's bias moves in a step towards an equal load; 0 is no bias."""
    balance_loss: float = 0.001
    """Coefficient of the balance loss, taken over each sequence."""
    z_loss: float = 0.0
    """Coefficient of the router's z-loss."""

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "vocab_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"model.args.{name}={value} must be at least 1; the nearest valid choice is 1.")
        if self.num_heads % self.num_kv_heads:
            choices = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            near = min(choices, key=lambda n: abs(n - self.num_kv_heads))
            raise ValueError(
                f"model.args.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: every key "
                f"head serves the same number of query heads. The nearest valid choice is {near}."
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"model.args.head_dim={self.head_dim} must be a positive even number: RoPE turns pairs of channels. "
                f"The nearest valid choice is {max(2, self.head_dim + self.head_dim % 2)}."
            )
        if self.rope_theta <= 1:
            raise ValueError(f"model.args.rope_theta={self.rope_theta} must be above 1; Qwen3 takes 1000000.")
        if self.num_experts < 0:
            raise ValueError(f"model.args.num_experts={self.num_experts} must not be negative; 0 is the dense model.")
        if self.num_experts == 0 and self.ffn_dim < 1:
            raise ValueError(
                f"model.args.ffn_dim={self.ffn_dim} with num_experts=0: a dense model needs a feed-forward of at least "
                "width 1. Set ffn_dim, or num_experts and expert_ffn_dim."
            )
        if self.num_experts > 0:
            self.moe()

    def moe(self) -> MoEArgs:
        """The mixture of experts of one layer; only for ``num_experts`` > 0."""
        return MoEArgs(
            dim=self.dim,
            expert_ffn_dim=self.expert_ffn_dim,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            num_shared_experts=self.num_shared_experts,
            scores=self.scores,
            normalize_weights=self.normalize_weights,
            bias_rate=self.bias_rate,
            balance_loss=self.balance_loss,
            z_loss=self.z_loss,
        )

    def shape(self, name: str) -> ModelShape:
        """What `Family.shape` returns."""
        attention = AttentionWidths(self.num_heads, self.num_kv_heads, self.head_dim, qk_norm=True)
        inner = self.moe().shape() if self.num_experts else FeedForwardShape(self.ffn_dim)
        blocks = (Block(self.num_layers, attention, inner),)
        return ModelShape(name, self.dim, blocks, self.vocab_size, tied=self.tied_embeddings)


QWEN3_CONFIGS: dict[str, Qwen3Args] = {
    # start in a blink: for tests and for trying a configuration
    "qwen3_debug": Qwen3Args(
        dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16, ffn_dim=192, vocab_size=512
    ),
    "qwen3_moe_debug": Qwen3Args(
        dim=64,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=512,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_dim=96,
    ),
    "qwen3_0.6b": Qwen3Args(dim=1024, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=3072, tied_embeddings=True),
    "qwen3_1.7b": Qwen3Args(dim=2048, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=6144, tied_embeddings=True),
    "qwen3_4b": Qwen3Args(dim=2560, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=9728, tied_embeddings=True),
    "qwen3_8b": Qwen3Args(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=12288),
    "qwen3_14b": Qwen3Args(dim=5120, num_layers=40, num_heads=40, num_kv_heads=8, ffn_dim=17408),
    "qwen3_32b": Qwen3Args(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, ffn_dim=25600),
    "qwen3_30b_a3b": Qwen3Args(
        dim=2048, num_layers=48, num_heads=32, num_kv_heads=4, num_experts=128, expert_ffn_dim=768
    ),
    "qwen3_235b_a22b": Qwen3Args(
        dim=4096, num_layers=94, num_heads=64, num_kv_heads=4, num_experts=128, expert_ffn_dim=1536
    ),
}
