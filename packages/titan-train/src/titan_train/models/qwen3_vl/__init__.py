"""Qwen3-VL: an encoder of images, a projector, and a dense Qwen3 decoder.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the decoder, which takes features of images in the place of tokens.
- `vision`: the encoder of packed patches, and the one function that counts the tokens of an image.
- `hf`: its checkpoints. `tp`: how each module takes part in tensor parallelism.
"""

from titan_train.models.family import Family
from titan_train.models.qwen3_vl.args import QWEN3_VL_CONFIGS, Qwen3VLArgs
from titan_train.models.qwen3_vl.tp import QWEN3_VL_TENSOR_STYLES

QWEN3_VL_FAMILY = Family(
    name="qwen3_vl",
    args=Qwen3VLArgs,
    configs=QWEN3_VL_CONFIGS,
    model="titan_train.models.qwen3_vl.model:Qwen3VL",
    tensor_styles=QWEN3_VL_TENSOR_STYLES,
    task="vision",
    hf="titan_train.models.qwen3_vl.hf:QWEN3_VL_HF",
)
