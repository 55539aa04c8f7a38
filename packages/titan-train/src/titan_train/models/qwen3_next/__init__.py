"""Qwen3-Next: three layers with a state to each one of attention; dense or with experts.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module.
- `hf`: its checkpoints on Hugging Face, and what their ``config.json`` means here.
"""

from titan_train.models.common.tensor_styles import DECODER_STYLES, StyleTable, with_mtp
from titan_train.models.family import Family
from titan_train.models.qwen3_next.args import QWEN3_NEXT_CONFIGS, Qwen3NextArgs

# All that belongs to a key head of a delta net goes to one rank: the values that share it, their decays, their convolution.
_DELTA_STYLES: StyleTable = {
    "layers.*.delta": "region",
    "layers.*.delta.wqkvz": "heads",
    "layers.*.delta.wba": "heads",
    "layers.*.delta.*_conv": "heads",
    "layers.*.delta.decay": "heads",
    "layers.*.delta.gated_norm": "replicated",
    "layers.*.delta.wo": "rowwise",
    "layers.*.moe.shared_experts.gate": "replicated",
}

QWEN3_NEXT_FAMILY = Family(
    name="qwen3_next",
    args=Qwen3NextArgs,
    configs=QWEN3_NEXT_CONFIGS,
    model="titan_train.models.qwen3_next.model:Qwen3Next",
    tensor_styles=with_mtp({**_DELTA_STYLES, **DECODER_STYLES}),
    hf="titan_train.models.qwen3_next.hf:QWEN3_NEXT_HF",
)
