"""The Qwen3 architecture as a plain module (arXiv:2505.09388).

Llama's block with an RMSNorm over every query and key head, and in the mixture-of-experts models 128 small experts, of
which each token takes 8, in place of the feed-forward. Nothing here knows of ranks.
"""

from titan_train.models.common.blocks import DecoderBlock, GroupedQueryAttention, SwiGLU, build_moe
from titan_train.models.common.decoder import Decoder
from titan_train.models.qwen3.args import Qwen3Args
from titan_train.models.qwen3.hf import QWEN3_HF


class Qwen3(Decoder):
    """A Qwen3-architecture decoder."""

    hf = QWEN3_HF

    def __init__(self, args: Qwen3Args) -> None:
        """Build the modules; weights are set by `init_weights`."""
        super().__init__(
            [_block(args) for _ in range(args.num_layers)],
            dim=args.dim,
            vocab_size=args.vocab_size,
            norm_eps=args.norm_eps,
            tied_embeddings=args.tied_embeddings,
            rope_dim=args.head_dim,
            rope_theta=args.rope_theta,
            mtp_blocks=[_block(args) for _ in range(args.mtp_depth)],
        )
        self.args = args


def _block(args: Qwen3Args) -> DecoderBlock:
    attention = GroupedQueryAttention(
        args.dim,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        qk_norm_eps=args.norm_eps,
    )
    inner = build_moe(args.moe()) if args.num_experts else SwiGLU(args.dim, args.ffn_dim)
    return DecoderBlock(args.dim, args.norm_eps, attention, inner)
