"""An encoder of images and a projector before a decoder of any family.

- `encoder`: packed patches to features, and the one function that counts the tokens of an image.
- `decoder`: what gives features to a decoder in the place of tokens, and the models of every family.
- `args`: their arguments, and the shipped Qwen3-VL models. `hf`: Qwen3-VL's checkpoints on Hugging Face.

Every shipped configuration of Llama, GPT and DeepSeek has one with an encoder before it: ``llama3_8b`` is ``llama3_8b_vl``. Its
encoder is that of Qwen3-VL; a debug model has a tiny one. Of Qwen3, dense and with experts, there are the published Qwen3-VL
models; of Qwen3-Next there is none.
"""

from dataclasses import asdict
from typing import Any

from titan_train.models.common.tensor_styles import StyleTable
from titan_train.models.deepseek import DEEPSEEK_FAMILY
from titan_train.models.family import Family
from titan_train.models.gpt import GPT_FAMILY
from titan_train.models.llama import LLAMA_FAMILY
from titan_train.models.qwen3 import QWEN3_FAMILY
from titan_train.models.vision_language.args import (
    QWEN3_VL_CONFIGS,
    TINY_ENCODER,
    DeepSeekVLArgs,
    GPTVLArgs,
    LlamaVLArgs,
    Qwen3VLArgs,
)

# Heads are cut, and the wide sides of feed-forwards and projectors. Tokens are not split between regions (no sequence
# parallelism): patches and tokens are of different numbers.
_ENCODER_STYLES: StyleTable = {
    "vision.patch_embedding": "replicated",
    "vision.positions": "replicated",
    "vision.blocks.*.*_norm": "replicated",
    "vision.blocks.*.attention": "region",
    "vision.blocks.*.attention.w[qkv]": "heads",
    "vision.blocks.*.attention.wo": "rowwise",
    "vision.blocks.*.mlp": "region",
    "vision.blocks.*.mlp.up": "colwise",
    "vision.blocks.*.mlp.down": "rowwise",
    "vision.projector": "region",
    "vision.deepstack.*": "region",
    "vision.**.norm": "replicated",
    "vision.**.up": "colwise",
    "vision.**.down": "rowwise",
}


def with_encoder(text: Family, args: type[Any], model: str) -> Family:
    """The family of ``text``'s models with an encoder of images before them.

    Args:
        text: The decoder's.
        args: A dataclass of its arguments and `EncoderArgs`.
        model: As `Family.model`.
    """
    configs: dict[str, Any] = {}
    for name, shape in text.configs.items():
        first = shape.vocab_size  # ids of images follow those of text
        encoder: dict[str, Any] = {
            "image_token": first, "image_start_token": first + 1, "image_end_token": first + 2, "vocab_size": first + 3,
        }  # fmt: skip
        configs[f"{name}_vl"] = args(**asdict(shape) | (TINY_ENCODER if name.endswith("_debug") else encoder))
    return Family(
        name=f"{text.name}_vl",
        args=args,
        configs=configs,
        model=model,
        tensor_styles={**_ENCODER_STYLES, **text.tensor_styles},
        task="vision",
    )


_DECODER = "titan_train.models.vision_language.decoder"
LLAMA_VL_FAMILY = with_encoder(LLAMA_FAMILY, LlamaVLArgs, f"{_DECODER}:LlamaVL")
GPT_VL_FAMILY = with_encoder(GPT_FAMILY, GPTVLArgs, f"{_DECODER}:GPTVL")
DEEPSEEK_VL_FAMILY = with_encoder(DEEPSEEK_FAMILY, DeepSeekVLArgs, f"{_DECODER}:DeepSeekVL")
QWEN3_VL_FAMILY = Family(
    name="qwen3_vl",
    args=Qwen3VLArgs,
    configs=QWEN3_VL_CONFIGS,
    model=f"{_DECODER}:Qwen3VL",
    tensor_styles={**_ENCODER_STYLES, **QWEN3_FAMILY.tensor_styles},
    task="vision",
    hf="titan_train.models.vision_language.hf:QWEN3_VL_HF",
)
