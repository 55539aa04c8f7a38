"""Qwen3-VL as a plain module (arXiv:2511.21631): a Qwen3 decoder that is given features of images in place of tokens.

The batch says for every token which feature stands in its place (``image_source``). Taking features by that number, rather
than writing them into the embeddings, needs no copy in place, survives recomputation, and lets the rows be cut anywhere: a rank
takes the features of its own tokens. Positions have three axes (M-RoPE): text advances all of them, image tokens count rows
and columns.

Shapes: as `titan_train.models.common.decoder`; F features of all images of the batch, P patches.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.models.common.blocks import DecoderBlock, GroupedQueryAttention, SwiGLU
from titan_train.models.common.decoder import Decoder
from titan_train.models.common.hf_config import compare_settings
from titan_train.models.common.rope import rope_cos_sin, rope_frequencies
from titan_train.models.flops import flops_per_token
from titan_train.models.qwen3_vl.args import Qwen3VLArgs
from titan_train.models.qwen3_vl.hf import args_from_hf, settings_of
from titan_train.models.qwen3_vl.vision import VisionEncoder, patch_places


class Qwen3VL(Decoder):
    """A dense Qwen3 decoder with an encoder of images before it."""

    first_stage_parts = ("tok_embeddings", "vision")
    fsdp_units = ("vision",)
    """Modules that FSDP gathers at once: the encoder is small beside the decoder, and runs once a forward."""

    def __init__(self, args: Qwen3VLArgs) -> None:
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
        # features for these layers do not travel between pipeline stages
        self.first_stage_layers = max(1, len(args.deepstack_layers))
        self.vision: VisionEncoder | None = VisionEncoder(args)
        # the encoder runs first: what wraps modules in their order must find it there
        self._modules = {"vision": self._modules["vision"], **self._modules}

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_plan: Any = None,
        labels: Tensor | None = None,
        pixels: Tensor | None = None,
        patches: Tensor | None = None,
        image_bounds: Tensor | None = None,
        image_source: Tensor | None = None,
    ) -> Tensor:
        """Logits of every next token, or their loss; arguments as in `Decoder.forward`, and those of images.

        Args:
            tokens: ``[B, S]`` int64, or hidden states ``[B, S, d]`` in a later pipeline stage.
            positions: ``[B, S, 3]`` int64 (time, row, column), or ``[B, S]`` for text alone.
            cu_seqlens: ``[B, N + 1]`` int32.
            attention_plan: Of context parallelism.
            labels: ``[B, S]`` int64.
            pixels: Patches of all images of the batch, ``[P, values]``. None: text alone. In training the encoder runs all
                the same, on one empty image, so that all ranks take part in its collectives.
            patches: ``[P, 4]``, by `titan_train.models.qwen3_vl.vision.patch_places`.
            image_bounds: ``[N + 1]`` int32, likewise.
            image_source: ``[B, S]`` int64: the feature that stands in a token's place, or -1.

        Returns:
            As `Decoder.forward`.
        """
        context = self.sequence_context(tokens, positions, cu_seqlens, attention_plan)
        x, deep = tokens, ()
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(tokens)
            if pixels is not None or self.training:
                x, *deep = self._with_images(x, pixels, patches, image_bounds, image_source)
        for number, layer in enumerate(self.layers.values()):
            x = layer(x, context)
            if number < len(deep):
                x = x + deep[number]
        if self.norm is None or self.lm_head is None:
            return x
        x = self.norm(x)
        return self.lm_head(x) if labels is None else self.lm_head(x, labels)

    def _with_images(
        self,
        x: Tensor,
        pixels: Tensor | None,
        patches: Tensor | None,
        bounds: Tensor | None,
        source: Tensor | None,
    ) -> list[Tensor]:
        """The embeddings with features in their places, and what deepstack adds after each layer; all ``[B, S, d]``."""
        assert self.vision is not None
        if pixels is None:
            pixels = x.new_zeros(self.args.merge**2, self.args.patch_values)
            patches, bounds = (
                t.to(x.device) for t in patch_places([(self.args.merge, self.args.merge)], self.args.merge)
            )
            source = torch.full(x.shape[:2], -1, device=x.device)
        if patches is None or bounds is None or source is None:
            raise ValueError(
                "Qwen3VL was given pixels without patches, image_bounds or image_source: it would not know where they belong. "
                "Pass all four, as titan_train.tasks.vision makes them."
            )
        features, *deep = self.vision(pixels, patches, bounds)
        here = (source >= 0).unsqueeze(-1)
        numbers = source.clamp(min=0)
        return [torch.where(here, features[numbers], x), *(torch.where(here, f[numbers], 0.0) for f in deep)]

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decoder.rope`; of positions ``[B, S, 3]``, channel pairs take turns between time, row and column."""
        if positions.ndim == 2:
            return rope_cos_sin(positions, self.rope_dim, self.rope_theta)
        pairs = torch.arange(self.rope_dim // 2, device=positions.device)
        axis = torch.zeros_like(pairs)
        for number, count in ((1, self.args.rope_row_pairs), (2, self.args.rope_column_pairs)):
            axis = torch.where((pairs % 3 == number) & (pairs < 3 * count), number, axis)
        angles = positions.double()[..., axis] * rope_frequencies(
            self.rope_dim, self.rope_theta, device=positions.device
        )
        return angles.cos().float().unsqueeze(2), angles.sin().float().unsqueeze(2)

    def check_hf_config(self, config: Mapping[str, Any]) -> None:
        """Refuse weights whose ``config.json`` describes another model.

        Raises:
            ValueError: Names every setting that differs, or that this model does not have.
        """
        compare_settings(settings_of(args_from_hf(config)), settings_of(self.args), name=type(self).__name__)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, of a token of a row; see `encoder_flops_per_token`."""
        head = 0 if self.lm_head is None else self.lm_head.weight.numel()
        layers = sum(flops_per_token(layer, seq_len) for layer in self.layers.values())
        return layers + 6.0 * head + self.encoder_flops_per_token(seq_len)

    def encoder_flops_per_token(self, seq_len: int) -> float:
        """Forward and backward of the encoder, per token of a row, with the share of image tokens that the arguments name."""
        if self.vision is None:
            return 0.0
        args, squared = self.args, self.args.merge**2
        blocks = sum(p.numel() for p in (*self.vision.blocks.parameters(), *self.vision.patch_embedding.parameters()))
        joined = [*self.vision.projector.parameters(), *self.vision.deepstack.parameters()]
        # an image is taken to fill the row's share: the most that attention inside it can cost
        attention = 12.0 * args.vision_layers * args.vision_dim * squared * args.image_share * seq_len
        return args.image_share * (squared * (6.0 * blocks + attention) + 6.0 * sum(p.numel() for p in joined))

    def init_weights(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        """As `Decoder.init_weights`; biases are zero, and the encoder's residual branches shrink with its own depth."""
        if not fqn.startswith("vision."):
            super().init_weights(fqn, tensor, generator)
            return
        owner, leaf = fqn.split(".")[-2:]
        if leaf == "bias":
            nn.init.zeros_(tensor)
        elif owner.endswith("norm"):
            nn.init.ones_(tensor)
        else:
            deep = owner in ("wo", "down") and ".blocks." in fqn
            std = 0.02 / math.sqrt(2 * self.args.vision_layers) if deep else 0.02
            nn.init.normal_(tensor, std=std, generator=generator)


def _block(args: Qwen3VLArgs) -> DecoderBlock:
    attention = GroupedQueryAttention(
        args.dim,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        qk_norm_eps=args.norm_eps,
    )
    return DecoderBlock(args.dim, args.norm_eps, attention, SwiGLU(args.dim, args.ffn_dim))
