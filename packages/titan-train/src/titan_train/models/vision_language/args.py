"""The arguments of the encoder of images and of each decoder family with one, and the shipped Qwen3-VL models. No torch."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from titan_train.models.deepseek.args import DeepSeekArgs
from titan_train.models.gpt.args import GPTArgs
from titan_train.models.llama.args import LlamaArgs
from titan_train.models.qwen3.args import Qwen3Args
from titan_train.values import Count, Range, check_values


@dataclass(frozen=True, kw_only=True)  # no slots: a class with them cannot be joined to another
class EncoderArgs:
    """Widths and depths of an encoder of images and its projector, and the tokens that stand for images.

    It comes before the decoder's arguments among the bases of a class that has both.
    """

    image_token: int = 151_655
    """Id that stands for one token of an image."""
    image_start_token: int = 151_652
    """Id before the tokens of an image."""
    image_end_token: int = 151_653
    """Id after them."""
    vision_dim: Count = 1152
    """Width of the encoder."""
    vision_layers: Count = 27
    """Blocks of the encoder."""
    vision_heads: Count = 16
    """Attention heads of the encoder."""
    vision_ffn_dim: Count = 4304
    """Width of the encoder's feed-forward."""
    patch: Count = 16
    """Pixels along one side of a patch."""
    frames: Count = 2
    """Frames of a patch; an image is repeated as often."""
    merge: Count = 2
    """Patches along one side of what becomes one token of the decoder."""
    position_side: Count = 48
    """Rows and columns of the learned positions, which are interpolated to the grid of an image."""
    deepstack_layers: tuple[int, ...] = (8, 16, 24)
    """Encoder blocks whose output is also added after decoder layer 0, 1, …"""
    image_share: Annotated[float, Range(0, 1)] = 0.5
    """Share of a row's tokens that stand for images: for counting FLOPs and balancing pipeline stages only."""

    grid_positions: ClassVar[bool] = False
    """Whether the decoder knows rows and columns of an image too (M-RoPE), not the order of tokens alone."""

    def __post_init__(self) -> None:
        check_values("model.args", self)
        check_decoder = getattr(super(), "__post_init__", None)
        if check_decoder is not None:
            check_decoder()
        if getattr(self, "mtp_depth", 0):
            raise ValueError(
                f"model.args.mtp_depth={self.mtp_depth}: the tokens ahead of an image have no embeddings, so models of images "  # pyright: ignore[reportAttributeAccessIssue]
                "do not predict several. Set mtp_depth=0."
            )
        # an encoder alone has no decoder layers
        num_layers: int = getattr(self, "num_layers", len(self.deepstack_layers))
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

    @property
    def patch_values(self) -> int:
        """Values of one patch: colours, frames, rows and columns."""
        return 3 * self.frames * self.patch**2

    def vocabulary(self, tokens: int) -> int:
        """Rows of the embedding for so many tokens of a tokenizer, and those that stand for images."""
        return max(tokens, 1 + max(self.image_token, self.image_start_token, self.image_end_token))


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaVLArgs(EncoderArgs, LlamaArgs):
    """Llama with an encoder of images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTVLArgs(EncoderArgs, GPTArgs):
    """GPT with an encoder of images; an image takes as many learned positions as it has tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekVLArgs(EncoderArgs, DeepSeekArgs):
    """DeepSeek with an encoder of images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3VLArgs(EncoderArgs, Qwen3Args):
    """A Qwen3 decoder, dense or with experts, that rotates by rows and columns of images too (M-RoPE)."""

    rope_theta: float = 5_000_000.0
    """Base of the decoder's rotary frequencies."""
    rope_row_pairs: Annotated[int, Range(0)] = 20
    """Channel pairs of a decoder head that turn by an image token's row."""
    rope_column_pairs: Annotated[int, Range(0)] = 20
    """Channel pairs that turn by its column; the other pairs of the head turn by time."""

    grid_positions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        EncoderArgs.__post_init__(self)
        # rows take the pairs 1, 4, 7, … and columns 2, 5, 8, …
        most = max(3 * self.rope_row_pairs - 1, 3 * self.rope_column_pairs)
        if most > self.head_dim // 2:
            near = self.head_dim // 6
            raise ValueError(
                f"model.args: rope_row_pairs={self.rope_row_pairs} and rope_column_pairs={self.rope_column_pairs} do not fit "
                f"into the {self.head_dim // 2} channel pairs of a head: every third pair is for rows, every third for "
                f"columns. Use at most {near} of each."
            )


TINY_ENCODER: dict[str, Any] = {
    "image_token": 317, "image_start_token": 318, "image_end_token": 319, "vision_dim": 96, "vision_layers": 2,
    "vision_heads": 4, "vision_ffn_dim": 192, "patch": 8, "frames": 1, "position_side": 8, "deepstack_layers": (0,),
}  # fmt: skip
"""Of debug models; its tokens follow those of the tokenizer of bytes."""
_SMALL_ENCODER: dict[str, Any] = {
    "vision_dim": 1024, "vision_layers": 24, "vision_ffn_dim": 4096, "deepstack_layers": (5, 11, 17),
}  # fmt: skip

QWEN3_VL_CONFIGS: dict[str, Qwen3VLArgs] = {
    # starts in a blink: for tests, and for the shapes of the example
    "qwen3_vl_debug": Qwen3VLArgs(
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_dim=256,
        vocab_size=320,
        rope_theta=10_000.0,
        rope_row_pairs=5,
        rope_column_pairs=5,
        **TINY_ENCODER,
    ),
    "qwen3_vl_moe_debug": Qwen3VLArgs(
        dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=320,
        rope_theta=10_000.0,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_dim=96,
        rope_row_pairs=5,
        rope_column_pairs=5,
        **TINY_ENCODER,
    ),
    "qwen3_vl_2b": Qwen3VLArgs(
        dim=2048, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=6144, tied_embeddings=True, **_SMALL_ENCODER
    ),
    "qwen3_vl_4b": Qwen3VLArgs(
        dim=2560, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=9728, tied_embeddings=True, **_SMALL_ENCODER
    ),
    "qwen3_vl_8b": Qwen3VLArgs(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=12_288),
    "qwen3_vl_32b": Qwen3VLArgs(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, ffn_dim=25_600),
    "qwen3_vl_30b_a3b": Qwen3VLArgs(
        dim=2048, num_layers=48, num_heads=32, num_kv_heads=4, num_experts=128, expert_ffn_dim=768
    ),
    "qwen3_vl_235b_a22b": Qwen3VLArgs(
        dim=4096, num_layers=94, num_heads=64, num_kv_heads=4, num_experts=128, expert_ffn_dim=1536
    ),
}
