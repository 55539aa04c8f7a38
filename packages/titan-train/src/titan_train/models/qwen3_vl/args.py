"""The arguments of Qwen3-VL, and the shipped configurations. No torch."""

from dataclasses import dataclass
from typing import Any

from titan_train.models.qwen3.args import Qwen3Args


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3VLArgs:
    """Widths and depths of one model: a dense Qwen3 decoder, and an encoder of images."""

    dim: int
    """Width of the decoder's hidden states."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads of the decoder."""
    num_kv_heads: int
    """Key-value heads of the decoder."""
    head_dim: int = 128
    """Channels of a decoder head."""
    ffn_dim: int
    """Width of the decoder's feed-forward."""
    vocab_size: int = 151_936
    """Tokens of the vocabulary."""
    norm_eps: float = 1e-6
    """Of the decoder's norms."""
    rope_theta: float = 5_000_000.0
    """Base of the decoder's rotary frequencies."""
    tied_embeddings: bool = False
    """The head is the embedding's matrix."""
    rope_row_pairs: int = 20
    """Channel pairs of a decoder head that turn by an image token's row."""
    rope_column_pairs: int = 20
    """Channel pairs that turn by its column; the other pairs of the head turn by time."""
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

    def __post_init__(self) -> None:
        self.decoder()  # checks its widths
        if self.rope_row_pairs < 0 or self.rope_column_pairs < 0 or self.head_dim % 2:
            raise ValueError(
                f"model.args: rope_row_pairs={self.rope_row_pairs} and rope_column_pairs={self.rope_column_pairs} must not be "
                f"negative, and head_dim={self.head_dim} must be even: a head has head_dim / 2 pairs of channels."
            )
        # rows take the pairs 1, 4, 7, … and columns 2, 5, 8, …
        most = max(3 * self.rope_row_pairs - 1, 3 * self.rope_column_pairs)
        if most > self.head_dim // 2:
            near = self.head_dim // 6
            raise ValueError(
                f"model.args: rope_row_pairs={self.rope_row_pairs} and rope_column_pairs={self.rope_column_pairs} do not fit "
                f"into the {self.head_dim // 2} channel pairs of a head, of which every third is for rows and every third for "
                f"columns. Use at most {near} of each."
            )
        if self.vision_dim % self.vision_heads or self.vision_dim // self.vision_heads % 4:
            raise ValueError(
                f"model.args.vision_dim={self.vision_dim} over vision_heads={self.vision_heads}: a head needs a multiple of 4 "
                "channels, one pair for rows and one for columns. Change one of the two."
            )
        wrong = [layer for layer in self.deepstack_layers if not 0 <= layer < self.vision_layers]
        if (
            wrong
            or len(self.deepstack_layers) > self.num_layers
            or sorted(set(self.deepstack_layers)) != list(self.deepstack_layers)
        ):
            raise ValueError(
                f"model.args.deepstack_layers={list(self.deepstack_layers)} must be rising numbers of the "
                f"{self.vision_layers} encoder blocks, at most one for each of the {self.num_layers} decoder layers."
            )
        for name in ("patch", "frames", "merge", "position_side", "vision_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.args.{name}={getattr(self, name)} must be at least 1.")
        if not 0.0 <= self.image_share <= 1.0:
            raise ValueError(f"model.args.image_share={self.image_share} is a share of the tokens: use 0 to 1.")

    def decoder(self) -> Qwen3Args:
        """The arguments of the decoder alone."""
        return Qwen3Args(
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_dim=self.ffn_dim,
            vocab_size=self.vocab_size,
            norm_eps=self.norm_eps,
            rope_theta=self.rope_theta,
            tied_embeddings=self.tied_embeddings,
        )

    @property
    def patch_values(self) -> int:
        """Values of one patch: colours, frames, rows and columns."""
        return 3 * self.frames * self.patch**2


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
        image_token=317,
        image_start_token=318,
        image_end_token=319,
        vision_dim=96,
        vision_layers=2,
        vision_heads=4,
        vision_ffn_dim=192,
        patch=8,
        frames=1,
        position_side=8,
        deepstack_layers=(0,),
    ),
    "qwen3_vl_2b": Qwen3VLArgs(
        dim=2048, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=6144, tied_embeddings=True, **_SMALL_ENCODER
    ),
    "qwen3_vl_4b": Qwen3VLArgs(
        dim=2560, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=9728, tied_embeddings=True, **_SMALL_ENCODER
    ),
    "qwen3_vl_8b": Qwen3VLArgs(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=12_288),
    "qwen3_vl_32b": Qwen3VLArgs(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, ffn_dim=25_600),
}
