"""What text a run reads, how it becomes tokens, and how tokens become samples.

Only values live here: reading, tokenizing and packing are in `titan_train.tokenizers` and `titan_train.data`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from titan_train.nearest import did_you_mean

SourceKind = Literal["stdlib", "text", "jsonl", "tokens", "megatron"]
TokenizerKind = Literal["sentencepiece", "tiktoken", "bytes"]
OnError = Literal["raise", "skip", "quarantine"]
Verify = Literal["header", "sample", "full"]

# The names `tokenizers` knows a pre-tokenization pattern for; anything else must be a regular expression.
PATTERN_NAMES = ("llama3", "cl100k", "gpt2")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One corpus: where its text or tokens are, and its share of a batch."""

    name: str
    """Name of the source. Its order of samples depends on this name and the seed, not on its place in the list."""

    kind: SourceKind = "text"
    """stdlib (Python's own library), text (a file is a document), jsonl (a line is one), tokens (folders that
    `titan-train prepare` wrote) or megatron (.bin/.idx)."""

    paths: tuple[str, ...] = ()
    """Files, folders or globs, read in sorted order; `.gz` and `.zst` are decompressed. Empty for stdlib: all of it."""

    weight: float = 1.0
    """Share of the samples (so of the tokens), relative to the other sources' weights."""

    text_key: str = "text"
    """Key of a JSON line that holds the document; dots reach into nested objects ("record.body")."""

    exclude: tuple[str, ...] = ()
    """Globs of files to leave out, matched against the path below its folder and against the file name."""

    max_document_bytes: int = 64 * 2**20
    """Largest document in bytes, decompressed; a longer one counts as malformed. This bounds memory per line."""

    max_epochs: int = 0
    """Largest number of passes over the source; 0 repeats it without limit."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"data.sources.name={self.name!r} cannot name a cache folder. Use letters, digits, '.', '_' and '-', "
                f"for example {_as_name(self.name)!r}."
            )
        where = f"data.sources[{self.name!r}]"
        _check_choice(f"{where}.kind", self.kind, get_args(SourceKind))
        if not self.paths and self.kind != "stdlib":
            raise ValueError(
                f"{where}.paths is empty: kind={self.kind!r} has nothing to read. "
                'Name files, folders or globs, or use kind="stdlib", the one kind that needs no path.'
            )
        if any(not path for path in self.paths):
            raise ValueError(f"{where}.paths={self.paths!r} holds an empty path. Name a file, a folder or a glob.")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"{where}.weight={self.weight} is not a positive number. Use 1.0, or remove the source to leave it out."
            )
        if not self.text_key:
            raise ValueError(f'{where}.text_key="" names no key. The usual one is "text".')
        _check_at_least(f"{where}.max_document_bytes", self.max_document_bytes, 1)
        _check_at_least(f"{where}.max_epochs", self.max_epochs, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """How text becomes token ids."""

    kind: TokenizerKind = "sentencepiece"
    """sentencepiece (a `.model` file, or trained here), tiktoken (a file of mergeable ranks, as Llama 3's) or bytes."""

    path: str = ""
    """Model file, or a folder that a run saved; empty trains one (sentencepiece)."""

    train: bool = True
    """Where path is empty, train a SentencePiece model on the training text first (kept in the cache and reused);
    false makes an empty path an error."""

    vocab_size: int = 8192
    """Size of a vocabulary trained here; a loaded tokenizer has its own."""

    model_type: Literal["bpe", "unigram"] = "bpe"
    """SentencePiece algorithm. unigram encodes 5x faster, trains 10x slower and compresses slightly less."""

    train_max_bytes: int = 32 * 2**20
    """Most text to train a new vocabulary on, in bytes, spread evenly over the documents."""

    pattern: str = "llama3"
    """tiktoken only: how text is cut before merging, one of llama3, cl100k, gpt2, or a regular expression."""

    special_tokens: tuple[str, ...] = ()
    """tiktoken only: tokens after the ranks, in order; empty: Llama 3's 256 for its pattern, else <|endoftext|>."""

    bos_token: str = ""
    """tiktoken only: special token that begins a document; empty takes the usual one of the pattern, if any."""

    eos_token: str = ""
    """tiktoken only: special token that ends a document; empty takes the usual one of the pattern."""

    @property
    def trains_here(self) -> bool:
        """Whether a vocabulary of `vocab_size` is trained for the run, rather than loaded or made of bytes."""
        return self.kind == "sentencepiece" and not self.path and self.train

    def __post_init__(self) -> None:
        _check_choice("tokenizer.kind", self.kind, get_args(TokenizerKind))
        _check_choice("tokenizer.model_type", self.model_type, ("bpe", "unigram"))
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
        _check_at_least("tokenizer.vocab_size", self.vocab_size, 1)
        _check_at_least("tokenizer.train_max_bytes", self.train_max_bytes, 1024)
        if self.pattern not in PATTERN_NAMES and not set(self.pattern) & set("\\[(|+*?."):
            _check_choice("tokenizer.pattern", self.pattern, PATTERN_NAMES)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The corpora of a run, and how they are cut into samples."""

    sources: tuple[SourceConfig, ...] = field(default_factory=lambda: (SourceConfig(name="stdlib", kind="stdlib"),))
    """What to train on: `[[data.sources]]` tables with a name, a kind and paths."""

    validation_sources: tuple[SourceConfig, ...] = ()
    """Held-out corpora of their own, in addition to `validation_fraction` of each training source."""

    validation_fraction: float = 0.01
    """Share of each text source's documents held out, by a hash of the text: a copy never lands on both sides."""

    cache_dir: str = ""
    """Where token shards and trained tokenizers are kept; empty means ~/.cache/titan-train."""

    on_error: OnError = "raise"
    """What a malformed line does: raise (stop, naming it), skip (count it), quarantine (count it and keep a copy)."""

    max_bad_fraction: float = 1e-3
    """With skip or quarantine: largest share of a source's documents that may be malformed."""

    max_bad: int = 0
    """With skip or quarantine: largest number of malformed documents per source; 0 limits the share only."""

    add_bos: bool = False
    """Begin every document with the tokenizer's begin-of-sequence token."""

    document_mask: bool = True
    """Keep attention inside documents: batches carry `cu_seqlens`, and positions restart at each document."""

    mask_document_boundary_labels: bool = True
    """Do not train the last token of a document to predict the first of the unrelated one after it."""

    shard_tokens: int = 2**28
    """Tokens of one cache file; an interrupted preparation repeats at most this much."""

    num_threads: int = 0
    """Threads that tokenize; 0 uses every core."""

    prefetch: int = 3
    """Micro-batches that a background thread prepares ahead; 0 prepares each on demand."""

    verify: Verify = "sample"
    """Check of the cache when it is opened: header only, sample (8 random blocks a file), or full (1.6 GB/s)."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(
                'data.sources is empty: there is nothing to train on. The smallest is {name="a", kind="stdlib"}.'
            )
        names = [source.name for source in (*self.sources, *self.validation_sources)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"data.sources and data.validation_sources hold the name {twice[0]!r} twice: a source's order is drawn "
                f"from its name. Rename one, for example to {twice[0] + '-2'!r}."
            )
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} is not in [0, 1): "
                f"it is the share of documents held out. The nearest useful value is "
                f"{0.0 if self.validation_fraction < 0 else 0.1}."
            )
        _check_choice("data.on_error", self.on_error, get_args(OnError))
        _check_choice("data.verify", self.verify, get_args(Verify))
        if not 0.0 <= self.max_bad_fraction <= 1.0:
            raise ValueError(
                f"data.max_bad_fraction={self.max_bad_fraction} is not in [0, 1]. "
                f"The nearest valid value is {min(max(self.max_bad_fraction, 0.0), 1.0)}."
            )
        _check_at_least("data.max_bad", self.max_bad, 0)
        _check_at_least("data.shard_tokens", self.shard_tokens, 1)
        _check_at_least("data.num_threads", self.num_threads, 0)
        _check_at_least("data.prefetch", self.prefetch, 0)


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value in choices:
        return
    hint = did_you_mean(value, choices)
    raise ValueError(f"{key}={value!r} is not one of {', '.join(map(repr, choices))}. {hint}".rstrip())


def _check_at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{key}={value} must be at least {least}. The nearest valid value is {least}.")


def _as_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "corpus"
