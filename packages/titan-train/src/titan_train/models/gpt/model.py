"""The GPT-3 architecture as a plain module (arXiv:2005.14165; GPT-2's pre-norm blocks).

Token and learned position embeddings → blocks of ``x + attention(norm(x))`` and ``x + mlp(norm(x))`` → norm → head,
with LayerNorm, GELU and biases everywhere but the head. Every layer attends to all of its document (GPT-3 itself
alternates dense and banded layers; the parameters are the same).

Shapes: B batch, S sequence, d width.
"""

from torch import Tensor, nn

from titan_train.models.common.attention import CausalAttention, SequenceContext
from titan_train.models.common.decoder import Decoder
from titan_train.models.common.shared_input import GeluInput, SharedInput
from titan_train.models.gpt.args import GPTArgs
from titan_train.models.gpt.hf import GPT_HF


class GPT(Decoder):
    """A GPT-3-architecture decoder."""

    hf = GPT_HF

    def __init__(self, args: GPTArgs) -> None:
        """Build the modules; weights are set by `init_weights`."""
        super().__init__(
            [GPTBlock(args) for _ in range(args.num_layers)],
            dim=args.dim,
            vocab_size=args.vocab_size,
            norm_eps=args.norm_eps,
            tied_embeddings=args.tied_embeddings,
            max_seq_len=args.max_seq_len,
            norm=nn.LayerNorm,
        )
        self.args = args


class GPTBlock(nn.Module):
    """One decoder block: attention and feed-forward, each on the normalised stream and added back."""

    norm_readers = (("attention_norm", "attention"), ("ffn_norm", "feed_forward"))
    """Each norm, and the module that alone reads it."""

    def __init__(self, args: GPTArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.attention = GPTAttention(args)
        self.ffn_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = GeluMLP(args.dim, args.ffn_dim or 4 * args.dim)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.feed_forward(self.ffn_norm(x))


class GPTAttention(nn.Module):
    """Multi-head attention with biases."""

    def __init__(self, args: GPTArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.num_heads
        self.wq = nn.Linear(args.dim, args.dim)
        self.wk = nn.Linear(args.dim, args.dim)
        self.wv = nn.Linear(args.dim, args.dim)
        self.wo = nn.Linear(args.dim, args.dim)
        self.linears = SharedInput()
        self.inner_attention = CausalAttention(args.num_heads, args.num_heads, self.head_dim)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        # -1 heads: a module whose projections were cut over ranks holds only its own
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.linears(x, self.wq, self.wk, self.wv))
        return self.wo(self.inner_attention(q, k, v, context).flatten(-2))


class GeluMLP(nn.Module):
    """Feed-forward ``w2(gelu(w1 x))`` with the tanh approximation of GELU, as GPT-2 computes it."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim)
        self.w2 = nn.Linear(ffn_dim, dim)
        self.linears = SharedInput()
        self.gelu = GeluInput()

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        (h,) = self.linears(x, self.w1)
        return self.gelu(h, self.w2)
