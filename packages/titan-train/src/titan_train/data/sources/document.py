"""A file of a source, one document of it, and whether that document is held out for validation."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from titan_train.config import DataConfig, SourceConfig


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file of a source."""

    path: Path
    name: str
    """Path below the folder it was found in, as `printable` gives it: what a cache key and a manifest call it."""

    def stamp(self) -> tuple[str, int, int]:
        """Name, size (bytes) and time of change (ns): differ when the file was changed."""
        status = self.path.stat()
        return self.name, status.st_size, status.st_mtime_ns


def printable(name: str) -> str:
    """The name of a file as text: bytes that are not UTF-8, which Python keeps as lone surrogates, become escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Document:
    """One document."""

    text: str
    utf8: bytes
    """The text in UTF-8: hashed to choose the held-out part, counted for bytes per token."""
    line: int
    """Where it began in its file, from 1: a line, or a row of a table."""
    spans: tuple[tuple[int, int], ...] | None = None
    """The characters of ``text`` that are learned, if it is a conversation; None learns all of it."""
    byte: int = 0
    """Where its line begins in the decompressed file."""


def is_held_out(utf8: bytes, fraction: float) -> bool:
    """Whether a document belongs to the held-out share, by a hash of its text alone: copies land on the same side."""
    if fraction <= 0:
        return False
    return int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest(), "big") < fraction * 2**64


def held_out_fraction(source: SourceConfig, config: DataConfig) -> float:
    """Share of a source held out; 0 for a validation source."""
    return 0.0 if source in config.validation_sources else config.validation_fraction
