"""Shapes of the Llama-3 family, from a debug model to 405B.

Sources: "The Llama 3 Herd of Models" (arXiv:2407.21783, table 3) and the published Llama 3.1 and 3.2 model cards.
Parameter counts are exact and held by a test.
"""

from dataclasses import dataclass

from titan_train.models.shape import AttentionWidths, Block, FeedForwardShape, ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaArgs:
    """The shape of one Llama-3-architecture decoder."""

    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Decoder blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; each serves ``num_heads / num_kv_heads`` query heads."""
    ffn_dim: int
    """Width of the feed-forward's hidden layer."""
    vocab_size: int = 128_256
    """Rows of the embedding and of the head."""
    head_dim: int = 0
    """Width of one head; 0 takes ``dim / num_heads``."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool = False
    """The head is the embedding's matrix."""
    rope_theta: float = 500_000.0
    """Base of the rotary frequencies."""
    rope_factor: float = 1.0
    """Llama-3.1 stretch of the slow rotary frequencies; 1 is plain RoPE."""
    rope_low_freq_factor: float = 1.0
    """Frequencies with wavelength above ``rope_original_seq_len`` / this are divided by ``rope_factor``."""
    rope_high_freq_factor: float = 4.0
    """Frequencies with wavelength below ``rope_original_seq_len`` / this are kept."""
    rope_original_seq_len: int = 8192
    """Context length before stretching, in tokens."""

    def __post_init__(self) -> None:
        counts = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "rope_original_seq_len")
        for name in counts:
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
        if self.head_dim == 0 and self.dim % self.num_heads:
            raise ValueError(
                f"model.args.dim={self.dim} is not a multiple of num_heads={self.num_heads}. The nearest valid choice "
                f"is dim={max(1, round(self.dim / self.num_heads)) * self.num_heads}, or set head_dim."
            )
        if self.head_dim < 0 or self.head_width % 2:
            raise ValueError(
                f"model.args.head_dim={self.head_width} must be a positive even number: RoPE turns pairs of channels. "
                f"The nearest valid choice is {max(2, self.head_width + self.head_width % 2)}."
            )
        if self.rope_factor < 1:
            raise ValueError(f"model.args.rope_factor={self.rope_factor} must be >= 1; 1 is plain RoPE.")
        if self.rope_theta <= 1:
            raise ValueError(f"model.args.rope_theta={self.rope_theta} must be above 1; Llama 3 takes 500000.")
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
        return ModelShape(name, self.dim, blocks, self.vocab_size, tied=self.tied_embeddings)


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
