"""How transformers is to make a model's input from images: the files of a processor beside exported weights.

They say what `titan_train.tasks.vision.images` does, in the words of Qwen2-VL's image processor: the same grid for an image of
any size, the same order and values of patches. A processor writes tokens of images by their names in the tokenizer; one that
lacks them (bytes) gets the image processor alone.
"""

from typing import Any

from titan_train.config import VisionConfig
from titan_train.models.vision_language.args import EncoderArgs
from titan_train.tokenizers import HfTokenizer, Tokenizer

_NAMES = {
    "<|image_pad|>": "image_token", "<|vision_start|>": "image_start_token", "<|vision_end|>": "image_end_token",
}  # fmt: skip


def processor_files(tokenizer: Tokenizer, args: EncoderArgs, vision: VisionConfig) -> dict[str, dict[str, Any]]:
    """The content of each file, by its name."""
    pixels = (args.patch * args.merge) ** 2
    shared = {
        "patch_size": args.patch,
        "temporal_patch_size": args.frames,
        "merge_size": args.merge,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": vision.min_image_tokens * pixels, "longest_edge": vision.max_image_tokens * pixels},
    }
    named = names_images(tokenizer, args)
    owner = {"processor_class": "Qwen3VLProcessor"} if named else {}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", **owner, **shared}
    }
    if named:
        files["video_preprocessor_config.json"] = {"video_processor_type": "Qwen3VLVideoProcessor", **owner, **shared}
    return files


def names_images(tokenizer: Tokenizer, args: EncoderArgs) -> bool:
    """Whether the tokenizer has the model's tokens of images under the names that Qwen gives them."""
    if not isinstance(tokenizer, HfTokenizer):
        return False
    return all(tokenizer.special_ids.get(name) == getattr(args, field) for name, field in _NAMES.items())
