"""Shapes of the GPT-3 family.

Source: "Language Models are Few-Shot Learners" (arXiv:2005.14165, table 2.1): feed-forward of four times the width,
context of 2048 tokens, the vocabulary of GPT-2. The parameter count is exact and held by a test.
"""

from dataclasses import dataclass
from typing import Annotated

from titan_train.models.common.args import check_heads
from titan_train.models.shape import AttentionWidths, Block, FeedForwardShape, ModelShape
from titan_train.values import Count, Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTArgs:
    """The shape of one GPT-3-architecture decoder."""

    dim: Count
    """Width of the residual stream."""
    num_layers: Count
    """Decoder blocks."""
    num_heads: Count
    """Attention heads, each ``dim / num_heads`` wide."""
    vocab_size: Count = 50_257
    """Rows of the embedding and of the head."""
    max_seq_len: Count = 2048
    """Learned positions: the longest sequence, in tokens."""
    ffn_dim: Annotated[int, Range(0, note="0 takes 4 * dim")] = 0
    """Width of the feed-forward's hidden layer; 0 takes ``4 * dim``."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    tied_embeddings: bool = True
    """The head is the embedding's matrix."""

    def __post_init__(self) -> None:
        check_values("model.args", self)
        check_heads(self.dim, self.num_heads)

    def shape(self, name: str) -> ModelShape:
        """What `Family.shape` returns."""
        attention = AttentionWidths(self.num_heads, self.num_heads, self.dim // self.num_heads, bias=True)
        inner = FeedForwardShape(self.ffn_dim or 4 * self.dim, gated=False, bias=True)
        # LayerNorm has a bias, so a norm counts twice
        blocks = (Block(self.num_layers, attention, inner, norms=4),)
        return ModelShape(
            name, self.dim, blocks, self.vocab_size, tied=self.tied_embeddings, positions=self.max_seq_len, final_norm=2
        )


GPT_CONFIGS: dict[str, GPTArgs] = {
    "gpt_debug": GPTArgs(dim=64, num_layers=2, num_heads=4, vocab_size=512, max_seq_len=512),
    "gpt3_175b": GPTArgs(dim=12288, num_layers=96, num_heads=96),
}
