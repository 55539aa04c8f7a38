"""The Llama-3 architecture as a plain module (arXiv:2407.21783; Llama 2, arXiv:2307.09288).

Embedding → blocks of ``x + attention(norm(x))`` and ``x + feed_forward(norm(x))`` → norm → head. Grouped-query
attention, rotary positions, RMSNorm, SwiGLU, no biases. Nothing here knows of ranks: parallelism, compilation and
checkpointing are applied from outside.

Shapes: B batch, S sequence, d width, H query heads, K key-value heads, D head width, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.models.attention import CausalAttention, SequenceContext, document_mask, document_positions
from titan_train.models.llama.configs import LlamaArgs
from titan_train.models.rope import RopeScaling, apply_rope, rope_cos_sin
from titan_train.models.shared_input import SharedInput


class Llama(nn.Module):
    """A Llama-3-architecture decoder."""

    supports_kv_cache = True
    """Tokens meet only in `CausalAttention`, so generation may put a key-value cache there."""

    def __init__(self, args: LlamaArgs) -> None:
        """Build the modules; weights are set by `init_weights`."""
        super().__init__()
        self.args = args
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        # A dict keyed by layer number: taking some layers out leaves the names of the others as they are.
        self.layers = nn.ModuleDict({str(i): LlamaBlock(args) for i in range(args.num_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.lm_head: nn.Linear | None = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tied_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_plan: Any = None,
    ) -> Tensor:
        """Logits of every next token.

        Args:
            tokens: ``[B, S]`` int64. In a pipeline stage without embedding, the stage before's output ``[B, S, d]``
                (then ``positions`` must be given).
            positions: Position of each token in its document, ``[B, S]`` int64; the default counts from each
                document's start.
            cu_seqlens: Cumulative document lengths, ``[B, N + 1]`` int32, padded by repeating S; attention stays
                inside documents. None: every row is one document.
            attention_plan: Passed on to the attention, see `SequenceContext`.

        Returns:
            ``[B, S, V]``, in the parameters' dtype; ``[B, S, d]`` from a pipeline stage without head.
        """
        context = self.sequence_context(tokens, positions, cu_seqlens, attention_plan)
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, context)
        return x if self.norm is None or self.lm_head is None else self.lm_head(self.norm(x))

    def sequence_context(
        self, tokens: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None, attention_plan: Any = None
    ) -> SequenceContext:
        """What the blocks need to know about the rows of a batch; arguments as in `forward`."""
        seq_len = tokens.shape[1] if positions is None else positions.shape[1]
        if positions is None and cu_seqlens is not None:
            positions = document_positions(cu_seqlens, seq_len)
        elif positions is None:
            positions = torch.arange(seq_len, device=tokens.device).unsqueeze(0)
        return SequenceContext(
            positions=positions,
            cu_seqlens=cu_seqlens,
            mask=None if cu_seqlens is None else document_mask(cu_seqlens, seq_len),
            rope=rope_cos_sin(positions, self.args.head_width, self.args.rope_theta, rope_scaling(self.args)),
            attention_plan=attention_plan,
        )

    def init_weights(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one full parameter with its initial value.

        Norms are one; matrices are normal with standard deviation 0.02, those that write to the residual stream
        (``wo``, ``w2``) 0.02 / sqrt(2 * num_layers), so that its variance does not grow with depth (GPT-2).

        Args:
            fqn: Name of the parameter in this model.
            tensor: The whole parameter, a plain tensor; written in place.
            generator: Source of all randomness, on the tensor's device.
        """
        owner = fqn.split(".")[-2]
        if owner.endswith("norm"):
            nn.init.ones_(tensor)
        elif owner in ("wo", "w2"):
            nn.init.normal_(tensor, std=0.02 / math.sqrt(2 * self.args.num_layers), generator=generator)
        else:
            nn.init.normal_(tensor, std=0.02, generator=generator)


class LlamaBlock(nn.Module):
    """One decoder block: attention and feed-forward, each on the normalised stream and added back."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = LlamaAttention(args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = SwiGLU(args.dim, args.ffn_dim)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.feed_forward(self.ffn_norm(x))


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.head_dim = args.head_width
        self.wq = nn.Linear(args.dim, args.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.num_heads * self.head_dim, args.dim, bias=False)
        self.linears = SharedInput()
        self.inner_attention = CausalAttention(args.num_heads, args.num_kv_heads, self.head_dim)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        assert context.rope is not None
        # -1 heads: a module whose projections were cut over ranks holds only its own
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.linears(x, self.wq, self.wk, self.wv))
        out = self.inner_attention(apply_rope(q, *context.rope), apply_rope(k, *context.rope), v, context)
        return self.wo(out.flatten(-2))


class SwiGLU(nn.Module):
    """Gated feed-forward ``w2(silu(w1 x) * w3 x)`` (arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)
        self.linears = SharedInput()

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        gate, up = self.linears(x, self.w1, self.w3)
        return self.w2(F.silu(gate) * up)


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
