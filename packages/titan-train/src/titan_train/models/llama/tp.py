"""How each module of Llama takes part in tensor parallelism; `models.common.tensor_styles` explains the words."""

from titan_train.models.common.tensor_styles import StyleTable

LLAMA_TENSOR_STYLES: StyleTable = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "replicated",
    "layers.*.attention": "region",
    "layers.*.attention.wq": "heads",
    "layers.*.attention.wk": "kv_heads",
    "layers.*.attention.wv": "kv_heads",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "replicated",
    "layers.*.feed_forward": "region",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "replicated",
    "lm_head": "head",
}
