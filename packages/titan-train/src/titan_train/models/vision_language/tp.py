"""How the encoder takes part in tensor parallelism; `models.common.tensor_styles` explains the words.

Of the encoder heads are cut, and the wide sides of feed-forwards and projectors. Tokens are not split between regions (no
sequence parallelism): patches and tokens are of different numbers.
"""

from titan_train.models.common.tensor_styles import StyleTable

ENCODER_TENSOR_STYLES: StyleTable = {
    "vision.patch_embedding": "replicated",
    "vision.positions": "replicated",
    "vision.blocks.*.*_norm": "replicated",
    "vision.blocks.*.attention": "region",
    "vision.blocks.*.attention.w[qkv]": "heads",
    "vision.blocks.*.attention.wo": "rowwise",
    "vision.blocks.*.mlp": "region",
    "vision.blocks.*.mlp.up": "colwise",
    "vision.blocks.*.mlp.down": "rowwise",
    "vision.projector": "region",
    "vision.deepstack.*": "region",
    "vision.**.norm": "replicated",
    "vision.**.up": "colwise",
    "vision.**.down": "rowwise",
}
"""The encoder of images; a decoder's table follows it."""
