"""A file of a source, and one document of it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file of a source."""

    path: Path
    name: str
    """Path below the folder it was found in: what a cache key and a manifest call it."""

    def stamp(self) -> tuple[str, int, int]:
        """Name, size (bytes) and time of change (ns): differ when the file was changed."""
        status = self.path.stat()
        return self.name, status.st_size, status.st_mtime_ns


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
