"""Tokenizers: text to ids and back, without loss.

Three kinds stand behind one protocol: SentencePiece (also trained here), tiktoken (any file of mergeable ranks, such
as Llama 3's `tokenizer.model`) and plain bytes. Nothing here imports torch.
"""

from titan_train.tokenizers.byte import ByteTokenizer
from titan_train.tokenizers.load import load_tokenizer
from titan_train.tokenizers.protocol import IncrementalDecoder, Tokenizer
from titan_train.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from titan_train.tokenizers.tiktoken import TiktokenTokenizer

__all__ = [
    "ByteTokenizer",
    "IncrementalDecoder",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "train_sentencepiece",
]
