"""Tokenizers: text to ids and back, without loss.

Four kinds stand behind one protocol: SentencePiece (also trained here), tiktoken (any file of mergeable ranks, such
as Llama 3's `tokenizer.model`), Hugging Face's `tokenizer.json` and plain bytes. Nothing here imports torch.

- `protocol`: what every kind offers; `byte`, `sentencepiece`, `tiktoken`, `huggingface`: the kinds.
- `load`: a tokenizer's folder. `sentencepiece_model`: the pieces of a SentencePiece file.
- `chat_template`: a conversation as text, and which of it the assistant wrote. `label_bytes`: bits per byte.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.tokenizers.byte import ByteTokenizer
    from titan_train.tokenizers.chat_template import ChatTemplate, RenderedChat
    from titan_train.tokenizers.huggingface import HfTokenizer
    from titan_train.tokenizers.label_bytes import LabelBytes, bits_per_byte
    from titan_train.tokenizers.load import load_tokenizer
    from titan_train.tokenizers.protocol import IncrementalDecoder, Tokenizer
    from titan_train.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
    from titan_train.tokenizers.tiktoken import TiktokenTokenizer

__all__ = [
    "ByteTokenizer",
    "ChatTemplate",
    "HfTokenizer",
    "IncrementalDecoder",
    "LabelBytes",
    "RenderedChat",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "bits_per_byte",
    "load_tokenizer",
    "train_sentencepiece",
]

__getattr__ = first_use(__name__)
