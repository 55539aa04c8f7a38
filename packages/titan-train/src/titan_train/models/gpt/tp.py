"""How each module of GPT takes part in tensor parallelism; `models.common.tensor_styles` explains the words."""

from titan_train.models.common.tensor_styles import StyleTable

GPT_TENSOR_STYLES: StyleTable = {
    "tok_embeddings": "embedding",
    "pos_embeddings": "positions",
    "layers.*.attention_norm": "replicated",
    "layers.*.attention": "region",
    "layers.*.attention.wq": "heads",
    "layers.*.attention.wk": "heads",
    "layers.*.attention.wv": "heads",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "replicated",
    "layers.*.feed_forward": "region",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "replicated",
    "lm_head": "head",
}
