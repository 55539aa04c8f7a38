"""The Llama-3 architecture as a plain module (arXiv:2407.21783; Llama 2, arXiv:2307.09288).

Embedding → blocks of ``x + attention(norm(x))`` and ``x + feed_forward(norm(x))`` → norm → head. Grouped-query
attention, rotary positions with Llama 3.1's scaling, RMSNorm, SwiGLU, no biases. Nothing here knows of ranks.
"""

from torch import Tensor

from titan_train.models.common.blocks import DecoderBlock, GroupedQueryAttention, SwiGLU
from titan_train.models.common.decoder import Decoder
from titan_train.models.common.rope import RopeScaling, rope_cos_sin
from titan_train.models.llama.args import LlamaArgs
from titan_train.models.llama.hf import LLAMA_HF


class Llama(Decoder):
    """A Llama-3-architecture decoder."""

    hf = LLAMA_HF

    def __init__(self, args: LlamaArgs) -> None:
        """Build the modules; weights are set by `init_weights`."""
        super().__init__(
            [_block(args) for _ in range(args.num_layers)],
            dim=args.dim,
            vocab_size=args.vocab_size,
            norm_eps=args.norm_eps,
            tied_embeddings=args.tied_embeddings,
            rope_dim=args.head_width,
            rope_theta=args.rope_theta,
            mtp_blocks=[_block(args) for _ in range(args.mtp_depth)],
        )
        self.args = args

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decoder.rope`, slow frequencies stretched."""
        return rope_cos_sin(positions, self.rope_dim, self.rope_theta, rope_scaling(self.args))


def rope_scaling(args: LlamaArgs) -> RopeScaling | None:
    """The Llama-3.1 scaling that ``args`` ask for, or None for plain RoPE."""
    if args.rope_factor == 1.0:
        return None
    return RopeScaling(
        factor=args.rope_factor,
        low_freq_factor=args.rope_low_freq_factor,
        high_freq_factor=args.rope_high_freq_factor,
        original_seq_len=args.rope_original_seq_len,
    )


def _block(args: LlamaArgs) -> DecoderBlock:
    attention = GroupedQueryAttention(
        args.dim, num_heads=args.num_heads, num_kv_heads=args.num_kv_heads, head_dim=args.head_width
    )
    return DecoderBlock(args.dim, args.norm_eps, attention, SwiGLU(args.dim, args.ffn_dim))
