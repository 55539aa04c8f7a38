"""An encoder of images and a projector before a decoder of any family.

- `encoder`: packed patches to features, and the one function that counts the tokens of an image.
- `decoder`: what gives features to a decoder in the place of tokens, and the families that have no published model of the kind.
- `args`: their arguments. `tp`: how the encoder takes part in tensor parallelism.

Every shipped configuration of a text family has one with an encoder before it: ``llama3_8b`` is ``llama3_8b_vl``. Its encoder is
that of Qwen3-VL; a debug model has a tiny one. Qwen3, dense and with experts, is the published `titan_train.models.qwen3_vl`.
"""

from dataclasses import asdict
from typing import Any

from titan_train.models.deepseek import DEEPSEEK_FAMILY
from titan_train.models.family import Family
from titan_train.models.gpt import GPT_FAMILY
from titan_train.models.llama import LLAMA_FAMILY
from titan_train.models.vision_language.args import DeepSeekVLArgs, GPTVLArgs, LlamaVLArgs
from titan_train.models.vision_language.tp import ENCODER_TENSOR_STYLES

TINY_ENCODER: dict[str, Any] = {
    "image_token": 317, "image_start_token": 318, "image_end_token": 319, "vision_dim": 96, "vision_layers": 2,
    "vision_heads": 4, "vision_ffn_dim": 192, "patch": 8, "frames": 1, "position_side": 8, "deepstack_layers": (0,),
}  # fmt: skip
"""Of debug models; its tokens follow those of the tokenizer of bytes."""


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
        tensor_styles={**ENCODER_TENSOR_STYLES, **text.tensor_styles},
        task="vision",
    )


_DECODER = "titan_train.models.vision_language.decoder"
LLAMA_VL_FAMILY = with_encoder(LLAMA_FAMILY, LlamaVLArgs, f"{_DECODER}:LlamaVL")
GPT_VL_FAMILY = with_encoder(GPT_FAMILY, GPTVLArgs, f"{_DECODER}:GPTVL")
DEEPSEEK_VL_FAMILY = with_encoder(DEEPSEEK_FAMILY, DeepSeekVLArgs, f"{_DECODER}:DeepSeekVL")
