"""Shapes of the Llama-3 family, from a debug model to 405B.

Sources: "The Llama 3 Herd of Models" (arXiv:2407.21783, table 3) and the published Llama 3.1 and 3.2 model cards.
Parameter counts are exact and held by a test.
"""

from dataclasses import dataclass
from typing import Annotated

from titan_train.models.common.args import check_heads, check_key_heads, check_rotary_channels
from titan_train.models.shape import AttentionWidths, Block, FeedForwardShape, ModelShape
from titan_train.values import Count, Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaArgs:
    """The shape of one Llama-3-architecture decoder."""

    dim: Count
    """Width of the residual stream."""
    num_layers: Count
    """Decoder blocks."""
    num_heads: Count
    """Query heads."""
    num_kv_heads: Count
    """Key and value heads; each serves ``num_heads / num_kv_heads`` query heads."""
    ffn_dim: Count
    """Width of the feed-forward's hidden layer."""
    vocab_size: Count = 128_256
    """Rows of the embedding and of the head."""
    head_dim: int = 0
    """Width of one head; 0 takes ``dim / num_heads``."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool = False
    """The head is the embedding's matrix."""
    mtp_depth: Annotated[int, Range(0, note="0 is none, DeepSeek-V3 has 1")] = 0
    """Modules that predict one token further ahead each (multi-token prediction); 0 is none."""
    rope_theta: Annotated[float, Range(above=1, note="Llama 3 takes 500000")] = 500_000.0
    """Base of the rotary frequencies."""
    rope_factor: Annotated[float, Range(1, note="1 is plain RoPE")] = 1.0
    """Llama-3.1 stretch of the slow rotary frequencies; 1 is plain RoPE."""
    rope_low_freq_factor: float = 1.0
    """Frequencies with wavelength above ``rope_original_seq_len`` / this are divided by ``rope_factor``."""
    rope_high_freq_factor: float = 4.0
    """Frequencies with wavelength below ``rope_original_seq_len`` / this are kept."""
    rope_original_seq_len: Count = 8192
    """Context length before stretching, in tokens."""

    def __post_init__(self) -> None:
        check_values("model.args", self)
        check_key_heads(self.num_heads, self.num_kv_heads)
        if self.head_dim == 0:
            check_heads(self.dim, self.num_heads, remedy=", or set head_dim")
        check_rotary_channels("head_dim", self.head_width)
        if not 0 < self.rope_low_freq_factor < self.rope_high_freq_factor:
            raise ValueError(
                f"model.args.rope_low_freq_factor={self.rope_low_freq_factor} must be positive and below "
                f"rope_high_freq_factor={self.rope_high_freq_factor}; Llama 3.1 takes 1 and 4."
            )

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.head_dim or self.dim // self.num_heads

    def shape(self, name: str) -> ModelShape:
        """What `Family.shape` returns."""
        attention = AttentionWidths(self.num_heads, self.num_kv_heads, self.head_width)
        blocks = (Block(self.num_layers, attention, FeedForwardShape(self.ffn_dim)),)
        return ModelShape(name, self.dim, blocks, self.vocab_size, tied=self.tied_embeddings, mtp=self.mtp_depth)


LLAMA_CONFIGS: dict[str, LlamaArgs] = {
    # starts in a blink: for tests and for trying a configuration
    "llama3_debug": LlamaArgs(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=192, vocab_size=512),
    # learns Python's syntax in minutes on two CPU cores: 11.0 M parameters with a vocabulary of 4096
    "llama3_small": LlamaArgs(
        dim=384,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        ffn_dim=1024,
        vocab_size=4096,
        tied_embeddings=True,
        rope_theta=10_000.0,
    ),
    # Llama 3.2
    "llama3_1b": LlamaArgs(
        dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_dim=8192, tied_embeddings=True, rope_factor=32.0
    ),
    "llama3_3b": LlamaArgs(
        dim=3072, num_layers=28, num_heads=24, num_kv_heads=8, ffn_dim=8192, tied_embeddings=True, rope_factor=32.0
    ),
    # Llama 3.1
    "llama3_8b": LlamaArgs(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, rope_factor=8.0),
    "llama3_70b": LlamaArgs(dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28672, rope_factor=8.0),
    "llama3_405b": LlamaArgs(dim=16384, num_layers=126, num_heads=128, num_kv_heads=8, ffn_dim=53248, rope_factor=8.0),
}
