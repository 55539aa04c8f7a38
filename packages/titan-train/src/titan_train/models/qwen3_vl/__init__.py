"""Qwen3-VL: an encoder of images, a projector, and a Qwen3 decoder, dense or with experts.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module; what it shares with other families is in `titan_train.models.vision_language`.
- `hf`: its checkpoints.
"""

from titan_train.models.family import Family
from titan_train.models.qwen3.tp import QWEN3_TENSOR_STYLES
from titan_train.models.qwen3_vl.args import QWEN3_VL_CONFIGS, Qwen3VLArgs
from titan_train.models.vision_language.tp import ENCODER_TENSOR_STYLES

QWEN3_VL_FAMILY = Family(
    name="qwen3_vl",
    args=Qwen3VLArgs,
    configs=QWEN3_VL_CONFIGS,
    model="titan_train.models.qwen3_vl.model:Qwen3VL",
    tensor_styles={**ENCODER_TENSOR_STYLES, **QWEN3_TENSOR_STYLES},
    task="vision",
    hf="titan_train.models.qwen3_vl.hf:QWEN3_VL_HF",
)
