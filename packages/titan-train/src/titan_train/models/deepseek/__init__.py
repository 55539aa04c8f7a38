"""DeepSeek V2 and V3: latent attention, many small experts.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module.
- `attention`: latent attention, and its stretched rotary positions.
- `hf`: its checkpoints on Hugging Face, and what their ``config.json`` means here.
"""

from titan_train.models.common.tensor_styles import DECODER_STYLES, StyleTable, with_mtp
from titan_train.models.deepseek.args import DEEPSEEK_CONFIGS, DeepSeekArgs
from titan_train.models.family import Family

# Latents are the same for all heads, so the projections to them and their norms are whole on every rank, inside the region: each
# rank's heads give a part of their gradients, which are summed.
_LATENT_STYLES: StyleTable = {
    "layers.*.attention.wq_b": "heads",
    "layers.*.attention.wkv_b": "heads",
    "layers.*.attention.w*_a": "replicated",
    "layers.*.attention.*_norm": "replicated",
}

DEEPSEEK_FAMILY = Family(
    name="deepseek",
    args=DeepSeekArgs,
    configs=DEEPSEEK_CONFIGS,
    model="titan_train.models.deepseek.model:DeepSeek",
    tensor_styles=with_mtp({**_LATENT_STYLES, **DECODER_STYLES}),
    hf="titan_train.models.deepseek.hf:DEEPSEEK_HF",
)
