"""How text becomes tokens. Only values live here: the tokenizers are in `titan_train.tokenizers`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_train.values import Count, Range, check_choice, check_values

TokenizerKind = Literal["sentencepiece", "tiktoken", "hf", "bytes"]

# The names `tokenizers` knows a pre-tokenization pattern for; anything else must be a regular expression.
PATTERN_NAMES = ("llama3", "cl100k", "gpt2")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """How text becomes token ids."""

    kind: TokenizerKind = "sentencepiece"
    """sentencepiece (a `.model` file, or trained here), tiktoken (a file of mergeable ranks, as Llama 3's), hf (a
    `tokenizer.json`; extra "hf") or bytes."""

    path: str = ""
    """Model file, a folder that a run saved, or a Hugging Face folder (hf); empty trains one (sentencepiece)."""

    train: bool = True
    """Where path is empty, train a SentencePiece model on the training text first (kept in the cache and reused);
    false makes an empty path an error."""

    vocab_size: Count = 8192
    """Size of a vocabulary trained here; a loaded tokenizer has its own."""

    model_type: Literal["bpe", "unigram"] = "bpe"
    """SentencePiece algorithm. unigram encodes 5x faster, trains 10x slower and compresses slightly less."""

    train_max_bytes: Annotated[int, Range(1024)] = 32 * 2**20
    """Most text to train a new vocabulary on, in bytes, spread evenly over the files by their size."""

    pattern: str = "llama3"
    """tiktoken only: how text is cut before merging, one of llama3, cl100k, gpt2, or a regular expression."""

    special_tokens: tuple[str, ...] = ()
    """tiktoken only: tokens after the ranks, in order; empty: Llama 3's 256 for its pattern, else <|endoftext|>."""

    bos_token: str = ""
    """tiktoken and hf: special token that begins a document; empty takes the tokenizer's own, if any."""

    eos_token: str = ""
    """tiktoken and hf: special token that ends a document; empty takes the tokenizer's own."""

    chat_template: str = ""
    """Jinja file that writes conversations as text, or a built-in one: plain, chatml. Empty takes the tokenizer's own."""

    @property
    def trains_here(self) -> bool:
        """Whether a vocabulary of `vocab_size` is trained for the run, rather than loaded or made of bytes."""
        return self.kind == "sentencepiece" and not self.path and self.train

    def __post_init__(self) -> None:
        check_values("tokenizer", self)
        if self.kind == "bytes" and self.path:
            raise ValueError(
                f'tokenizer.path={self.path!r} with kind="bytes": bytes load nothing. Remove path, or use the kind of '
                "that file, sentencepiece or tiktoken."
            )
        if self.kind == "tiktoken" and not self.path:
            raise ValueError(
                'tokenizer.path="" with kind="tiktoken": its ranks are loaded, not trained. Set path to the file of '
                'mergeable ranks, or use kind="sentencepiece", which can be trained here.'
            )
        if self.kind == "hf" and not self.path:
            raise ValueError(
                'tokenizer.path="" with kind="hf": there is no tokenizer.json to read. Set path to a folder that has one.'
            )
        if self.kind == "sentencepiece" and not self.path and not self.train:
            raise ValueError(
                'tokenizer.path="" with train=false: there is no model to load. Set path, or train=true to train one.'
            )
        # 256 byte pieces, 4 control pieces and the newline come before the first learned piece.
        if self.kind == "sentencepiece" and not self.path and self.vocab_size < 300:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size} leaves no room for learned pieces: bytes, control tokens and "
                "newline take 261. Use 300 or more; 8192 suits small models."
            )
        if self.pattern not in PATTERN_NAMES and not set(self.pattern) & set("\\[(|+*?."):
            check_choice("tokenizer.pattern", self.pattern, PATTERN_NAMES)
