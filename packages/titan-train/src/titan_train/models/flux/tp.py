"""How each module of FLUX takes part in tensor parallelism; `models.common.tensor_styles` explains the words.

Heads and the wide side of feed-forwards are cut. Modulation and the embedders are whole on every rank: they work once per
sample, not per token. Tokens are not split between regions (no sequence parallelism): text and image would both be cut, and
the joint sequence of each rank would hold a piece of each.
"""

from titan_train.models.common.tensor_styles import StyleTable

FLUX_TENSOR_STYLES: StyleTable = {
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
