"""DeepSeek V2 and V3: latent attention, many small experts.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module.
- `attention`, `yarn`: latent attention, and its stretched rotary positions.
- `hf`: what a published ``config.json`` means here.
- `hf`: its checkpoints on Hugging Face.
- `tp`: how each module takes part in tensor parallelism.
"""

from titan_train.models.deepseek.args import DEEPSEEK_CONFIGS, DeepSeekArgs
from titan_train.models.deepseek.tp import DEEPSEEK_TENSOR_STYLES
from titan_train.models.family import Family

DEEPSEEK_FAMILY = Family(
    name="deepseek",
    args=DeepSeekArgs,
    configs=DEEPSEEK_CONFIGS,
    model="titan_train.models.deepseek.model:DeepSeek",
    tensor_styles=DEEPSEEK_TENSOR_STYLES,
    hf="titan_train.models.deepseek.hf:DEEPSEEK_HF",
)
