"""How each module of Llama takes part in tensor parallelism; the words are explained in `parallel.tensor.styles`."""

from titan_train.parallel.tensor.styles import Table

LLAMA_TENSOR_STYLES: Table = {
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
