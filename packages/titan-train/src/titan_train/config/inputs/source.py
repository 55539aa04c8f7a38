"""One corpus of a run. Only values live here: reading it is in `titan_train.data.sources`."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from titan_train.values import Count, Range, check_values

SourceKind = Literal["stdlib", "text", "jsonl", "parquet", "arrow", "tokens", "megatron"]

TEXT_KINDS = ("stdlib", "text", "jsonl", "parquet", "arrow")
"""Kinds of source that hold text."""
RECORD_KINDS = ("jsonl", "parquet", "arrow")
"""Kinds whose files hold records with keys."""

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
    """Files, folders or globs, read in sorted order; `.gz` and `.zst` are decompressed. Empty for stdlib: all of it."""

    weight: Annotated[float, Range(above=0, note="remove a source to leave it out")] = 1.0
    """Share of the samples (so of the tokens), relative to the other sources' weights."""

    text_key: str = "text"
    """Key or column that holds the document; dots reach into nested objects ("record.body")."""

    messages_key: str = ""
    """Key or column that holds a list of chat messages, such as "messages"; given, every record is a conversation, written
    by the chat template, and only what the assistant wrote is learned."""

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
            raise ValueError(
                f"data.sources.name={self.name!r} cannot name a cache folder. Use letters, digits, '.', '_' and '-', "
                f"for example {_as_name(self.name)!r}."
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


def _as_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "corpus"
