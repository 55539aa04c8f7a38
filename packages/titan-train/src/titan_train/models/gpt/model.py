"""The GPT-3 architecture as a plain module (arXiv:2005.14165; GPT-2's pre-norm blocks).

Token and learned position embeddings → blocks of ``x + attention(norm(x))`` and ``x + mlp(norm(x))`` → norm → head,
with LayerNorm, GELU and biases everywhere but the head. Every layer attends to all of its document (GPT-3 itself
alternates dense and banded layers; the parameters are the same).

Shapes: B batch, S sequence, d width, H heads, D head width, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.models.common.attention import CausalAttention, SequenceContext, row_positions
from titan_train.models.common.hf_config import compare_settings
from titan_train.models.common.packed import packed_boundaries
from titan_train.models.common.shared_input import GeluInput, SharedInput
from titan_train.models.gpt.args import GPTArgs
from titan_train.models.gpt.hf import args_from_hf, settings_of


class GPT(nn.Module):
    """A GPT-3-architecture decoder."""

    supports_kv_cache = True
    """Tokens meet only in `CausalAttention`, so generation may put a key-value cache there."""

    loss_head = "lm_head"
    """The linear to the vocabulary. Training may replace it by one that is also given the labels, and then returns the loss."""

    def __init__(self, args: GPTArgs) -> None:
        """Build the modules; weights are set by `init_weights`."""
        super().__init__()
        self.args = args
        self.max_seq_len = args.max_seq_len
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings: nn.Embedding | None = nn.Embedding(args.max_seq_len, args.dim)
        # A dict keyed by layer number: taking some layers out leaves the names of the others as they are.
        self.layers = nn.ModuleDict({str(i): GPTBlock(args) for i in range(args.num_layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(args.dim, eps=args.norm_eps)
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
        labels: Tensor | None = None,
    ) -> Tensor:
        """Logits of every next token, or their loss.

        Args:
            tokens: ``[B, S]`` int64. In a pipeline stage without embedding, the stage before's output ``[B, S, d]``
                (then ``positions`` must be given).
            positions: Position of each token in its document, ``[B, S]`` int64 below ``max_seq_len``; the default
                counts from each document's start.
            cu_seqlens: Cumulative document lengths, ``[B, N + 1]`` int32, padded by repeating S; attention stays
                inside documents. None: every row is one document.
            attention_plan: Passed on to the attention, see `SequenceContext`.
            labels: ``[B, S]`` int64, handed on to a head that computes the loss, see ``loss_head``.

        Returns:
            ``[B, S, V]``, in the parameters' dtype; ``[B, S, d]`` from a pipeline stage without head; with labels, the
            scalar that the head returns.

        Raises:
            ValueError: Rows longer than ``max_seq_len`` without positions or documents that would keep them below.
        """
        context = self.sequence_context(tokens, positions, cu_seqlens, attention_plan)
        if self.tok_embeddings is None or self.pos_embeddings is None:
            x = tokens
        else:
            x = self.tok_embeddings(tokens) + self.pos_embeddings(context.positions)
        for layer in self.layers.values():
            x = layer(x, context)
        if self.norm is None or self.lm_head is None:
            return x
        x = self.norm(x)
        return self.lm_head(x) if labels is None else self.lm_head(x, labels)

    def sequence_context(
        self, tokens: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None, attention_plan: Any = None
    ) -> SequenceContext:
        """What the blocks need to know about the rows of a batch; arguments as in `forward`."""
        seq_len = tokens.shape[1] if positions is None else positions.shape[1]
        if positions is None:
            if cu_seqlens is None and seq_len > self.max_seq_len:
                raise ValueError(
                    f"{seq_len} tokens in a row, but the model has {self.max_seq_len} learned positions: shorten the "
                    f"rows, or train a model with args.max_seq_len={seq_len}."
                )
            positions = row_positions(seq_len, cu_seqlens, tokens.device)
        ends = None if cu_seqlens is None else packed_boundaries(cu_seqlens, seq_len)
        return SequenceContext(
            positions=positions, cu_seqlens=cu_seqlens, boundaries=ends, attention_plan=attention_plan
        )

    def check_hf_config(self, config: Mapping[str, Any]) -> None:
        """Refuse weights whose ``config.json`` describes another model; `titan_ckpt.import_hf` asks before it reads any.

        Raises:
            ValueError: Names every setting that differs, or that this model does not have.
        """
        compare_settings(settings_of(args_from_hf(config)), settings_of(self.args), name=type(self).__name__)

    def init_weights(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one full parameter with its initial value.

        Norm weights are one and biases zero; matrices are normal with standard deviation 0.02, those that write to
        the residual stream (``wo``, ``w2``) 0.02 / sqrt(2 * num_layers) (GPT-2).

        Args:
            fqn: Name of the parameter in this model.
            tensor: The whole parameter, a plain tensor; written in place.
            generator: Source of all randomness, on the tensor's device.
        """
        owner, kind = fqn.split(".")[-2:]
        if kind == "bias":
            nn.init.zeros_(tensor)
        elif owner.endswith("norm"):
            nn.init.ones_(tensor)
        elif owner in ("wo", "w2"):
            nn.init.normal_(tensor, std=0.02 / math.sqrt(2 * self.args.num_layers), generator=generator)
        else:
            nn.init.normal_(tensor, std=0.02, generator=generator)


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
