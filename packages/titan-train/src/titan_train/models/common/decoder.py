"""A decoder-only model from a list of layers: embedding → layers → norm → head.

What the decoder families have in common: how rows, documents and positions become a context, how a pipeline stage that holds
only part of the model runs, how weights start, and which published weights it takes. Positions are rotary, or learned.

Shapes: B batch, S sequence, d width, V vocabulary, N documents of a row (padded).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titan_train.models.common.attention import SequenceContext, row_positions
from titan_train.models.common.hf import HuggingFace, compare_settings
from titan_train.models.common.mtp import MTPModule, MTPModules
from titan_train.models.common.norm import RMSNorm
from titan_train.models.common.packed import packed_boundaries
from titan_train.models.common.rope import rope_cos_sin
from titan_train.models.parametrization import Parametrization


class Decoder(nn.Module):
    """A stack of decoder layers."""

    hf: ClassVar[HuggingFace | None] = None
    """The family's format on Hugging Face."""
    args: Any
    """What the family builds the model from."""

    parametrization: Parametrization | None = None
    """How weights and rates scale with width and depth; None is as usual."""

    supports_kv_cache = True
    """Tokens meet only in `CausalAttention`, so generation may put a key-value cache there."""

    token_wise = (
        "*layers.*.feed_forward",
        "*layers.*.moe.shared_experts",
        "mtp.*.feed_forward",
        "mtp.*.moe.shared_experts",
    )
    """Feed-forwards that map each token by itself."""

    loss_head = "lm_head"
    """The linear to the vocabulary. Training may replace it by one that is also given the labels, and then returns the loss."""

    last_stage_parts = ("norm", "lm_head", "mtp_embeddings", "mtp")
    """Modules that only the last pipeline stage holds."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        dim: int,
        vocab_size: int,
        norm_eps: float,
        tied_embeddings: bool,
        rope_dim: int = 0,
        rope_theta: float = 10_000.0,
        max_seq_len: int | None = None,
        norm: Callable[..., nn.Module] = RMSNorm,
        mtp_blocks: Sequence[nn.Module] = (),
    ) -> None:
        """Put the model together; weights are set by `init_weights`.

        Args:
            layers: Called as ``layer(x, context)``.
            dim: d.
            vocab_size: V.
            norm_eps: Of the last norm.
            tied_embeddings: The head is the embedding's matrix.
            rope_dim: Rotated channels of a head; 0 is none.
            rope_theta: Base of the rotary frequencies.
            max_seq_len: Learned positions; None is none.
            norm: The last norm and those of the modules of ``mtp_blocks``, called with d and ``eps``.
            mtp_blocks: Layers of the modules that predict tokens further ahead, one each.
        """
        super().__init__()
        self.num_layers = len(layers)
        self.rope_dim = rope_dim
        self.rope_theta = rope_theta
        self.max_seq_len = max_seq_len
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(vocab_size, dim)
        self.pos_embeddings = None if max_seq_len is None else nn.Embedding(max_seq_len, dim)
        # A dict keyed by layer number: taking some layers out leaves the names of the others as they are.
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.norm: nn.Module | None = norm(dim, eps=norm_eps)
        self.lm_head: nn.Linear | None = nn.Linear(dim, vocab_size, bias=False)
        if tied_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight
        self.mtp_embeddings: nn.Embedding | None = None
        self.mtp: MTPModules | None = None
        if mtp_blocks:
            # the same matrix under a name of its own: the last pipeline stage has no other
            self.mtp_embeddings = nn.Embedding(vocab_size, dim)
            self.mtp_embeddings.weight = self.tok_embeddings.weight
            self.mtp = MTPModules([MTPModule(dim, lambda: norm(dim, eps=norm_eps), block) for block in mtp_blocks])

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_plan: Any = None,
        padding: Tensor | None = None,
        labels: Tensor | None = None,
        ahead_tokens: Tensor | None = None,
        ahead_labels: Tensor | None = None,
    ) -> Tensor:
        """Logits of every next token, or their loss.

        Args:
            tokens: ``[B, S]`` int64. In a pipeline stage without embedding, the stage before's output ``[B, S, d]``
                (then ``positions`` must be given).
            positions: Position of each token in its document, ``[B, S]`` int64; the default counts from each
                document's start.
            cu_seqlens: Cumulative document lengths, ``[B, N + 1]`` int32, padded by repeating S; attention stays
                inside documents. None: every row is one document.
            attention_plan: Passed on to the attention, see `SequenceContext`.
            padding: Which tokens only fill a row, ``[B, S]`` bool: experts are not balanced by them. None: there are none.
            labels: ``[B, S]`` int64, handed on to a head that computes the loss, see ``loss_head``.
            ahead_tokens: ``[B, S, D]`` int64, from `titan_train.models.common.mtp.look_ahead`, for a model with D such modules.
            ahead_labels: ``[B, S, D]`` int64, likewise. In training, the loss of labels has the gradient of the modules' losses
                too.

        Returns:
            ``[B, S, V]``, in the parameters' dtype; ``[B, S, d]`` from a pipeline stage without head; with labels, the
            scalar that the head returns.

        Raises:
            ValueError: The rows have more tokens than learned positions, and no positions or documents that would keep
                them below.
        """
        context = self.sequence_context(tokens, positions, cu_seqlens, attention_plan, padding)
        x = tokens
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(tokens)
            x = x if self.pos_embeddings is None else x + self.pos_embeddings(context.positions)
        for layer in self.layers.values():
            x = layer(x, context)
        if self.norm is None or self.lm_head is None:
            return x
        x = self.norm(x)
        if labels is None:
            return self.lm_head(x)
        loss = self.lm_head(x, labels)
        if not self.training or self.mtp is None or ahead_tokens is None or ahead_labels is None:
            return loss
        assert self.mtp_embeddings is not None
        return loss + self.mtp.loss(x, ahead_tokens, ahead_labels, context, self.mtp_embeddings, self.lm_head)

    @property
    def fsdp_units(self) -> tuple[str, ...]:
        """The head is a unit of its own where it runs several times, unless it is part of another matrix."""
        if self.mtp is None or self.lm_head is None or self.mtp_embeddings is None:
            return ()
        return () if self.lm_head.weight is self.mtp_embeddings.weight else ("lm_head",)

    def ahead_context(self, positions: Tensor) -> SequenceContext:
        """What the modules' blocks take, after a forward at ``positions`` ``[B, S]``."""
        return self.sequence_context(positions, positions, None)

    def sequence_context(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        attention_plan: Any = None,
        padding: Tensor | None = None,
    ) -> SequenceContext:
        """What the layers need to know about the rows of a batch; arguments as in `forward`."""
        seq_len = tokens.shape[1] if positions is None else positions.shape[1]
        if positions is None:
            if cu_seqlens is None and self.max_seq_len is not None and seq_len > self.max_seq_len:
                raise ValueError(
                    f"{seq_len} tokens in a row, but the model has {self.max_seq_len} learned positions: shorten the "
                    f"rows, or train a model with args.max_seq_len={seq_len}."
                )
            positions = row_positions(seq_len, cu_seqlens, tokens.device)
        return SequenceContext(
            positions=positions,
            cu_seqlens=cu_seqlens,
            boundaries=None if cu_seqlens is None else packed_boundaries(cu_seqlens, seq_len),
            rope=self.rope(positions) if self.rope_dim else None,
            attention_plan=attention_plan,
            padding=padding,
        )

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles of ``positions`` ``[B, S]``, each ``[B, S, 1, rope_dim / 2]`` float32."""
        return rope_cos_sin(positions, self.rope_dim, self.rope_theta)

    def check_hf_config(self, config: Mapping[str, Any]) -> None:
        """Refuse weights whose ``config.json`` describes another model; `titan_ckpt.import_hf` asks before it reads any.

        Raises:
            ValueError: Names every setting that differs, or that this model does not have.
        """
        if self.hf is not None:
            published = self.hf.settings_of(self.hf.args_from(config))
            compare_settings(published, self.hf.settings_of(self.args), name=type(self).__name__)

    def init_weights(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one full parameter with its initial value.

        Norms are one and biases zero; matrices, stacked experts among them, are normal with standard deviation 0.02, those
        that write to the residual stream (``wo``, ``w2``) 0.02 / sqrt(2 * num_layers), so that its variance does not grow
        with depth (GPT-2). A `parametrization` scales them by width and depth.

        Args:
            fqn: Name of the parameter in this model.
            tensor: The whole parameter, a plain tensor; written in place.
            generator: Source of all randomness, on the tensor's device.
        """
        owner, leaf = fqn.split(".")[-2:]
        own = self.parametrization
        scale = 1.0 if own is None else own.init_scale(fqn)
        if leaf == "bias":
            nn.init.zeros_(tensor)
        elif owner.endswith("norm"):
            nn.init.constant_(tensor, scale)
        elif owner in ("wo", "w2") or leaf == "w2":
            layers = self.num_layers if own is None else own.base_layers
            nn.init.normal_(tensor, std=0.02 * scale / math.sqrt(2 * layers), generator=generator)
        else:
            nn.init.normal_(tensor, std=0.02 * scale, generator=generator)
