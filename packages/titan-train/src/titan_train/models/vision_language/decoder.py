"""A decoder that is given features of images in place of tokens: what every vision-language model here has in common.

The batch names for every token the feature that takes its place (``image_source``). Taking features by that number, rather
than writing them into the embeddings, needs no copy in place, survives recomputation, and lets the rows be cut anywhere: a rank
takes the features of its own tokens.

A decoder family joins in with one line, ``class MyVL(SeesImages, My)``, whose arguments are also `EncoderArgs`. It must have
``tok_embeddings``, ``layers`` called as ``layer(x, context)``, ``norm``, ``lm_head``, ``sequence_context`` and ``init_weights``,
as `titan_train.models.common.decoder.Decoder` has them; learned positions in ``pos_embeddings`` are added after the features.
What one token is given must not depend on its id below the embedding.

Shapes: as `titan_train.models.common.decoder`; F features of all images of the batch, P patches.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from titan_train.models.common.attention import SequenceContext
from titan_train.models.common.rope import rope_cos_sin, rope_frequencies
from titan_train.models.deepseek.model import DeepSeek
from titan_train.models.flops import flops_per_token
from titan_train.models.gpt.model import GPT
from titan_train.models.llama.model import Llama
from titan_train.models.qwen3.model import Qwen3
from titan_train.models.vision_language.args import EncoderArgs
from titan_train.models.vision_language.encoder import VisionEncoder, patch_places
from titan_train.models.vision_language.hf import QWEN3_VL_HF


class SeesImages(nn.Module):
    """An encoder of images before the decoder that the class inherits from after this one."""

    first_stage_parts = ("tok_embeddings", "pos_embeddings", "vision")
    fsdp_units = ("vision",)
    """Modules that FSDP gathers at once: the encoder is small beside the decoder, and runs once a forward."""

    def __init__(self, args: Any) -> None:
        """Build the decoder and the encoder before it; weights are set by `init_weights`."""
        super().__init__(args)
        self.args: Any = args
        self.encoder_args: EncoderArgs = args
        # features for these layers do not travel between pipeline stages
        self.first_stage_layers = max(1, len(args.deepstack_layers))
        self.vision: VisionEncoder | None = VisionEncoder(args, args.dim)
        # the encoder runs first: what wraps modules in their order must find it there
        self._modules = {"vision": self._modules["vision"], **self._modules}

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_plan: Any = None,
        padding: Tensor | None = None,
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
            padding: ``[B, S]`` bool.
            labels: ``[B, S]`` int64.
            pixels: Patches of all images of the batch, ``[P, values]``. None: text alone. In training the encoder runs all
                the same, on one empty image, so that all ranks take part in its collectives.
            patches: ``[P, 4]``, by `titan_train.models.vision_language.encoder.patch_places`.
            image_bounds: ``[N + 1]`` int32, likewise.
            image_source: ``[B, S]`` int64: the feature that stands in a token's place, or -1.

        Returns:
            As `Decoder.forward`.
        """
        decoder: Any = self
        context: SequenceContext = decoder.sequence_context(tokens, positions, cu_seqlens, attention_plan, padding)
        x, deep = tokens, ()
        if decoder.tok_embeddings is not None:
            x = decoder.tok_embeddings(tokens)
            if pixels is not None or self.training:
                x, *deep = self._with_images(x, pixels, patches, image_bounds, image_source)
            if (learned := getattr(self, "pos_embeddings", None)) is not None:
                x = x + learned(context.positions)
        for number, layer in enumerate(decoder.layers.values()):
            x = layer(x, context)
            if number < len(deep):
                x = x + deep[number]
        if decoder.norm is None or decoder.lm_head is None:
            return x
        x = decoder.norm(x)
        return decoder.lm_head(x) if labels is None else decoder.lm_head(x, labels)

    def sequence_context(self, tokens: Tensor, positions: Tensor | None, *others: Any) -> SequenceContext:
        """As `Decoder.sequence_context`; a decoder without rows and columns takes the first of three axes of positions."""
        if positions is not None and positions.ndim == 3 and not self.encoder_args.grid_positions:
            positions = positions[..., 0]
        return cast("Any", super()).sequence_context(tokens, positions, *others)

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
            merge = self.encoder_args.merge
            pixels = x.new_zeros(merge**2, self.encoder_args.patch_values)
            patches, bounds = (t.to(x.device) for t in patch_places([(merge, merge)], merge))
            source = torch.full(x.shape[:2], -1, device=x.device)
        if patches is None or bounds is None or source is None:
            raise ValueError(
                f"{type(self).__name__} was given pixels without patches, image_bounds or image_source: it would not know where "
                "they belong. Pass all four, as titan_train.tasks.vision makes them."
            )
        features, *deep = self.vision(pixels, patches, bounds)
        here = (source >= 0).unsqueeze(-1)
        numbers = source.clamp(min=0)
        return [torch.where(here, features[numbers], x), *(torch.where(here, f[numbers], 0.0) for f in deep)]

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, of a token of a row; see `encoder_flops_per_token`."""
        decoder: Any = self
        head = 0 if decoder.lm_head is None else decoder.lm_head.weight.numel()
        layers = sum(flops_per_token(layer, seq_len) for layer in decoder.layers.values())
        return layers + 6.0 * head + self.encoder_flops_per_token(seq_len)

    def encoder_flops_per_token(self, seq_len: int) -> float:
        """Forward and backward of the encoder, per token of a row, with the share of image tokens that the arguments name."""
        if self.vision is None:
            return 0.0
        args, squared = self.encoder_args, self.encoder_args.merge**2
        blocks = sum(p.numel() for p in (*self.vision.blocks.parameters(), *self.vision.patch_embedding.parameters()))
        joined = [*self.vision.projector.parameters(), *self.vision.deepstack.parameters()]
        # an image is taken to fill the row's share: the most that attention inside it can cost
        attention = 12.0 * args.vision_layers * args.vision_dim * squared * args.image_share * seq_len
        return args.image_share * (squared * (6.0 * blocks + attention) + 6.0 * sum(p.numel() for p in joined))

    def init_weights(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        """As the decoder's; biases are zero, and the encoder's residual branches shrink with its own depth."""
        if not fqn.startswith("vision."):
            cast("Any", super()).init_weights(fqn, tensor, generator)
            return
        owner, leaf = fqn.split(".")[-2:]
        if leaf == "bias":
            nn.init.zeros_(tensor)
        elif owner.endswith("norm"):
            nn.init.ones_(tensor)
        else:
            deep = owner in ("wo", "down") and ".blocks." in fqn
            std = 0.02 / math.sqrt(2 * self.encoder_args.vision_layers) if deep else 0.02
            nn.init.normal_(tensor, std=std, generator=generator)


# The arguments refuse mtp_depth, so these decoders are never given the tokens ahead.
class LlamaVL(SeesImages, Llama):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Llama with an encoder of images; positions count tokens."""


class GPTVL(SeesImages, GPT):  # pyright: ignore[reportIncompatibleMethodOverride]
    """GPT with an encoder of images; positions count tokens."""


class DeepSeekVL(SeesImages, DeepSeek):  # pyright: ignore[reportIncompatibleMethodOverride]
    """DeepSeek with an encoder of images; positions count tokens."""


class Qwen3VL(SeesImages, Qwen3):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Qwen3-VL (arXiv:2511.21631): a Qwen3 decoder, dense or with experts, with an encoder of images before it.

    Positions have three axes (M-RoPE): text advances all of them, image tokens count rows and columns.
    """

    hf = QWEN3_VL_HF

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
