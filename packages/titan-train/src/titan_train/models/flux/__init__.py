"""FLUX: a rectified-flow transformer that turns noise into the packed latents of an image, guided by text.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module, and what one pipeline stage of it holds.
- `blocks`: its double and single blocks. `rope`: rotation on three axes, and features of a time.
- `diffusers`: its checkpoints in the format of diffusers.
"""

from titan_train.models.common.tensor_styles import StyleTable
from titan_train.models.family import Family
from titan_train.models.flux.args import FLUX_CONFIGS, FluxArgs

# Heads and the wide side of feed-forwards are cut. Modulation and the embedders are whole on every rank: they work once per
# sample, not per token. Tokens are not split between regions (no sequence parallelism): text and image would both be cut, and
# the joint sequence of each rank would hold a piece of each.
_STYLES: StyleTable = {
    "*_in": "replicated",
    "double_blocks.*.*_modulation": "replicated",
    "double_blocks.*.attention": "region",
    "double_blocks.*.attention.*.[qkv]": "heads",
    "double_blocks.*.attention.*.[qk]_norm": "replicated",
    "double_blocks.*.attention.*.out": "rowwise",
    "double_blocks.*.*_mlp": "region",
    "double_blocks.*.*_mlp.up": "colwise",
    "double_blocks.*.*_mlp.down": "rowwise",
    "single_blocks.*.modulation": "replicated",
    "single_blocks.*.mixer": "region",
    "single_blocks.*.mixer.[qkv]": "heads",
    "single_blocks.*.mixer.[qk]_norm": "replicated",
    "single_blocks.*.mixer.up": "colwise",
    "single_blocks.*.mixer.out": "rowwise",
    "single_blocks.*.mixer.down": "rowwise",
    "final": "replicated",
}

FLUX_FAMILY = Family(
    name="flux",
    args=FluxArgs,
    configs=FLUX_CONFIGS,
    model="titan_train.models.flux.model:Flux",
    tensor_styles=_STYLES,
    task="diffusion",
    hf="titan_train.models.flux.diffusers:FLUX_HF",
)
