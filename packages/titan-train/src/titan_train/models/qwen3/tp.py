"""How each module of Qwen3 takes part in tensor parallelism; `models.common.tensor_styles` explains the words.

Norms of query and key heads are whole on every rank, which has only some of the heads: their gradients are summed. The
mixture of experts is no region: under sequence parallelism each rank routes its own tokens, to whole experts.
"""

from titan_train.models.common.tensor_styles import StyleTable

QWEN3_TENSOR_STYLES: StyleTable = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "replicated",
    "layers.*.attention": "region",
    "layers.*.attention.wq": "heads",
    "layers.*.attention.wk": "kv_heads",
    "layers.*.attention.wv": "kv_heads",
    "layers.*.attention.[qk]_norm": "replicated",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "replicated",
    "layers.*.feed_forward": "region",
    "layers.*.feed_forward.w[13]": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "layers.*.moe.router": "replicated",
    "layers.*.moe.experts": "replicated",
    "layers.*.moe.shared_experts": "region",
    "layers.*.moe.shared_experts.w[13]": "colwise",
    "layers.*.moe.shared_experts.w2": "rowwise",
    "norm": "replicated",
    "lm_head": "head",
}
