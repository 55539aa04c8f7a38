"""The DeepSeek-V2 and V3 architecture as a plain module (arXiv:2405.04434, arXiv:2412.19437).

Latent attention in every block; a dense feed-forward in the first blocks, and in the others many small experts besides
shared ones. V3 scores experts by a sigmoid, balances them by a bias and lets a token choose from a few groups of them.
Nothing here knows of ranks.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from titan_train.models.common.blocks import DecoderBlock, SwiGLU
from titan_train.models.common.decoder import Decoder
from titan_train.models.common.hf_config import compare_settings
from titan_train.models.common.moe.layer import MoE
from titan_train.models.deepseek.args import DeepSeekArgs
from titan_train.models.deepseek.attention import LatentAttention
from titan_train.models.deepseek.hf import args_from_hf, settings_of
from titan_train.models.deepseek.yarn import yarn_frequencies


class DeepSeek(Decoder):
    """A DeepSeek-V2 or V3-architecture decoder."""

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
        )
        self.args = args

    def check_hf_config(self, config: Mapping[str, Any]) -> None:
        """Refuse weights whose ``config.json`` describes another model; `titan_ckpt.import_hf` asks before it reads any.

        Raises:
            ValueError: Names every setting that differs, or that this model does not have.
        """
        compare_settings(settings_of(args_from_hf(config)), settings_of(self.args), name=type(self).__name__)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decoder.rope`, stretched by YaRN."""
        angles = positions[..., None, None].double() * yarn_frequencies(self.args, positions.device)
        return angles.cos().float(), angles.sin().float()


def _block(args: DeepSeekArgs, *, sparse: bool) -> DecoderBlock:
    inner: nn.Module
    if sparse:
        moe = args.moe()
        shared = moe.num_shared_experts * moe.expert_ffn_dim
        inner = MoE(moe, SwiGLU(args.dim, shared) if shared else None)
    else:
        inner = SwiGLU(args.dim, args.ffn_dim)
    return DecoderBlock(args.dim, args.norm_eps, LatentAttention(args), inner)
