"""Shapes of DeepSeek-V2-Lite and DeepSeek-V3.

Sources: arXiv:2405.04434 (V2, appendix B), arXiv:2412.19437 (V3, section 4.2) and the published configurations. V3's module
that predicts a second token is left to ``mtp_depth``. Parameter counts are exact and held by a test.
"""

from dataclasses import dataclass
from typing import Annotated

from titan_train.models.common.args import MoEArgs, Scores, check_rotary_channels
from titan_train.models.shape import AttentionWidths, Block, FeedForwardShape, ModelShape
from titan_train.values import Count, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekArgs(MoEArgs):
    """The shape of one DeepSeek-V2 or V3-architecture decoder."""

    num_layers: Count
    """Decoder blocks."""
    num_dense_layers: int = 1
    """First blocks, which have a dense feed-forward instead of experts."""
    num_heads: Count
    """Attention heads."""
    q_lora_rank: Annotated[int, Range(0, note="0 projects queries directly")] = 0
    """Width of the queries' latent; 0 projects queries directly."""
    kv_lora_rank: Count = 512
    """Width of the latent that keys and values are made from."""
    qk_nope_head_dim: Count = 128
    """Channels of a query or key head without positions."""
    qk_rope_head_dim: int = 64
    """Rotated channels of a query head, and of the one key that all heads share."""
    v_head_dim: Count = 128
    """Channels of a value head."""
    ffn_dim: Count
    """Width of the dense feed-forward's hidden layer."""
    vocab_size: Count
    """Rows of the embedding and of the head."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm; for the latents of attention it is always 1e-6."""
    tied_embeddings: bool = False
    """The head is the embedding's matrix."""
    mtp_depth: Annotated[int, Range(0, note="0 is none, DeepSeek-V3 has 1")] = 0
    """Modules that predict one token further ahead each (multi-token prediction); 0 is none."""
    num_shared_experts: Annotated[int, Range(0)] = 1
    """Experts that every token goes through."""
    scores: Scores = "sigmoid"
    """Scores from the router's logits: softmax (V2) or sigmoid (V3)."""
    bias_rate: Annotated[float, Range(0, note="0 is no bias")] = 0.001
    """How far an expert's bias moves in a step towards an equal load; 0 is no bias."""
    balance_loss: Annotated[float, Range(0, note="0 turns it off")] = 0.0001
    """Coefficient of the balance loss, taken over each sequence; 0 turns it off."""
    rope_theta: Annotated[float, Range(above=1, note="DeepSeek takes 10000")] = 10_000.0
    """Base of the rotary frequencies."""
    rope_factor: Annotated[float, Range(1, note="1 is plain RoPE")] = 1.0
    """YaRN's stretch of the context; 1 is plain RoPE, as in pretraining before the context is extended."""
    rope_original_seq_len: Count = 4096
    """Context length before stretching, in tokens."""
    rope_beta_fast: float = 32.0
    """Frequencies that turn more often than this over the original context are kept."""
    rope_beta_slow: float = 1.0
    """Frequencies that turn fewer times than this over the original context are divided by ``rope_factor``."""
    rope_mscale: float = 1.0
    """YaRN's temperature: attention scores are multiplied by (0.1 * this * ln(rope_factor) + 1) squared."""

    def __post_init__(self) -> None:
        MoEArgs.__post_init__(self)
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"model.args.num_dense_layers={self.num_dense_layers} must be from 0 to num_layers={self.num_layers}; "
                f"the nearest valid choice is {min(max(0, self.num_dense_layers), self.num_layers)}."
            )
        check_rotary_channels("qk_rope_head_dim", self.qk_rope_head_dim)
        if self.v_head_dim > self.qk_head_dim:
            raise ValueError(
                f"model.args.v_head_dim={self.v_head_dim} is wider than a key head, qk_nope_head_dim + qk_rope_head_dim "
                f"= {self.qk_head_dim}: values are padded to the keys' width for the attention kernels. The nearest "
                f"valid choice is {self.qk_head_dim}."
            )
        if not 0 < self.rope_beta_slow < self.rope_beta_fast:
            raise ValueError(
                f"model.args.rope_beta_slow={self.rope_beta_slow} must be positive and below "
                f"rope_beta_fast={self.rope_beta_fast}; DeepSeek takes 1 and 32."
            )

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def moe(self) -> MoEArgs:
        """The mixture of experts of one layer."""
        return MoEArgs.of(self)

    def shape(self, name: str) -> ModelShape:
        """What `Family.shape` returns."""
        attention = AttentionWidths(
            self.num_heads, self.num_heads, self.qk_head_dim, value_dim=self.v_head_dim,
            q_lora=self.q_lora_rank, kv_lora=self.kv_lora_rank, rope_dim=self.qk_rope_head_dim,
        )  # fmt: skip
        dense = Block(self.num_dense_layers, attention, FeedForwardShape(self.ffn_dim))
        routed = Block(self.num_layers - self.num_dense_layers, attention, self.experts_shape())
        blocks = tuple(block for block in (dense, routed) if block.count)
        return ModelShape(name, self.dim, blocks, self.vocab_size, tied=self.tied_embeddings, mtp=self.mtp_depth)


DEEPSEEK_CONFIGS: dict[str, DeepSeekArgs] = {
    # starts in a blink, with everything that V3 has: for tests and for trying a configuration
    "deepseek_debug": DeepSeekArgs(
        dim=64,
        num_layers=3,
        num_heads=8,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        ffn_dim=192,
        vocab_size=512,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_dim=96,
        route_scale=2.5,
        num_groups=4,
        top_groups=2,
    ),
    "deepseek_v2_lite": DeepSeekArgs(
        dim=2048,
        num_layers=27,
        num_heads=16,
        ffn_dim=10944,
        vocab_size=102_400,
        num_experts=64,
        experts_per_token=6,
        expert_ffn_dim=1408,
        num_shared_experts=2,
        scores="softmax",
        normalize_weights=False,
        bias_rate=0.0,
        balance_loss=0.001,
        rope_factor=40.0,
        rope_mscale=0.707,
    ),
    "deepseek_v3": DeepSeekArgs(
        dim=7168,
        num_layers=61,
        num_dense_layers=3,
        num_heads=128,
        q_lora_rank=1536,
        ffn_dim=18432,
        vocab_size=129_280,
        num_experts=256,
        experts_per_token=8,
        expert_ffn_dim=2048,
        route_scale=2.5,
        num_groups=8,
        top_groups=4,
        rope_factor=40.0,
    ),
}
