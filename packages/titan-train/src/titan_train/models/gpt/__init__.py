"""GPT-2 and GPT-3.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module.
- `hf`: what a published ``config.json`` means here.
- `hf`: its checkpoints on Hugging Face.
- `tp`: how each module takes part in tensor parallelism.
"""

from titan_train.models.family import Family
from titan_train.models.gpt.args import GPT_CONFIGS, GPTArgs
from titan_train.models.gpt.tp import GPT_TENSOR_STYLES

GPT_FAMILY = Family(
    name="gpt",
    args=GPTArgs,
    configs=GPT_CONFIGS,
    model="titan_train.models.gpt.model:GPT",
    tensor_styles=GPT_TENSOR_STYLES,
    hf="titan_train.models.gpt.hf:GPT_HF",
)
