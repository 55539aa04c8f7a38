"""The Qwen3-Next architecture as a plain module.

Three blocks of gated delta net (arXiv:2412.06464) to each one of attention; the attention rotates part of each head, normalizes
queries and keys, and multiplies its result by a gate (arXiv:2505.06708). Feed-forwards are dense, or experts beside a gated
shared one. Norms of the residual stream, of queries and of keys are zero-centred. Nothing here knows of ranks.
"""

import torch
from torch import Tensor, nn

from titan_train.models.common.attention import CausalAttention, SequenceContext
from titan_train.models.common.blocks import SwiGLU
from titan_train.models.common.decoder import Decoder
from titan_train.models.common.delta import GatedDeltaNet
from titan_train.models.common.moe.layer import MoE
from titan_train.models.common.norm import ZeroCentredRMSNorm
from titan_train.models.common.rope import rotate_pair
from titan_train.models.common.shared_input import SharedInput
from titan_train.models.qwen3_next.args import Qwen3NextArgs
from titan_train.models.qwen3_next.hf import QWEN3_NEXT_HF


class Qwen3Next(Decoder):
    """A Qwen3-Next-architecture decoder."""

    hf = QWEN3_NEXT_HF

    def __init__(self, args: Qwen3NextArgs) -> None:
        """Build the modules; weights are set by `init_weights`."""
        super().__init__(
            [HybridBlock(args, attends=args.has_attention(layer)) for layer in range(args.num_layers)],
            dim=args.dim,
            vocab_size=args.vocab_size,
            norm_eps=args.norm_eps,
            tied_embeddings=args.tied_embeddings,
            rope_dim=args.rope_dim,
            rope_theta=args.rope_theta,
            norm=ZeroCentredRMSNorm,
            mtp_blocks=[HybridBlock(args, attends=True) for _ in range(args.mtp_depth)],
        )
        self.args = args

    def init_weights(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        """As `Decoder.init_weights`; zero-centred norms start at zero, decays and convolutions as published."""
        owner, leaf = fqn.split(".")[-2:]
        if owner == "decay":
            if leaf == "bias":
                nn.init.ones_(tensor)
            else:
                nn.init.uniform_(tensor, 0.01, 16.0, generator=generator)
                tensor.log_()
        elif owner.endswith("_conv"):  # torch's own, which keeps the variance
            bound = tensor.shape[-1] ** -0.5
            nn.init.uniform_(tensor, -bound, bound, generator=generator)
        else:
            super().init_weights(fqn, tensor, generator)
            if owner.endswith("norm") and owner != "gated_norm":
                tensor.sub_(1.0)


class HybridBlock(nn.Module):
    """``x + mixer(norm(x))``, then ``x + f(norm(x))``; of ``delta`` and ``attention`` one is None, as of ``feed_forward`` and
    ``moe``.
    """

    norm_readers = (("attention_norm", "mixer"), ("ffn_norm", "feed_forward"))
    """Each norm, and the module that alone reads it."""

    def __init__(self, args: Qwen3NextArgs, *, attends: bool) -> None:
        """Put a block with attention, or one with a state, together."""
        super().__init__()
        self.attention_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)
        self.attention = GatedAttention(args) if attends else None
        self.delta = None if attends else GatedDeltaNet(args.dim, args.delta(), args.norm_eps)
        self.ffn_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = None if args.num_experts else SwiGLU(args.dim, args.ffn_dim)
        shared = args.num_shared_experts * args.expert_ffn_dim
        self.moe = MoE(args.moe(), GatedSwiGLU(args.dim, shared) if shared else None) if args.num_experts else None

    @property
    def mixer(self) -> nn.Module:
        """Attention, or the layer with a state."""
        found = self.delta if self.attention is None else self.attention
        assert found is not None
        return found

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        x = x + self.mixer(self.attention_norm(x), context)
        if self.moe is not None:
            return x + self.moe(self.ffn_norm(x), context.padding)
        assert self.feed_forward is not None
        return x + self.feed_forward(self.ffn_norm(x))


class GatedAttention(nn.Module):
    """Grouped-query attention, partly rotated, whose result is multiplied by the sigmoid of a gate of each channel."""

    rotate = staticmethod(rotate_pair)

    def __init__(self, args: Qwen3NextArgs) -> None:
        """Build the projections; that of queries gives each head its query and then its gate, as published."""
        super().__init__()
        self.head_dim, self.rope_dim = args.head_dim, args.rope_dim
        self.wq = nn.Linear(args.dim, args.num_heads * 2 * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.num_heads * args.head_dim, args.dim, bias=False)
        self.q_norm = ZeroCentredRMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = ZeroCentredRMSNorm(args.head_dim, eps=args.norm_eps)
        self.linears = SharedInput()
        self.inner_attention = CausalAttention(args.num_heads, args.num_kv_heads, args.head_dim)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        assert context.rope is not None
        # -1 heads: a module whose projections were cut over ranks holds only its own
        both, k, v = self.linears(x, self.wq, self.wk, self.wv)
        q, gate = both.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_dim == self.head_dim:
            q, k = self.rotate(q, k, *context.rope)
        else:
            turned = self.rotate(q[..., : self.rope_dim], k[..., : self.rope_dim], *context.rope)
            q, k = (torch.cat((part, y[..., self.rope_dim :]), -1) for part, y in zip(turned, (q, k), strict=True))
        out = self.inner_attention(q, k, v, context) * gate.sigmoid()
        return self.wo(out.flatten(-2))


class GatedSwiGLU(SwiGLU):
    """A shared expert that each token weighs: ``sigmoid(gate x) * swiglu(x)``."""

    reads_its_input = True
    """The gate does, beside the linears that share it."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        """Build the projections and the gate."""
        super().__init__(dim, ffn_dim)
        self.gate = nn.Linear(dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        return self.gate(x).sigmoid() * super().forward(x)
