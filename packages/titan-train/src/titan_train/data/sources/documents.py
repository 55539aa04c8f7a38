"""The documents of a source: which files, in which order, and what of each file is a document.

Text files are one document each; every line of a JSON lines file is one. Files are read in sorted order, so the stream
of documents is the same on every machine that holds the same files.
"""

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from titan_train.config.data import SourceConfig
from titan_train.data.sources.files import DamagedFileError, FileReader
from titan_train.data.sources.malformed import BadDocument, BadKind
from titan_train.nearest import nearest_name

# Folders of the standard library that are tests of it, tools with their own data, or not part of it.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".text")
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


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
    """Where it began in its file, from 1."""


def list_files(source: SourceConfig) -> list[CorpusFile]:
    """Files of a text source, in the order they are read.

    Raises:
        ValueError: If a path does not exist (naming the nearest that does), or nothing is left to read.
    """
    files: list[CorpusFile] = []
    if source.kind == "stdlib":
        files += _stdlib_files()
    for path in source.paths:
        files += _files_at(path, source)
    kept = [file for file in files if not any(_matches(file, pattern) for pattern in source.exclude)]
    if not kept:
        detail = f"data.sources[{source.name!r}].exclude={list(source.exclude)} leaves none of {len(files)} files"
        if not files:
            detail = f"data.sources[{source.name!r}].paths={list(source.paths)} (kind={source.kind!r}) holds no files"
        raise ValueError(f"{detail}. Name at least one file.")
    return kept


def read_documents(
    file: CorpusFile, source: SourceConfig, reader: FileReader, first_line: int = 1
) -> Iterator[Document | BadDocument]:
    """Documents of one file, malformed ones among them, from line ``first_line`` on."""
    if source.kind == "jsonl":
        return _read_json_lines(file, source, reader, first_line)
    return _read_text(file, source, reader, first_line)


def _stdlib_files() -> list[CorpusFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[CorpusFile] = []
    for folder, subfolders, names in os.walk(root):
        # site-packages may be larger than everything else: it is not even walked
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_EXCLUDED]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if path.stat().st_size:  # an empty package marker is no document
                files.append(CorpusFile(path, path.relative_to(root).as_posix()))
    files.sort(key=lambda file: file.name)
    if not files:
        raise ValueError(
            f'kind="stdlib": {root} holds no .py files (this Python ships its library in another format). '
            'Use kind="text" with paths to text of your own.'
        )
    return files


def _files_at(given: str, source: SourceConfig) -> list[CorpusFile]:
    path = Path(given).expanduser()
    if path.is_file():
        return [CorpusFile(path, path.name)]
    if path.is_dir():
        suffixes = _JSONL_SUFFIXES if source.kind == "jsonl" else _TEXT_SUFFIXES
        found = [p for p in path.rglob("*") if p.is_file() and _plain_suffix(p) in suffixes]
        return sorted((CorpusFile(p, p.relative_to(path).as_posix()) for p in found), key=lambda f: f.name)
    if any(mark in given for mark in "*?["):
        root = Path(path.anchor) if path.is_absolute() else Path()
        pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
        found = sorted(p for p in root.glob(pattern) if p.is_file())
        if found:
            return [CorpusFile(p, p.as_posix()) for p in found]
    raise ValueError(f"data.sources[{source.name!r}].paths: {given!r} does not exist.{_nearest(path)}")


def _nearest(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" The folder {str(parent)!r} does not exist either; the working directory is {str(Path.cwd())!r}."
    near = nearest_name(path.name, [p.name for p in parent.iterdir()])
    return f" Did you mean {str(parent / near)!r}?" if near else f" Nothing in {str(parent)!r} has a similar name."


def _plain_suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def _matches(file: CorpusFile, pattern: str) -> bool:
    return fnmatch(file.name, pattern) or fnmatch(file.path.name, pattern)


def _read_text(
    file: CorpusFile, source: SourceConfig, reader: FileReader, first_line: int
) -> Iterator[Document | BadDocument]:
    content = bytearray()
    damage: str | None = None
    oversize = False
    try:
        for chunk in reader.chunks():
            oversize = oversize or len(content) + len(chunk) > source.max_document_bytes
            if not oversize:  # read on to the end for the file's hash
                content += chunk
    except DamagedFileError as err:
        damage = str(err)
    raw = bytes(content)
    if first_line > 1:
        return  # the one document was taken before; the file is read for its hash
    if damage is not None:
        yield BadDocument(str(file.path), 1, len(raw), "truncated", damage, b"")
    elif oversize:
        yield BadDocument(str(file.path), 1, 0, "oversize", _oversize(source), raw[:200])
    else:
        yield _checked(file, 1, 0, raw)


def _read_json_lines(
    file: CorpusFile, source: SourceConfig, reader: FileReader, first_line: int
) -> Iterator[Document | BadDocument]:
    keys = [source.text_key] if "." not in source.text_key else source.text_key.split(".")
    number, offset = 0, 0
    try:
        for number, (offset, line) in enumerate(reader.lines(source.max_document_bytes), start=1):
            if number < first_line:
                continue
            if line is None:
                yield BadDocument(str(file.path), number, offset, "oversize", _oversize(source), b"")
            else:
                yield _parse(file, number, offset, line, keys)
    except DamagedFileError as err:
        if number + 1 >= first_line:
            yield BadDocument(str(file.path), number + 1, offset, "truncated", str(err), b"")


def _parse(file: CorpusFile, number: int, offset: int, line: bytes, keys: list[str]) -> Document | BadDocument:
    def bad(kind: BadKind, reason: str, byte: int = offset) -> BadDocument:
        return BadDocument(str(file.path), number, byte, kind, reason, line)

    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as err:
        return bad("invalid_utf8", f"invalid UTF-8 ({err.reason})", offset + err.start)
    if not decoded.strip():
        return bad("empty", "the line is empty")
    try:
        value: Any = json.loads(decoded)
    except (ValueError, RecursionError) as err:
        return bad("invalid_json", f"invalid JSON ({err})")
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return bad("missing_text", f"no key {'.'.join(keys)!r}")
        value = value[key]
    if not isinstance(value, str):
        return bad("missing_text", f"{'.'.join(keys)!r} is {type(value).__name__}, not a string")
    if not value:
        return bad("empty", f"{'.'.join(keys)!r} is an empty string")
    try:
        return Document(value, value.encode(), number)
    except UnicodeEncodeError as err:
        return bad("invalid_utf8", f"a lone surrogate, \\u{ord(value[err.start]):04x}, is not a character")


def _checked(file: CorpusFile, number: int, offset: int, raw: bytes) -> Document | BadDocument:
    if not raw:
        return BadDocument(str(file.path), number, offset, "empty", "the file is empty", raw)
    try:
        return Document(raw.decode("utf-8"), raw, number)
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        excerpt = raw[max(0, err.start - 20) : err.start + 60]
        return BadDocument(
            str(file.path), line, offset + err.start, "invalid_utf8", f"invalid UTF-8 ({err.reason})", excerpt
        )


def _oversize(source: SourceConfig) -> str:
    return f"longer than max_document_bytes={source.max_document_bytes} of its source allows (raise it to read it)"
