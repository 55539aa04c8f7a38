"""The blocks that Llama, Qwen3 and DeepSeek share: RMSNorm decoder layers with grouped-query attention and SwiGLU.

A decoder layer is ``x + attention(norm(x))`` and then ``x + f(norm(x))``, where f is a dense feed-forward or a mixture of
experts. Attention takes ``(x, context)``; both submodules see whole rows, also where sequence parallelism cuts ``x``
between them.

Shapes: B batch, S sequence, d width, H query heads, K key-value heads, D head width.
"""

from torch import Tensor, nn

from titan_train.models.common.args import MoEArgs
from titan_train.models.common.attention import CausalAttention, SequenceContext
from titan_train.models.common.moe.layer import MoE
from titan_train.models.common.norm import RMSNorm
from titan_train.models.common.rope import rotate_pair
from titan_train.models.common.shared_input import GatedInput, SharedInput


class DecoderBlock(nn.Module):
    """One decoder layer, dense or with experts: ``feed_forward`` or ``moe`` is None."""

    norm_readers = (("attention_norm", "attention"), ("ffn_norm", "feed_forward"))
    """Each norm, and the module that alone reads it."""

    def __init__(self, dim: int, norm_eps: float, attention: nn.Module, feed_forward: nn.Module) -> None:
        """Put a layer together; a `MoE` as ``feed_forward`` is registered as ``moe``."""
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(dim, eps=norm_eps)
        sparse = isinstance(feed_forward, MoE)
        self.feed_forward = None if sparse else feed_forward
        self.moe = feed_forward if sparse else None

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        x = x + self.attention(self.attention_norm(x), context)
        if self.moe is not None:
            return x + self.moe(self.ffn_norm(x), context.padding)
        assert self.feed_forward is not None
        return x + self.feed_forward(self.ffn_norm(x))


class GroupedQueryAttention(nn.Module):
    """Rotary attention in which each key head serves several query heads, without biases."""

    rotate = staticmethod(rotate_pair)

    def __init__(
        self, dim: int, *, num_heads: int, num_kv_heads: int, head_dim: int, qk_norm_eps: float | None = None
    ) -> None:
        """Build the projections; ``qk_norm_eps`` adds an RMSNorm over each query and key head (Qwen3)."""
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.linears = SharedInput()
        self.inner_attention = CausalAttention(num_heads, num_kv_heads, head_dim)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        assert context.rope is not None
        # -1 heads: a module whose projections were cut over ranks holds only its own
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.linears(x, self.wq, self.wk, self.wv))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q, k = self.rotate(q, k, *context.rope)
        out = self.inner_attention(q, k, v, context)
        return self.wo(out.flatten(-2))


class SwiGLU(nn.Module):
    """Gated feed-forward ``w2(silu(w1 x) * w3 x)`` (arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        """Build the three projections, without biases."""
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)
        self.linears = SharedInput()
        self.gated = GatedInput()

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        gate, up = self.linears(x, self.w1, self.w3)
        return self.gated(gate, up, self.w2)


def build_moe(args: MoEArgs) -> MoE:
    """A mixture of experts whose shared experts are one `SwiGLU`."""
    shared = args.num_shared_experts * args.expert_ffn_dim
    return MoE(args, SwiGLU(args.dim, shared) if shared else None)
