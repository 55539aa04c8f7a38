"""GPT-2 and GPT-3.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module.
- `hf`: its checkpoints on Hugging Face, and what their ``config.json`` means here.
"""

from titan_train.models.common.tensor_styles import DECODER_STYLES
from titan_train.models.family import Family
from titan_train.models.gpt.args import GPT_CONFIGS, GPTArgs

GPT_FAMILY = Family(
    name="gpt",
    args=GPTArgs,
    configs=GPT_CONFIGS,
    model="titan_train.models.gpt.model:GPT",
    tensor_styles={"layers.*.attention.w[kv]": "heads", **DECODER_STYLES},
    hf="titan_train.models.gpt.hf:GPT_HF",
)
