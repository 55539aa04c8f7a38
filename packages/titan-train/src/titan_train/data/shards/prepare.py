"""Tokenize a source once into shards, so that training reads tokens from a memory map.

A prepared source is a folder: `train-00000.tok/.idx`, `validation-00000.tok/.idx`, ..., and `manifest.json`, written
last. Shards of both parts end together, at a document; `progress.json` then says which document comes next. A killed
preparation continues there and ends with the same bytes. One process prepares a folder at a time; others wait for it.

A document is held out by a hash of its text: copies of a document never land on both sides, and adding files moves
none of the others.
"""

import hashlib
import json
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from titan_train.config import DataConfig, SourceConfig
from titan_train.data.progress import PrepareProgress, ProgressCallback
from titan_train.data.shards.format import ShardInfo, ShardWriter
from titan_train.data.shards.manifest import MANIFEST_NAME, DataManifest, read_manifest, write_json, write_manifest
from titan_train.data.sources.chat import Conversations, conversations_for
from titan_train.data.sources.document import CorpusFile, Document
from titan_train.data.sources.documents import list_files, read_documents
from titan_train.data.sources.encoding import encode_in_order
from titan_train.data.sources.files import FileReader
from titan_train.data.sources.held_out import held_out_fraction, is_held_out
from titan_train.data.sources.malformed import BadDocument, BadDocuments
from titan_train.files import read_bytes
from titan_train.tokenizers import ChatTemplate, Tokenizer

TRAIN, VALIDATION = "train", "validation"
_SPLITS = (TRAIN, VALIDATION)
_PROGRESS_NAME = "progress.json"
_QUARANTINE_NAME = "quarantine.jsonl"
_FORMAT = 1
_REPORT_EVERY_S = 0.1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _FileEnd:
    """Comes after a file's last document."""

    number: int
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Position:
    """The next document: its file, and its line there."""

    file: int = 0
    line: int = 1


def source_folder(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    cache_dir: Path,
    template: ChatTemplate | None = None,
) -> Path:
    """Where a text source's shards lie: one folder for each set of files, tokenizer and options that decide tokens."""
    return _folder(source, config, tokenizer, cache_dir, list_files(source), template)


def prepare_source(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    cache_dir: Path,
    progress: ProgressCallback | None = None,
    template: ChatTemplate | None = None,
) -> Path:
    """Tokenize one text source unless that was done before.

    Args:
        source: The source.
        config: Options of all sources.
        tokenizer: Makes the tokens.
        cache_dir: The folder is made in it.
        progress: Told how far it is.
        template: Writes conversations; needed by a source of chats.

    Returns:
        The folder with its manifest.

    Raises:
        ValueError: If a path does not exist, or as `MalformedInputError` for malformed documents.
    """
    files = list_files(source)
    chats = conversations_for(source, tokenizer, template)
    folder = _folder(source, config, tokenizer, cache_dir, files, template)
    if _is_prepared(folder, source, config):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with _only_process(folder):
        if not _is_prepared(folder, source, config):  # another process may have done it meanwhile
            _Preparation(source, config, tokenizer, folder, files, progress, chats).run()
    return folder


@dataclass(frozen=True, slots=True)
class _Noted:
    """The content of `progress.json`."""

    shards: dict[str, list[ShardInfo]]
    text_bytes: dict[str, int]
    files: list[dict[str, Any]]
    next: tuple[int, int]
    seen: int
    bad: dict[str, int]
    quarantine_bytes: int


_ADAPTER = TypeAdapter(_Noted)


class _Preparation:
    """One source on its way into shards."""

    def __init__(
        self,
        source: SourceConfig,
        config: DataConfig,
        tokenizer: Tokenizer,
        folder: Path,
        files: Sequence[CorpusFile],
        progress: ProgressCallback | None,
        chats: Conversations | None,
    ) -> None:
        self._chats = chats
        self._source, self._config, self._tokenizer = source, config, tokenizer
        self._folder, self._files, self._progress = folder, files, progress
        self._fraction = held_out_fraction(source, config)
        self._bad = _bad_documents(source, config, folder / _QUARANTINE_NAME)
        self._shards: dict[str, list[ShardInfo]] = {split: [] for split in _SPLITS}
        self._text_bytes: dict[str, int] = {TRAIN: 0, VALIDATION: 0}
        self._done_files: list[dict[str, Any]] = []
        self._next = _Position()
        self._bos = _bos(config, tokenizer)
        self._eos = np.array([tokenizer.eos_id], dtype=np.int32)
        self._sizes = [file.path.stat().st_size for file in files]
        self._ends = list(accumulate(self._sizes))
        self._started = time.monotonic()
        self._reported = 0.0
        self._reader: FileReader | None = None
        self._bytes_before = 0  # of the files before the one being read
        self._writers: dict[str, ShardWriter] = {}

    def run(self) -> None:
        self._resume()
        self._writers = self._open_writers()
        try:
            for item, ids in encode_in_order(self._items(), self._tokenizer, self._config.num_threads):
                self._take(item, ids)
            self._bad.check_share()
            self._cut(last=True)
        except BaseException:
            for writer in self._writers.values():
                writer.discard()
            raise
        write_manifest(self._folder, self._manifest())
        (self._folder / _PROGRESS_NAME).unlink(missing_ok=True)
        self._report(finished=True)

    def _items(self) -> Iterator[Document | BadDocument | _FileEnd]:
        start = self._next
        for number in range(start.file, len(self._files)):
            file = self._files[number]
            self._bytes_before = self._ends[number] - self._sizes[number]
            self._reader = reader = FileReader(file.path)
            yield from read_documents(
                file, self._source, reader, start.line if number == start.file else 1, self._chats
            )
            yield _FileEnd(number, file.name, reader.bytes_read, reader.sha256)

    def _take(self, item: Document | BadDocument | _FileEnd, ids: Any) -> None:
        if isinstance(item, _FileEnd):
            self._done_files.append({"path": item.name, "size": item.size, "sha256": item.sha256})
            self._next = _Position(item.number + 1)
            self._report()
            return
        if isinstance(item, BadDocument):
            self._bad.add(item)
        else:
            self._bad.add_good()
            split = VALIDATION if is_held_out(item.utf8, self._fraction) else TRAIN
            # a chat template writes what begins and ends a conversation
            self._writers[split].append([ids] if self._chats else [*self._bos, ids, self._eos])
            self._text_bytes[split] += len(item.utf8)
        self._next = _Position(self._next.file, item.line + 1)
        self._report()
        if sum(writer.tokens for writer in self._writers.values()) >= self._config.shard_tokens:
            self._cut()

    def _cut(self, last: bool = False) -> None:
        """Finish the open shards, and note where the next ones begin."""
        for split, writer in self._writers.items():
            if writer.tokens or not self._shards[split]:
                self._shards[split].append(writer.close())
            else:
                writer.discard()
        self._writers = {}
        if last:
            return
        write_json(
            self._folder / _PROGRESS_NAME,
            {
                "shards": {split: [info.as_json() for info in shards] for split, shards in self._shards.items()},
                "text_bytes": self._text_bytes,
                "files": self._done_files,
                "next": [self._next.file, self._next.line],
                "seen": self._bad.seen,
                "bad": dict(self._bad.counts),
                "quarantine_bytes": self._bad.quarantine_size(),
            },
        )
        self._writers = self._open_writers()

    def _resume(self) -> None:
        path = self._folder / _PROGRESS_NAME
        if not path.exists():
            self._bad.resume(0, {}, 0)
            return
        try:
            noted = _ADAPTER.validate_json(read_bytes(path))
        except ValidationError:  # written by a machine that lost power, perhaps
            _logger.warning("%s is damaged: preparing %s from the beginning", path, self._source.name)
            self._bad.resume(0, {}, 0)
            return
        self._shards = noted.shards
        self._text_bytes = noted.text_bytes
        self._done_files = noted.files
        self._next = _Position(*noted.next)
        self._bad.resume(noted.seen, noted.bad, noted.quarantine_bytes)
        _logger.info("%s: continuing at file %d, line %d", self._folder, self._next.file, self._next.line)

    def _open_writers(self) -> dict[str, ShardWriter]:
        return {
            split: ShardWriter(
                self._folder,
                f"{split}-{len(self._shards[split]):05d}",
                vocab_size=self._tokenizer.vocab_size * (2 if self._chats else 1),
                tokenizer_fingerprint=self._tokenizer.fingerprint,
            )
            for split in _SPLITS
        }

    def _manifest(self) -> DataManifest:
        return DataManifest(
            source=self._source.name,
            tokenizer=self._tokenizer.fingerprint,
            vocab_size=self._tokenizer.vocab_size,
            bos_id=self._tokenizer.bos_id if self._config.add_bos else None,
            eos_id=self._tokenizer.eos_id,
            splits={split: tuple(shards) for split, shards in self._shards.items()},
            text_bytes=self._text_bytes,
            label_mask=self._chats is not None,
            options=_options(self._source, self._config),
            files=tuple(self._done_files),
            bad=dict(self._bad.counts),
        )

    def _report(self, finished: bool = False) -> None:
        now = time.monotonic()
        if self._progress is None or (now - self._reported < _REPORT_EVERY_S and not finished):
            return
        self._reported = now
        finished_tokens = sum(info.tokens for shards in self._shards.values() for info in shards)
        self._progress(
            PrepareProgress(
                stage=f"tokenize {self._source.name}",
                files_done=len(self._done_files),
                files_total=len(self._files),
                bytes_done=self._bytes_before + (self._reader.bytes_read if self._reader else 0),
                bytes_total=self._ends[-1],
                tokens=finished_tokens + sum(writer.tokens for writer in self._writers.values()),
                elapsed_s=now - self._started,
                finished=finished,
            )
        )


def _bos(config: DataConfig, tokenizer: Tokenizer) -> list[Any]:
    if not config.add_bos:
        return []
    if tokenizer.bos_id is None:
        raise ValueError(
            f"data.add_bos=true, but the {tokenizer.kind} tokenizer has no beginning-of-document token. "
            "Set add_bos=false, or use a tokenizer that has one."
        )
    return [np.array([tokenizer.bos_id], dtype=np.int32)]


def _bad_documents(source: SourceConfig, config: DataConfig, quarantine: Path) -> BadDocuments:
    return BadDocuments(
        source.name,
        on_error=config.on_error,
        max_fraction=config.max_bad_fraction,
        max_count=config.max_bad,
        quarantine=quarantine,
    )


def _is_prepared(folder: Path, source: SourceConfig, config: DataConfig) -> bool:
    if not (folder / MANIFEST_NAME).is_file():
        return False
    manifest = read_manifest(folder)
    if manifest.bad:  # prepared under a looser limit, perhaps
        bad = _bad_documents(source, config, folder / _QUARANTINE_NAME)
        seen = sum(manifest.num_documents(split) for split in _SPLITS) + sum(manifest.bad.values())
        bad.seen, bad.counts = seen, bad.counts + type(bad.counts)(manifest.bad)
        bad.check_share()
    return True


def _options(source: SourceConfig, config: DataConfig) -> dict[str, Any]:
    """Settings that decide the tokens. Skipping or not is one: with on_error=raise nothing may have been left out."""
    return {
        "kind": source.kind,
        "text_key": source.text_key,
        "max_document_bytes": source.max_document_bytes,
        "add_bos": config.add_bos,
        "validation_fraction": held_out_fraction(source, config),
        "shard_tokens": config.shard_tokens,
        "on_error": config.on_error,
    }


def _folder(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    cache_dir: Path,
    files: Sequence[CorpusFile],
    template: ChatTemplate | None,
) -> Path:
    content: dict[str, Any] = {
        "format": _FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "options": _options(source, config),
        "files": [file.stamp() for file in files],
    }
    if source.messages_key and template is not None:
        content["chat"] = [source.messages_key, template.source, template.special_tokens]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir / f"{source.name}-{key}"


@contextmanager
def _only_process(folder: Path) -> Generator[None]:
    import fcntl  # not on Windows

    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.info("waiting for another process that prepares %s", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as err:  # some network file systems have no locks
            _logger.warning("%s cannot be locked (%s): prepare it from one process only", folder, err)
        yield  # closing the file releases the lock
