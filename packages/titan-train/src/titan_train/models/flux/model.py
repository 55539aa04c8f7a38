"""The FLUX transformer, after the published model (black-forest-labs/flux) and diffusers' ``FluxTransformer2DModel``.

Between pipeline stages travel the image's and the text's hidden states and ``vec``; the first stage makes them, the last one
turns the image's into a velocity.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.models.flux.args import FluxArgs
from titan_train.models.flux.blocks import DoubleBlock, SingleBlock, TokenPlaces
from titan_train.models.flux.rope import TIME_FEATURES, rope_table


class VectorEmbedder(nn.Module):
    """Two linears around SiLU: from features of a sample to the model's width."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, d]`` from ``[B, features]``."""
        return self.second(F.silu(self.first(x)))


class FinalLayer(nn.Module):
    """The last norm, modulated, and the projection to velocities. Scale comes before shift, as diffusers has it."""

    def __init__(self, args: FluxArgs) -> None:
        super().__init__()
        self.modulation = nn.Linear(args.dim, 2 * args.dim)
        self.out = nn.Linear(args.dim, args.in_channels)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        """``[B, I, C]``."""
        scale, shift = self.modulation(F.silu(vec)).unsqueeze(1).chunk(2, dim=-1)
        return self.out((1 + scale) * F.layer_norm(x, (x.shape[-1],), eps=1e-6) + shift)


class Flux(nn.Module):
    """Predict the velocity ``noise - image`` of packed latents between an image (time 0) and noise (time 1)."""

    pipeline_layers = ("double_blocks", "single_blocks")
    float8_skip = ("image_in", "text_in", "time_in", "pooled_in", "guidance_in", "*modulation", "final")
    """The ends, where errors reach the velocity at once, and modulation, which has one row per sample: nothing to gain."""

    def __init__(self, args: FluxArgs) -> None:
        super().__init__()
        self.args = args
        dim = args.dim
        self.image_in: nn.Module | None = nn.Linear(args.in_channels, dim)
        self.text_in: nn.Module | None = nn.Linear(args.text_dim, dim)
        self.time_in: nn.Module | None = VectorEmbedder(TIME_FEATURES, dim)
        self.pooled_in: nn.Module | None = VectorEmbedder(args.pooled_dim, dim)
        self.guidance_in: nn.Module | None = VectorEmbedder(TIME_FEATURES, dim) if args.guidance else None
        self.double_blocks = nn.ModuleDict({str(i): DoubleBlock(args) for i in range(args.num_layers)})
        self.single_blocks = nn.ModuleDict({str(i): SingleBlock(args) for i in range(args.num_single_layers)})
        self.final: nn.Module | None = FinalLayer(args)

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        vec: Tensor | None = None,
        *,
        positions: Tensor,
        pooled: Tensor | None = None,
        time: Tensor | None = None,
        guidance: Tensor | None = None,
        attention_plan: Any = None,
    ) -> Any:
        """The velocity, or what the next pipeline stage takes.

        Args:
            image: Noisy packed latents ``[B, I, C]``; in a later pipeline stage hidden states ``[B, I, d]``.
            text: Text features ``[B, T, text_dim]``; later hidden states ``[B, T, d]``.
            vec: What the stage before returned, ``[B, d]``; None in the first.
            positions: Place of each token on each axis, text first, ``[1, T + I, 3]`` int64.
            pooled: Pooled text features ``[B, pooled_dim]``.
            time: Features of each sample's time, ``[B, 256]``, by `titan_train.models.flux.rope.time_features`.
            guidance: Features of the guidance scale, likewise; of a model with that input.
            attention_plan: Of context parallelism.

        Returns:
            ``[B, I, C]``, or the tuple of image, text and ``vec``.
        """
        if self.image_in is not None:
            image, text, vec = self._embed(image, text, time, pooled, guidance)
        assert vec is not None
        cos, sin = rope_table(positions, _axes(self.args))
        places = TokenPlaces(cos, sin, attention_plan)
        for block in self.double_blocks.values():
            image, text = block(image, text, vec, places)
        if self.single_blocks:
            length = text.shape[1]
            x = torch.cat((text, image), dim=1)
            for block in self.single_blocks.values():
                x = block(x, vec, places)
            text, image = x[:, :length], x[:, length:]
        if self.final is None:
            return image.contiguous(), text.contiguous(), vec
        return self.final(image, vec)

    def _embed(
        self, image: Tensor, text: Tensor, time: Tensor | None, pooled: Tensor | None, guidance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.image_in is not None
        assert self.text_in is not None
        assert self.time_in is not None
        assert self.pooled_in is not None
        if time is None or pooled is None or (self.guidance_in is not None) != (guidance is not None):
            raise ValueError(
                "Flux needs the features time and pooled, and guidance exactly where model.args.guidance is true. Pass them by "
                "name."
            )
        vec = self.time_in(time) + self.pooled_in(pooled)
        if self.guidance_in is not None:
            vec = vec + self.guidance_in(guidance)
        return self.image_in(image), self.text_in(text), vec

    def take_stage(self, layers: range, *, first: bool, last: bool) -> "Flux":
        """A copy of what one pipeline stage holds; double blocks are counted before single ones."""
        stage = copy.copy(self)
        doubles = self.args.num_layers
        kept = {
            "double_blocks": nn.ModuleDict({str(i): self.double_blocks[str(i)] for i in layers if i < doubles}),
            "single_blocks": nn.ModuleDict(
                {str(i - doubles): self.single_blocks[str(i - doubles)] for i in layers if i >= doubles}
            ),
        }
        gone = [
            name for name in self._modules if (name.endswith("_in") and not first) or (name == "final" and not last)
        ]
        stage._modules = {**self._modules, **kept, **dict.fromkeys(gone)}
        return copy.deepcopy(stage)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, of a token of text or image."""
        blocks: list[Any] = [*self.double_blocks.values(), *self.single_blocks.values()]
        ends = [module for module in (self.image_in, self.final) if module is not None]
        return sum(block.flops_per_token(seq_len) for block in blocks) + 6.0 * sum(
            p.numel() for module in ends for name, p in module.named_parameters() if not name.startswith("modulation")
        )

    def init_weights(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Zero modulation and output: blocks begin as identities and the velocity as exactly 0. Others as published."""
        if fqn.endswith("bias") or "modulation" in fqn or fqn.startswith("final."):
            tensor.zero_()
        elif fqn.endswith("_norm.weight"):
            tensor.fill_(1.0)
        elif fqn.startswith(("time_in.", "pooled_in.", "guidance_in.")):
            nn.init.normal_(tensor, std=0.02, generator=generator)
        else:
            nn.init.xavier_uniform_(tensor, generator=generator)


def _axes(args: FluxArgs) -> tuple[int, int, int]:
    return args.rope_index_dim, args.rope_row_dim, args.rope_column_dim
