"""Qwen3, dense and mixture of experts.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module.
- `hf`: its checkpoints on Hugging Face, and what their ``config.json`` means here.
"""

from titan_train.models.common.tensor_styles import DECODER_STYLES, with_mtp
from titan_train.models.family import Family
from titan_train.models.qwen3.args import QWEN3_CONFIGS, Qwen3Args

QWEN3_FAMILY = Family(
    name="qwen3",
    args=Qwen3Args,
    configs=QWEN3_CONFIGS,
    model="titan_train.models.qwen3.model:Qwen3",
    tensor_styles=with_mtp(DECODER_STYLES),
    hf="titan_train.models.qwen3.hf:QWEN3_HF",
)
