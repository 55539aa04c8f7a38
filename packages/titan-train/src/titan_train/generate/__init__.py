"""Generate tokens from any model of a run: sampling, a key-value cache, and a stream of token ids."""

from titan_train.generate.cache import CachedAttention, kv_cache, supports_cache
from titan_train.generate.decode import generate, stream
from titan_train.generate.sampling import Sampling, choose_tokens, filter_logits, penalize_repetition

__all__ = [
    "CachedAttention",
    "Sampling",
    "choose_tokens",
    "filter_logits",
    "generate",
    "kv_cache",
    "penalize_repetition",
    "stream",
    "supports_cache",
]
