"""The arguments of FLUX, and the shipped configurations. No torch."""

from dataclasses import dataclass

from titan_train.models.shape import AttentionWidths, Block, FeedForwardShape, ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxArgs:
    """Widths and depths of one model."""

    dim: int = 3072
    """Width of the hidden states."""
    num_heads: int = 24
    """Attention heads; each is dim / num_heads wide."""
    num_layers: int = 19
    """Double blocks: text and image have weights of their own and attend to each other."""
    num_single_layers: int = 38
    """Single blocks: text and image are one sequence."""
    in_channels: int = 64
    """Values of one packed image token: 16 latent channels x 2 x 2."""
    text_dim: int = 4096
    """Width of a text feature (T5-XXL)."""
    pooled_dim: int = 768
    """Width of the pooled text feature (CLIP-L)."""
    guidance: bool = False
    """Take the guidance scale as an input, as FLUX.1-dev does."""
    rope_index_dim: int = 16
    """Channels of a head rotated by the image's index; 0 for every token of this model."""
    rope_row_dim: int = 56
    """Channels of a head rotated by the row."""
    rope_column_dim: int = 56
    """Channels of a head rotated by the column."""

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(
                f"model.args.dim={self.dim} is not a multiple of num_heads={self.num_heads}: heads would differ. Use "
                f"dim={max(1, self.dim // self.num_heads) * self.num_heads}."
            )
        axes = (self.rope_index_dim, self.rope_row_dim, self.rope_column_dim)
        if sum(axes) != self.head_dim or any(axis % 2 for axis in axes):
            raise ValueError(
                f"model.args: the rotated channels {axes} (index, row, column) must be even and add up to the head's "
                f"{self.head_dim} (dim / num_heads). Change rope_index_dim, rope_row_dim or rope_column_dim."
            )

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.num_heads

    def shape(self, name: str) -> ModelShape:
        """What `Family.shape` returns: without the embedders and the final layer, 0.5 % of FLUX.1's parameters.

        A double block has weights for text and for image tokens: a token meets one half of them. In a single block
        attention and feed-forward stand beside each other.
        """
        attention = AttentionWidths(self.num_heads, self.num_heads, self.head_dim, qk_norm=True, causal=False)
        inner = FeedForwardShape(4 * self.dim, gated=False)
        blocks = (
            Block(self.num_layers, attention, inner, norms=0, modulation=24 * self.dim**2),
            Block(self.num_single_layers, attention, inner, norms=0, modulation=3 * self.dim**2),
        )
        return ModelShape(name, self.dim, tuple(block for block in blocks if block.count), 0)


FLUX_CONFIGS = {
    "flux_schnell": FluxArgs(),
    "flux_dev": FluxArgs(guidance=True),
    "flux_tiny": FluxArgs(dim=256, num_heads=2, num_layers=2, num_single_layers=2, text_dim=64, pooled_dim=32),
}
