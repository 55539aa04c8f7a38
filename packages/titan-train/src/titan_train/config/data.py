"""What text a run reads, and how tokens become samples.

Only values live here: reading, tokenizing and packing are in `titan_train.tokenizers` and `titan_train.data`.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_train.values import Count, Range, check_values

SourceKind = Literal["stdlib", "text", "jsonl", "parquet", "arrow", "tokens", "megatron"]
OnError = Literal["raise", "skip", "quarantine"]
Verify = Literal["header", "sample", "full"]

TEXT_KINDS = ("stdlib", "text", "jsonl", "parquet", "arrow")
"""Kinds of source that hold text."""
RECORD_KINDS = ("jsonl", "parquet", "arrow")
"""Kinds whose files hold records with keys."""
AUTO_MESSAGES = "auto"
"""``messages_key`` of records that tell their form by their own keys."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One corpus: where its text or tokens are, and its share of a batch."""

    name: str
    """Name of the source. Its order of samples depends on this name and the seed, not on its place in the list."""

    kind: SourceKind = "text"
    """stdlib (Python's own library), text (a file is a document), jsonl (a line is one), parquet or arrow (a row is one;
    arrow also reads a folder that `datasets` saved), tokens (folders that `titan-train data prepare` wrote) or megatron
    (.bin/.idx)."""

    paths: tuple[str, ...] = ()
    """Files, folders or globs, read in sorted order; `.gz` and `.zst` are decompressed. Of a folder, files with the kind's usual
    endings are read (text: .txt, .text, .md, .rst, .py); a glob takes all that it matches. Empty for stdlib: all of it."""

    weight: Annotated[float, Range(above=0, note="remove a source to leave it out")] = 1.0
    """Share of the samples (so of the tokens), relative to the other sources' weights."""

    text_key: str = "text"
    """Key or column that holds the document; dots reach into nested objects ("record.body")."""

    messages_key: str = ""
    """Key or column that holds a list of chat messages, such as "messages"; given, every record is a conversation, written
    by the chat template, and only what the assistant wrote is learned. auto takes what each record has: messages, conversations
    (ShareGPT), prompt and completion, or instruction, input and output (Alpaca)."""

    packing: Literal["auto", "cut", "whole"] = "auto"
    """cut (documents run on from sample to sample), whole (no document is cut that fits into a sample; the rest of the
    sample is padding without labels) or auto: whole for chats, cut for text."""

    stream: bool = False
    """Tokenize while training instead of before it: for text that is too much to prepare. Nothing of it is held out."""

    stream_window: Count = 1024
    """stream only: samples that are tokenized together, kept on disk and shuffled among themselves."""

    exclude: tuple[str, ...] = ()
    """Globs of files to leave out, matched against the path below its folder and against the file name."""

    max_document_bytes: Count = 64 * 2**20
    """Largest document in bytes, decompressed; a longer one counts as malformed. This bounds memory per line."""

    max_epochs: Annotated[int, Range(0, note="0 repeats without limit")] = 0
    """Largest number of passes over the source; 0 repeats it without limit."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            near = re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-._") or "corpus"
            raise ValueError(
                f"data.sources.name={self.name!r} cannot name a cache folder. Use letters, digits, '.', '_' and '-', "
                f"for example {near!r}."
            )
        where = f"data.sources[{self.name!r}]"
        check_values(where, self)
        if not self.paths and self.kind != "stdlib":
            raise ValueError(
                f"{where}.paths is empty: kind={self.kind!r} has nothing to read. "
                'Name files, folders or globs, or use kind="stdlib", the one kind that needs no path.'
            )
        if any(not path for path in self.paths):
            raise ValueError(f"{where}.paths={self.paths!r} holds an empty path. Name a file, a folder or a glob.")
        if self.messages_key and self.kind not in RECORD_KINDS:
            raise ValueError(
                f"{where}.messages_key={self.messages_key!r} with kind={self.kind!r}, which has no records. "
                f"Use one of {', '.join(RECORD_KINDS)}, or remove messages_key."
            )
        if not self.text_key:
            raise ValueError(f'{where}.text_key="" names no key. The usual one is "text".')
        if self.stream and self.kind in ("tokens", "megatron"):
            raise ValueError(
                f"{where}.stream=true with kind={self.kind!r}: its tokens are prepared already. Remove stream."
            )

    @property
    def packs_whole(self) -> bool:
        """Whether a sample holds whole documents only."""
        return self.packing == "whole" or (self.packing == "auto" and bool(self.messages_key))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The corpora of a run, and how they are cut into samples."""

    sources: tuple[SourceConfig, ...] = field(default_factory=lambda: (SourceConfig(name="stdlib", kind="stdlib"),))
    """What to train on: `[[data.sources]]` tables with a name, a kind and paths."""

    validation_sources: tuple[SourceConfig, ...] = ()
    """Held-out corpora of their own, in addition to `validation_fraction` of each training source."""

    validation_fraction: Annotated[float, Range(0, below=1, note="0 holds out nothing, 0.1 is much")] = 0.01
    """Share of each text source's documents held out, by a hash of the text: a copy never lands on both sides."""

    cache_dir: str = ""
    """Where token shards and trained tokenizers are kept; empty means ~/.cache/titan-train."""

    on_error: OnError = "raise"
    """What a malformed line does: raise (stop, naming it), skip (count it), quarantine (count it and keep a copy of the line;
    of tables and text files at most an excerpt)."""

    max_bad_fraction: Annotated[float, Range(0, 1)] = 1e-3
    """With skip or quarantine: largest share of a source's documents that may be malformed."""

    max_bad: Annotated[int, Range(0, note="0 limits the share only")] = 0
    """With skip or quarantine: largest number of malformed documents per source; 0 limits the share only."""

    add_bos: bool = False
    """Begin every document with the tokenizer's begin-of-sequence token."""

    document_mask: bool = True
    """Keep attention inside documents: batches carry `cu_seqlens`, and positions restart at each document."""

    mask_document_boundary_labels: bool = True
    """Do not train the last token of a document to predict the first of the unrelated one after it."""

    shard_tokens: Count = 2**28
    """Tokens of one cache file; an interrupted preparation repeats at most this much."""

    num_threads: Annotated[int, Range(0, note="0 uses every core")] = 0
    """Threads that tokenize; 0 uses every core."""

    prefetch: Annotated[int, Range(0, note="0 prepares each batch on demand")] = 3
    """Micro-batches that a background thread prepares ahead; 0 prepares each on demand."""

    verify: Verify = "sample"
    """Check of the cache when it is opened: header only, sample (at most 64 random blocks a source), or full (1.6 GB/s)."""

    def __post_init__(self) -> None:
        check_values("data", self)
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
        for source in self.validation_sources:
            if source.stream:
                raise ValueError(
                    f"data.validation_sources[{source.name!r}].stream=true: a validation loss needs a fixed text. "
                    "Remove stream, and give it the files to validate on."
                )
