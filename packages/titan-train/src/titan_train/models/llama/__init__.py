"""Llama 3.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module.
- `hf`: its checkpoints on Hugging Face, and what their ``config.json`` means here.
"""

from titan_train.models.common.tensor_styles import DECODER_STYLES, with_mtp
from titan_train.models.family import Family
from titan_train.models.llama.args import LLAMA_CONFIGS, LlamaArgs

LLAMA_FAMILY = Family(
    name="llama",
    args=LlamaArgs,
    configs=LLAMA_CONFIGS,
    model="titan_train.models.llama.model:Llama",
    tensor_styles=with_mtp(DECODER_STYLES),
    hf="titan_train.models.llama.hf:LLAMA_HF",
)
