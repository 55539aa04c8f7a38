"""Qwen3, dense and mixture of experts.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module.
- `hf`: what a published ``config.json`` means here.
- `hf`: its checkpoints on Hugging Face.
- `tp`: how each module takes part in tensor parallelism.
"""

from titan_train.models.family import Family
from titan_train.models.qwen3.args import QWEN3_CONFIGS, Qwen3Args
from titan_train.models.qwen3.tp import QWEN3_TENSOR_STYLES

QWEN3_FAMILY = Family(
    name="qwen3",
    args=Qwen3Args,
    configs=QWEN3_CONFIGS,
    model="titan_train.models.qwen3.model:Qwen3",
    tensor_styles=QWEN3_TENSOR_STYLES,
    hf="titan_train.models.qwen3.hf:QWEN3_HF",
)
