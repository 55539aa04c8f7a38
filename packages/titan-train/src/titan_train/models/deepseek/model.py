"""The DeepSeek-V2 and V3 architecture as a plain module (arXiv:2405.04434, arXiv:2412.19437).

Latent attention in every block; a dense feed-forward in the first blocks, and in the others many small experts besides
shared ones. V3 scores experts by a sigmoid, balances them by a bias and lets a token choose from a few groups of them.
Nothing here knows of ranks.
"""

from torch import Tensor

from titan_train.models.common.blocks import DecoderBlock, SwiGLU, build_moe
from titan_train.models.common.decoder import Decoder
from titan_train.models.deepseek.args import DeepSeekArgs
from titan_train.models.deepseek.attention import LatentAttention, yarn_frequencies
from titan_train.models.deepseek.hf import DEEPSEEK_HF


class DeepSeek(Decoder):
    """A DeepSeek-V2 or V3-architecture decoder."""

    hf = DEEPSEEK_HF

    def __init__(self, args: DeepSeekArgs) -> None:
        """Build the modules; weights are set by `init_weights`."""
        super().__init__(
            [_block(args, sparse=i >= args.num_dense_layers) for i in range(args.num_layers)],
            dim=args.dim,
            vocab_size=args.vocab_size,
            norm_eps=args.norm_eps,
            tied_embeddings=args.tied_embeddings,
            rope_dim=args.qk_rope_head_dim,
            rope_theta=args.rope_theta,
            mtp_blocks=[_block(args, sparse=args.num_dense_layers < args.num_layers) for _ in range(args.mtp_depth)],
        )
        self.args = args

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decoder.rope`, stretched by YaRN."""
        angles = positions[..., None, None].double() * yarn_frequencies(self.args, positions.device)
        return angles.cos().float(), angles.sin().float()


def _block(args: DeepSeekArgs, *, sparse: bool) -> DecoderBlock:
    inner = build_moe(args.moe()) if sparse else SwiGLU(args.dim, args.ffn_dim)
    return DecoderBlock(args.dim, args.norm_eps, LatentAttention(args), inner)
