"""Shapes of the Qwen3 family, dense and mixture of experts.

Source: "Qwen3 Technical Report" (arXiv:2505.09388, tables 1 and 2) and the published configurations. Heads are 128 wide
in models of any width. Parameter counts are exact and held by a test.
"""

from dataclasses import dataclass
from typing import Annotated

from titan_train.models.common.args import MoEArgs, RoutingArgs, check_key_heads, check_rotary_channels
from titan_train.models.shape import AttentionWidths, Block, FeedForwardShape, ModelShape
from titan_train.values import Count, Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Args(RoutingArgs):
    """The shape of one Qwen3-architecture decoder."""

    dim: Count
    """Width of the residual stream."""
    num_layers: Count
    """Decoder blocks."""
    num_heads: Count
    """Query heads."""
    num_kv_heads: Count
    """Key and value heads; each serves ``num_heads / num_kv_heads`` query heads."""
    ffn_dim: int = 0
    """Width of the dense feed-forward's hidden layer; not used with experts."""
    head_dim: int = 128
    """Width of one head."""
    vocab_size: Count = 151_936
    """Rows of the embedding and of the head."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool = False
    """The head is the embedding's matrix."""
    mtp_depth: Annotated[int, Range(0, note="0 is none, DeepSeek-V3 has 1")] = 0
    """Modules that predict one token further ahead each (multi-token prediction); 0 is none."""
    rope_theta: Annotated[float, Range(above=1, note="Qwen3 takes 1000000")] = 1_000_000.0
    """Base of the rotary frequencies."""
    num_experts: Annotated[int, Range(0, note="0 is the dense model")] = 0
    """Experts in every layer; 0 is the dense model."""
    experts_per_token: Count = 8
    """Experts that each token is routed to."""
    expert_ffn_dim: int = 0
    """Width of one expert's hidden layer."""
    balance_loss: Annotated[float, Range(0, note="0 turns it off")] = 0.001
    """Coefficient of the balance loss, taken over each sequence; 0 turns it off."""

    def __post_init__(self) -> None:
        check_values("model.args", self)
        check_key_heads(self.num_heads, self.num_kv_heads)
        check_rotary_channels("head_dim", self.head_dim)
        if self.num_experts == 0 and self.ffn_dim < 1:
            raise ValueError(
                f"model.args.ffn_dim={self.ffn_dim} with num_experts=0: a dense model needs a feed-forward of at least "
                "width 1. Set ffn_dim, or num_experts and expert_ffn_dim."
            )
        if self.num_experts > 0:
            self.moe()

    def moe(self) -> MoEArgs:
        """The mixture of experts of one layer; only for ``num_experts`` > 0."""
        return MoEArgs.of(self)

    def shape(self, name: str) -> ModelShape:
        """What `Family.shape` returns."""
        attention = AttentionWidths(self.num_heads, self.num_kv_heads, self.head_dim, qk_norm=True)
        inner = self.moe().experts_shape() if self.num_experts else FeedForwardShape(self.ffn_dim)
        blocks = (Block(self.num_layers, attention, inner),)
        return ModelShape(name, self.dim, blocks, self.vocab_size, tied=self.tied_embeddings, mtp=self.mtp_depth)


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
