"""How each module of DeepSeek takes part in tensor parallelism; `models.common.tensor_styles` explains the words.

Latents are the same for all heads, so the projections to them and their norms are whole on every rank, inside the region:
each rank's heads give a part of their gradients, which are summed. The mixture of experts is no region: under sequence
parallelism each rank routes its own tokens, to whole experts.
"""

from titan_train.models.common.tensor_styles import StyleTable

DEEPSEEK_TENSOR_STYLES: StyleTable = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "replicated",
    "layers.*.attention": "region",
    "layers.*.attention.wq": "heads",
    "layers.*.attention.wq_b": "heads",
    "layers.*.attention.wkv_b": "heads",
    "layers.*.attention.w*_a": "replicated",
    "layers.*.attention.*_norm": "replicated",
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
