"""Llama 3.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module.
- `hf`: what a published ``config.json`` means here.
- `hf`: its checkpoints on Hugging Face.
- `tp`: how each module takes part in tensor parallelism.
"""

from titan_train.models.family import Family
from titan_train.models.llama.args import LLAMA_CONFIGS, LlamaArgs
from titan_train.models.llama.tp import LLAMA_TENSOR_STYLES

LLAMA_FAMILY = Family(
    name="llama",
    args=LlamaArgs,
    configs=LLAMA_CONFIGS,
    model="titan_train.models.llama.model:Llama",
    tensor_styles=LLAMA_TENSOR_STYLES,
    hf="titan_train.models.llama.hf:LLAMA_HF",
)
