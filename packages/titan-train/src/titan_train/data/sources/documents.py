"""The documents of a source: which files, in which order, and what of each file is a document.

Text files are one document each; every line of a JSON lines file is one, and every row of a table. Files are read in sorted
order, so the stream of documents is the same on every machine that holds the same files.
"""

import codecs
import json
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from titan_train.config import SourceConfig
from titan_train.data.sources.chat import Conversations
from titan_train.data.sources.document import CorpusFile, Document, printable
from titan_train.data.sources.files import DamagedFileError, FileReader
from titan_train.data.sources.malformed import BadDocument
from titan_train.data.sources.records import as_document, oversize
from titan_train.data.sources.tables import read_rows, saved_dataset_files
from titan_train.files import PARTS_NAME, download_hint, local_path
from titan_train.hub.download import RECORD_NAME
from titan_train.values import nearest_name

_logger = logging.getLogger(__name__)
_told: set[tuple[str, Path]] = set()

# Folders of the standard library that are tests of it, tools with their own data, or not part of it.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".text")
_SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather"),
}


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
    kept = [file for file in files if not _excluded(file, source)]
    if not kept:
        detail = f"data.sources[{source.name!r}].exclude={list(source.exclude)} leaves none of {len(files)} files"
        if not files:
            detail = f"data.sources[{source.name!r}].paths={list(source.paths)} (kind={source.kind!r}) holds no files"
        raise ValueError(f"{detail}. Name at least one file.")
    return kept


def read_documents(
    file: CorpusFile,
    source: SourceConfig,
    reader: FileReader,
    first_line: int = 1,
    chats: Conversations | None = None,
    *,
    first_byte: int = 0,
) -> Iterator[Document | BadDocument]:
    """Documents of one file, malformed ones among them.

    Args:
        file: The file.
        source: Says what a document is.
        reader: Of the same file; hashes what it reads. A table is read by another.
        first_line: Line or row to begin at, from 1.
        chats: Writes the conversations of a source of chats; None gives the texts of their messages.
        first_byte: Where that line begins in a file of JSON lines, if it is known: nothing before it is read then. The
            reader's hash is not the file's.
    """
    chats = chats or Conversations(None)
    if source.kind == "jsonl":
        return _read_json_lines(file, source, reader, first_line, chats, first_byte)
    if source.kind in ("parquet", "arrow"):
        return read_rows(file, source, first_line, chats)
    return _read_text(file, source, reader, first_line)


def _stdlib_files() -> list[CorpusFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[CorpusFile] = []
    for folder, subfolders, names in os.walk(root):
        # site-packages may be larger than everything else: it is not even walked
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_EXCLUDED]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if path.stat().st_size:  # an empty __init__.py is not a document
                files.append(CorpusFile(path, printable(path.relative_to(root).as_posix())))
    files.sort(key=lambda file: file.name)
    if not files:
        raise ValueError(
            f'kind="stdlib": {root} holds no .py files (this Python ships its library in another format). '
            'Use kind="text" with paths to text of your own.'
        )
    return files


def _files_at(given: str, source: SourceConfig) -> list[CorpusFile]:
    path = local_path(given)
    if path.is_file():
        return [CorpusFile(path, printable(path.name))]
    _refuse_unfinished(given, source, (path, *path.parents))
    if path.is_dir() and source.kind == "arrow" and (saved := saved_dataset_files(path)) is not None:
        return saved
    if path.is_dir():
        suffixes = _SUFFIXES.get(source.kind, _TEXT_SUFFIXES)
        below = [*_files_below(path, source)]
        loaded = {p.parent.parent for p in below if p.parent.name == PARTS_NAME}
        _refuse_unfinished(given, source, (folder for folder in loaded if not _left_out(folder, path, source)))
        if source.kind == "text":
            _tell_left_out(source, path, below)
        found = [p for p in below if _plain_suffix(p) in suffixes and p.is_file()]
        found = [p for p in found if p.name != RECORD_NAME]  # of `titan-train data download`
        return sorted((CorpusFile(p, printable(p.relative_to(path).as_posix())) for p in found), key=lambda f: f.name)
    if found := [p for p in glob_matches(path) if p.is_file()]:
        files = [CorpusFile(p, printable(p.as_posix())) for p in found]
        read = (file.path for file in files if not _excluded(file, source))
        _refuse_unfinished(given, source, dict.fromkeys(folder for p in read for folder in p.parents))
        return files
    if path.exists():
        raise ValueError(
            f"data.sources[{source.name!r}].paths: {given!r} is a pipe or a device, and sources are read several times. Write "
            "it to a file first."
        )
    raise ValueError(
        f"data.sources[{source.name!r}].paths: {given!r} does not exist.{download_hint(given) or _nearest(path)}"
    )


def _refuse_unfinished(given: str, source: SourceConfig, folders: Iterable[Path]) -> None:
    if unfinished := next((folder for folder in folders if (folder / PARTS_NAME).is_dir()), None):
        raise ValueError(
            f"data.sources[{source.name!r}].paths: {given!r} reads from {unfinished}, whose download broke off, so files are "
            "missing. Run the same `titan-train data download` again, or, to do without, remove "
            f"{unfinished / PARTS_NAME}.{download_hint(given)}"
        )


def _tell_left_out(source: SourceConfig, root: Path, below: Sequence[Path]) -> None:
    """Warn, once in this process, of files of a folder that are no text by their names, but for hidden and excluded ones."""
    others = [path for path in below if _plain_suffix(path) not in _TEXT_SUFFIXES and path.name != RECORD_NAME]
    names = [CorpusFile(path, printable(path.relative_to(root).as_posix())) for path in others]
    left = Counter(
        _plain_suffix(file.path) or "no suffix"
        for file in names
        if not any(part.startswith(".") for part in file.name.split("/")) and not _excluded(file, source)
    )
    if left and (source.name, root) not in _told:
        _told.add((source.name, root))
        kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in left.most_common(3))
        _logger.warning(
            "source %r: %d files of %s are left out, as their names do not end in %s: %s%s. To read some, name them by a glob in "
            "data.sources.paths; to leave them out knowingly, name them in exclude%s.",
            source.name, left.total(), root, ", ".join(_TEXT_SUFFIXES), kinds, ", ..." if len(left) > 3 else "",
            ", both in a new run" if source.stream else "",
        )  # fmt: skip


def is_glob(path: Path) -> bool:
    """Whether a path has marks of a pattern."""
    return any(mark in str(path) for mark in "*?[")


def glob_matches(path: Path) -> list[Path]:
    """What a pattern matches, sorted; nothing where the path is none."""
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))) if is_glob(path) else []


def _files_below(root: Path, source: SourceConfig) -> Iterator[Path]:
    """What a folder holds at any depth, in no order. Links to folders elsewhere are followed, each place once.

    Raises:
        ValueError: A folder cannot be read, and ``exclude`` does not leave it out.
    """

    def failed(err: OSError) -> None:
        folder = Path(err.filename)
        if folder.name != "lost+found" and not _left_out(folder, root, source):
            raise ValueError(
                f"data.sources[{source.name!r}].paths: the folder {err.filename!r} cannot be read ({err.strerror}), so its files "
                'would be missing. Allow this user to read it, or leave it out: exclude = ["NAME/*"].'
            ) from err

    here = os.path.realpath(root)
    seen: set[str] = set()
    for folder, subfolders, names in os.walk(root, onerror=failed, followlinks=True):
        inside = Path(here, os.path.relpath(folder, root))
        kept: list[str] = []
        for name in sorted(subfolders):
            place = os.path.realpath(Path(folder, name))
            linked = place != str(inside / name)
            # what lies below the root is read there
            if place not in seen and not (linked and os.path.commonpath([place, here]) == here):
                kept.append(name)
                seen.add(place)
        subfolders[:] = kept
        yield from (Path(folder, name) for name in names)


def _nearest(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" The folder {str(parent)!r} does not exist either; the working directory is {str(Path.cwd())!r}."
    near = nearest_name(path.name, [p.name for p in parent.iterdir()])
    return f" Did you mean {str(parent / near)!r}?" if near else f" Nothing in {str(parent)!r} has a similar name."


def _plain_suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in (".gz", ".zst") else suffix


def _left_out(folder: Path, root: Path, source: SourceConfig) -> bool:
    name = folder.relative_to(root).as_posix() + "/"
    return any(fnmatch(name, pattern) for pattern in source.exclude)


def _excluded(file: CorpusFile, source: SourceConfig) -> bool:
    return any(_matches(file, pattern) for pattern in source.exclude)


def _matches(file: CorpusFile, pattern: str) -> bool:
    return fnmatch(file.name, pattern) or fnmatch(file.path.name, pattern)


def _read_text(
    file: CorpusFile, source: SourceConfig, reader: FileReader, first_line: int
) -> Iterator[Document | BadDocument]:
    content = bytearray()
    damage: str | None = None
    too_long = False
    try:
        for chunk in reader.chunks():
            too_long = too_long or len(content) + len(chunk) > source.max_document_bytes
            if not too_long:  # read on to the end for the file's hash
                content += chunk
    except DamagedFileError as err:
        damage = str(err)
    raw = bytes(content.removeprefix(codecs.BOM_UTF8))
    if first_line > 1:
        return  # the one document was taken before; the file is read for its hash
    if damage is not None:
        yield BadDocument(str(file.path), 1, len(content), "truncated", damage, b"")
    elif too_long:
        yield BadDocument(str(file.path), 1, 0, "oversize", oversize(source), raw[:200])
    else:
        yield _checked(file, 1, len(content) - len(raw), raw)


def _read_json_lines(
    file: CorpusFile, source: SourceConfig, reader: FileReader, first_line: int, chats: Conversations, first_byte: int
) -> Iterator[Document | BadDocument]:
    start = reader.go_to(first_byte)
    before = first_line - 1 if start else 0
    number, offset = before, start
    try:
        for number, (offset, line) in enumerate(reader.lines(source.max_document_bytes), start=before + 1):
            if number < first_line:
                continue
            if line is None:
                yield BadDocument(str(file.path), number, offset, "oversize", oversize(source), b"")
            elif offset == 0 and line.startswith(codecs.BOM_UTF8):
                mark = len(codecs.BOM_UTF8)
                yield _parse(file, source, number, mark, line[mark:], chats)
            else:
                yield _parse(file, source, number, offset, line, chats)
    except DamagedFileError as err:
        if number + 1 >= first_line:
            yield BadDocument(str(file.path), number + 1, offset, "truncated", str(err), b"")


def _parse(
    file: CorpusFile, source: SourceConfig, number: int, offset: int, line: bytes, chats: Conversations
) -> Document | BadDocument:
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as err:
        reason = f"invalid UTF-8 ({err.reason})"
        return BadDocument(str(file.path), number, offset + err.start, "invalid_utf8", reason, line)
    if not decoded.strip():
        return BadDocument(str(file.path), number, offset, "empty", "the line is empty", line)
    try:
        value: Any = json.loads(decoded)
    except (ValueError, RecursionError) as err:
        return BadDocument(str(file.path), number, offset, "invalid_json", f"invalid JSON ({err})", line)
    return as_document(value, source, chats, file=file, number=number, offset=offset, raw=line)


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
