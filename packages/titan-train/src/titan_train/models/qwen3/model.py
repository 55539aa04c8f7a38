"""The Qwen3 architecture as a plain module (arXiv:2505.09388).

Llama's block with an RMSNorm over every query and key head, and in the mixture-of-experts models 128 small experts, of
which each token takes 8, in place of the feed-forward. Nothing here knows of ranks.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from titan_train.models.common.blocks import DecoderBlock, GroupedQueryAttention, SwiGLU
from titan_train.models.common.decoder import Decoder
from titan_train.models.common.hf_config import compare_settings
from titan_train.models.common.moe.layer import MoE
from titan_train.models.qwen3.args import Qwen3Args
from titan_train.models.qwen3.hf import args_from_hf, settings_of


class Qwen3(Decoder):
    """A Qwen3-architecture decoder."""

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
        )
        self.args = args

    def check_hf_config(self, config: Mapping[str, Any]) -> None:
        """Refuse weights whose ``config.json`` describes another model; `titan_ckpt.import_hf` asks before it reads any.

        Raises:
            ValueError: Names every setting that differs, or that this model does not have.
        """
        compare_settings(settings_of(args_from_hf(config)), settings_of(self.args), name=type(self).__name__)


def _block(args: Qwen3Args) -> DecoderBlock:
    attention = GroupedQueryAttention(
        args.dim,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        qk_norm_eps=args.norm_eps,
    )
    inner: nn.Module
    if args.num_experts == 0:
        inner = SwiGLU(args.dim, args.ffn_dim)
    else:
        moe = args.moe()
        shared = moe.num_shared_experts * moe.expert_ffn_dim
        inner = MoE(moe, SwiGLU(args.dim, shared) if shared else None)
    return DecoderBlock(args.dim, args.norm_eps, attention, inner)
