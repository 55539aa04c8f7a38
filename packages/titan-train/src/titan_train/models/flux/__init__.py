"""FLUX: a rectified-flow transformer that turns noise into the packed latents of an image, guided by text.

- `args`: the arguments of a model, and the shipped configurations.
- `model`: the module, and what one pipeline stage of it holds.
- `blocks`: its double and single blocks. `rope`: rotation on three axes, and features of a time.
- `diffusers`: its checkpoints in the format of diffusers.
- `tp`: how each module takes part in tensor parallelism.
"""

from titan_train.models.family import Family
from titan_train.models.flux.args import FLUX_CONFIGS, FluxArgs
from titan_train.models.flux.tp import FLUX_TENSOR_STYLES

FLUX_FAMILY = Family(
    name="flux",
    args=FluxArgs,
    configs=FLUX_CONFIGS,
    model="titan_train.models.flux.model:Flux",
    tensor_styles=FLUX_TENSOR_STYLES,
    task="diffusion",
    hf="titan_train.models.flux.diffusers:FLUX_HF",
)
