"""The arguments of Qwen3-VL, and the shipped configurations. No torch."""

from dataclasses import dataclass
from typing import Any, ClassVar

from titan_train.models.qwen3.args import Qwen3Args
from titan_train.models.vision_language import TINY_ENCODER
from titan_train.models.vision_language.args import EncoderArgs


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3VLArgs(Qwen3Args, EncoderArgs):
    """A Qwen3 decoder, dense or with experts, that rotates by rows and columns of images too (M-RoPE)."""

    rope_theta: float = 5_000_000.0
    """Base of the decoder's rotary frequencies."""
    rope_row_pairs: int = 20
    """Channel pairs of a decoder head that turn by an image token's row."""
    rope_column_pairs: int = 20
    """Channel pairs that turn by its column; the other pairs of the head turn by time."""

    grid_positions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Qwen3Args.__post_init__(self)
        self.check_encoder(self.num_layers)
        if self.rope_row_pairs < 0 or self.rope_column_pairs < 0:
            raise ValueError(
                f"model.args: rope_row_pairs={self.rope_row_pairs} and rope_column_pairs={self.rope_column_pairs} must not be "
                "negative."
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
