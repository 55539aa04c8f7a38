"""Shapes of the Qwen3-Next family, dense and mixture of experts.

Source: the published configuration of Qwen3-Next-80B-A3B. Its module that predicts a second token, a block with attention, is
left to ``mtp_depth``. Parameter counts are exact and held by a test.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from titan_train.models.common.args import MoEArgs, RoutingArgs, check_key_heads, check_rotary_channels
from titan_train.models.shape import AttentionWidths, Block, DeltaShape, FeedForwardShape, ModelShape
from titan_train.values import Count, Range, check_values, nearest_divisor


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3NextArgs(RoutingArgs):
    """The shape of one Qwen3-Next-architecture decoder."""

    dim: Count
    """Width of the residual stream."""
    num_layers: Count
    """Decoder blocks."""
    attention_every: Count = 4
    """Every k-th block has attention, from the k-th on; the others carry a state. With fewer blocks all carry one."""
    num_heads: Count
    """Query heads of attention."""
    num_kv_heads: Count
    """Key and value heads of attention; each serves ``num_heads / num_kv_heads`` query heads."""
    head_dim: Count = 256
    """Width of one attention head."""
    rope_dim: int = 64
    """Channels of an attention head that are rotated, its first ones."""
    rope_theta: Annotated[float, Range(above=1, note="Qwen3-Next takes 10000000")] = 10_000_000.0
    """Base of the rotary frequencies."""
    delta_heads: Count
    """Value heads of a layer with a state."""
    delta_key_heads: Count
    """Its query and key heads; each serves ``delta_heads / delta_key_heads`` value heads."""
    delta_key_dim: Count = 128
    """Width of its query and key heads."""
    delta_value_dim: Count = 128
    """Width of its value heads."""
    delta_taps: Count = 4
    """Tokens that its short convolutions see, the token itself included."""
    ffn_dim: int = 0
    """Width of the dense feed-forward's hidden layer; not used with experts."""
    vocab_size: Count = 151_936
    """Rows of the embedding and of the head."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool = False
    """The head is the embedding's matrix."""
    mtp_depth: Annotated[int, Range(0, note="0 is none, Qwen3-Next is published with 1")] = 0
    """Modules that predict one token further ahead each (multi-token prediction); 0 is none."""
    num_experts: Annotated[int, Range(0, note="0 is the dense model")] = 0
    """Experts in every layer; 0 is the dense model."""
    experts_per_token: Count = 10
    """Experts that each token is routed to."""
    expert_ffn_dim: int = 0
    """Width of one expert's hidden layer."""
    num_shared_experts: Annotated[int, Range(0, note="0 turns it off")] = 1
    """Experts that every token goes through, behind a gate; they are one feed-forward of this many times the width."""
    balance_loss: Annotated[float, Range(0, note="0 turns it off")] = 0.001
    """Coefficient of the balance loss, taken over each sequence; 0 turns it off."""

    def __post_init__(self) -> None:
        check_values("model.args", self)
        check_key_heads(self.num_heads, self.num_kv_heads)
        check_rotary_channels("rope_dim", self.rope_dim)
        if self.rope_dim > self.head_dim:
            raise ValueError(
                f"model.args.rope_dim={self.rope_dim} is more than the channels of a head, head_dim={self.head_dim}. The "
                f"nearest valid choice is {self.head_dim // 2 * 2}."
            )
        if self.delta_heads % self.delta_key_heads:
            raise ValueError(
                f"model.args.delta_key_heads={self.delta_key_heads} does not divide delta_heads={self.delta_heads}: every key "
                f"head serves the same number of value heads. The nearest valid choice is "
                f"{nearest_divisor(self.delta_heads, self.delta_key_heads)}."
            )
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

    def has_attention(self, layer: int) -> bool:
        """Whether a block has attention; otherwise it carries a state."""
        return (layer + 1) % self.attention_every == 0

    def delta(self) -> DeltaShape:
        """The shape of a layer with a state."""
        return DeltaShape(
            self.delta_heads, self.delta_key_heads, self.delta_value_dim, self.delta_key_dim, self.delta_taps
        )

    def shape(self, name: str) -> ModelShape:
        """What `Family.shape` returns."""
        attention = AttentionWidths(
            self.num_heads, self.num_kv_heads, self.head_dim, rope_dim=self.rope_dim, qk_norm=True, gated=True
        )
        inner = FeedForwardShape(self.ffn_dim)
        if self.num_experts:
            inner = self.moe().experts_shape(shared_gate=self.num_shared_experts > 0)
        delta, rest = (
            Block(self.attention_every - 1, None, inner, delta=self.delta()),
            self.num_layers % self.attention_every,
        )
        period = (delta, Block(1, attention, inner)) if delta.count else (Block(1, attention, inner),)
        blocks = period * (self.num_layers // self.attention_every)
        blocks += (replace(delta, count=rest),) if rest else ()
        ahead = Block(1, attention, inner)
        return ModelShape(
            name, self.dim, blocks, self.vocab_size, tied=self.tied_embeddings, mtp=self.mtp_depth, mtp_block=ahead
        )


QWEN3_NEXT_CONFIGS: dict[str, Qwen3NextArgs] = {
    # start in a blink: for tests and for trying a configuration
    "qwen3_next_debug": Qwen3NextArgs(
        dim=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_dim=8,
        delta_heads=4,
        delta_key_heads=2,
        delta_key_dim=16,
        delta_value_dim=16,
        ffn_dim=192,
        vocab_size=512,
    ),
    "qwen3_next_moe_debug": Qwen3NextArgs(
        dim=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_dim=8,
        delta_heads=4,
        delta_key_heads=2,
        delta_key_dim=16,
        delta_value_dim=16,
        vocab_size=512,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_dim=96,
    ),
    "qwen3_next_80b_a3b": Qwen3NextArgs(
        dim=2048,
        num_layers=48,
        num_heads=16,
        num_kv_heads=2,
        delta_heads=32,
        delta_key_heads=16,
        num_experts=512,
        expert_ffn_dim=512,
    ),
}
