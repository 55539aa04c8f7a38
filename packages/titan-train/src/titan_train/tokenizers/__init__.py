"""Tokenizers: text to ids and back, without loss.

Four kinds stand behind one protocol: SentencePiece (also trained here), tiktoken (any file of mergeable ranks, such
as Llama 3's `tokenizer.model`), Hugging Face's `tokenizer.json` and plain bytes. Nothing here imports torch.

- `protocol`: what every kind offers; `byte`, `sentencepiece`, `tiktoken`, `huggingface`: the kinds.
- `load`, `saved`: a tokenizer's folder. `sentencepiece_model`, `byte_characters`: what the formats write.
- `chat_template`: a conversation as text, and which of it the assistant wrote.
"""

from titan_train.tokenizers.byte import ByteTokenizer
from titan_train.tokenizers.chat_template import ChatTemplate, RenderedChat
from titan_train.tokenizers.huggingface import HfTokenizer
from titan_train.tokenizers.load import load_tokenizer
from titan_train.tokenizers.protocol import IncrementalDecoder, Tokenizer
from titan_train.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from titan_train.tokenizers.tiktoken import TiktokenTokenizer

__all__ = [
    "ByteTokenizer",
    "ChatTemplate",
    "HfTokenizer",
    "IncrementalDecoder",
    "RenderedChat",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "train_sentencepiece",
]
