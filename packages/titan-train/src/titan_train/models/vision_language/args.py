"""The arguments of the encoder of images, and of each decoder family with one before it. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from titan_train.models.deepseek.args import DeepSeekArgs
from titan_train.models.gpt.args import GPTArgs
from titan_train.models.llama.args import LlamaArgs


@dataclass(frozen=True, kw_only=True)  # no slots: a class with them cannot be joined to another
class EncoderArgs:
    """Widths and depths of an encoder of images and its projector, and the tokens that stand for images."""

    image_token: int = 151_655
    """Id that stands for one token of an image."""
    image_start_token: int = 151_652
    """Id before the tokens of an image."""
    image_end_token: int = 151_653
    """Id after them."""
    vision_dim: int = 1152
    """Width of the encoder."""
    vision_layers: int = 27
    """Blocks of the encoder."""
    vision_heads: int = 16
    """Attention heads of the encoder."""
    vision_ffn_dim: int = 4304
    """Width of the encoder's feed-forward."""
    patch: int = 16
    """Pixels along one side of a patch."""
    frames: int = 2
    """Frames of a patch; an image is repeated as often."""
    merge: int = 2
    """Patches along one side of what becomes one token of the decoder."""
    position_side: int = 48
    """Rows and columns of the learned positions, which are interpolated to the grid of an image."""
    deepstack_layers: tuple[int, ...] = (8, 16, 24)
    """Encoder blocks whose output is also added after decoder layer 0, 1, …"""
    image_share: float = 0.5
    """Share of a row's tokens that stand for images: for counting FLOPs and balancing pipeline stages only."""

    grid_positions: ClassVar[bool] = False
    """Whether the decoder knows rows and columns of an image too (M-RoPE), not the order of tokens alone."""

    def check_encoder(self, num_layers: int) -> None:
        """Refuse with a ValueError what no encoder before a decoder of ``num_layers`` can be."""
        if self.vision_dim % self.vision_heads or self.vision_dim // self.vision_heads % 4:
            raise ValueError(
                f"model.args.vision_dim={self.vision_dim} over vision_heads={self.vision_heads}: a head needs a multiple of 4 "
                "channels, one pair for rows and one for columns. Change one of the two."
            )
        wrong = [layer for layer in self.deepstack_layers if not 0 <= layer < self.vision_layers]
        if (
            wrong
            or len(self.deepstack_layers) > num_layers
            or sorted(set(self.deepstack_layers)) != list(self.deepstack_layers)
        ):
            raise ValueError(
                f"model.args.deepstack_layers={list(self.deepstack_layers)} must be rising numbers of the "
                f"{self.vision_layers} encoder blocks, at most one for each of the {num_layers} decoder layers."
            )
        for name in ("patch", "frames", "merge", "position_side", "vision_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.args.{name}={getattr(self, name)} must be at least 1.")
        if not 0.0 <= self.image_share <= 1.0:
            raise ValueError(f"model.args.image_share={self.image_share} is a share of the tokens: use 0 to 1.")

    @property
    def patch_values(self) -> int:
        """Values of one patch: colours, frames, rows and columns."""
        return 3 * self.frames * self.patch**2


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaVLArgs(LlamaArgs, EncoderArgs):
    """Llama with an encoder of images."""

    def __post_init__(self) -> None:
        LlamaArgs.__post_init__(self)
        self.check_encoder(self.num_layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTVLArgs(GPTArgs, EncoderArgs):
    """GPT with an encoder of images; an image takes as many learned positions as it has tokens."""

    def __post_init__(self) -> None:
        GPTArgs.__post_init__(self)
        self.check_encoder(self.num_layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekVLArgs(DeepSeekArgs, EncoderArgs):
    """DeepSeek with an encoder of images."""

    def __post_init__(self) -> None:
        DeepSeekArgs.__post_init__(self)
        self.check_encoder(self.num_layers)
