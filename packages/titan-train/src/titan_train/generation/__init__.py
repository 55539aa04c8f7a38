"""Text and tokens from any model of a run.

`run` loads a run's model and tokenizer; `decode` turns prompts into a stream of token ids; `sampling` chooses each token;
`cache` is the key-value cache, `own_cache` that of a model of transformers with more than plain attention; `draft` takes
several tokens a forward; `text` turns tokens into text, with stop words and conversations; `tensor` cuts a model over ranks.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.generation.cache import CachedAttention, kv_cache, supports_cache
    from titan_train.generation.decode import Decoding, generate, stream
    from titan_train.generation.draft import DraftCount
    from titan_train.generation.run import load_run
    from titan_train.generation.sampling import Sampling, choose_tokens, filter_logits, penalize_repetition
    from titan_train.generation.text import LoadedRun, StopWords, TextPiece, encode_chat, encode_prompt, stream_text

__all__ = [
    "CachedAttention",
    "Decoding",
    "DraftCount",
    "LoadedRun",
    "Sampling",
    "StopWords",
    "TextPiece",
    "choose_tokens",
    "encode_chat",
    "encode_prompt",
    "filter_logits",
    "generate",
    "kv_cache",
    "load_run",
    "penalize_repetition",
    "stream",
    "stream_text",
    "supports_cache",
]

__getattr__ = first_use(__name__)
