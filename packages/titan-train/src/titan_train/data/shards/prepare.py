"""Tokenize a source once into shards, so that training reads tokens from a memory map.

A prepared source is a `PreparedFolder`: `train-00000.tok/.idx`, `validation-00000.tok/.idx`, ..., and `manifest.json`,
written last. Shards of both parts end together, at a document; `progress.json` then says which document comes next. A
killed preparation continues there and ends with the same bytes.

A document is held out by a hash of its text: copies of a document never land on both sides, and adding files moves
none of the others.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from titan_train.config import DataConfig, SourceConfig
from titan_train.data.prepared import PreparedFolder, content_key
from titan_train.data.progress import ProgressCallback, ProgressReporter
from titan_train.data.shards.format import ShardInfo, ShardWriter
from titan_train.data.shards.manifest import MANIFEST_NAME, DataManifest, read_manifest, write_manifest
from titan_train.data.sources.chat import Conversations, conversations_for, template_key
from titan_train.data.sources.document import CorpusFile, Document, held_out_fraction, is_held_out
from titan_train.data.sources.documents import list_files, read_documents
from titan_train.data.sources.encoding import DocumentTokens, encode_in_order
from titan_train.data.sources.files import FileReader
from titan_train.data.sources.malformed import BadDocument
from titan_train.tokenizers import ChatTemplate, Tokenizer

TRAIN, VALIDATION = "train", "validation"
_SPLITS = (TRAIN, VALIDATION)
_FORMAT = 1

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """The content of `progress.json`."""

    shards: dict[str, list[ShardInfo]]
    text_bytes: dict[str, int]
    files: list[dict[str, Any]]
    next: tuple[int, int]
    """The next document: its file, and its line there."""
    seen: int
    bad: dict[str, int]
    quarantine_bytes: int


@dataclass(frozen=True, slots=True)
class _FileEnd:
    number: int
    name: str
    size: int
    sha256: str


def source_folder(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    cache_dir: Path,
    template: ChatTemplate | None = None,
    files: Sequence[CorpusFile] | None = None,
) -> Path:
    """Folder of a text source's shards, named after the files, tokenizer and options that decide the tokens."""
    content: dict[str, Any] = {
        "format": _FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "options": _options(source, config),
        "files": [file.stamp() for file in (list_files(source) if files is None else files)],
        **template_key(source, template),
    }
    return cache_dir / f"{source.name}-{content_key(content)[:16]}"


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
        tokenizer: Encodes the text.
        cache_dir: Parent of the folder.
        progress: Called with the progress.
        template: Writes conversations; needed by a source of chats.

    Returns:
        The folder with its manifest.

    Raises:
        ValueError: If a path does not exist, or as `MalformedInputError` for malformed documents.
    """
    files = list_files(source)
    chats = conversations_for(source, tokenizer, template)
    path = source_folder(source, config, tokenizer, cache_dir, template, files)
    folder = PreparedFolder(path, "progress.json", _Progress)
    if not _is_prepared(folder, source, config):
        with folder.one_process():
            if not _is_prepared(folder, source, config):  # another process may have done it meanwhile
                _Preparation(source, config, tokenizer, folder, files, progress, chats).run()
    return path


class _Preparation:
    def __init__(
        self,
        source: SourceConfig,
        config: DataConfig,
        tokenizer: Tokenizer,
        folder: PreparedFolder[_Progress],
        files: Sequence[CorpusFile],
        progress: ProgressCallback | None,
        chats: Conversations | None,
    ) -> None:
        self._source, self._config, self._tokenizer, self._chats = source, config, tokenizer, chats
        self._folder, self._files = folder, files
        self._fraction = held_out_fraction(source, config)
        self._bad = folder.bad_documents(source.name, config)
        self._done = _Progress({split: [] for split in _SPLITS}, dict.fromkeys(_SPLITS, 0), [], (0, 1), 0, {}, 0)
        self._tokens = DocumentTokens(config, tokenizer, chats)
        self._sizes = [file.path.stat().st_size for file in self._files]
        self._report = ProgressReporter(f"tokenize {source.name}", self._sizes, progress)
        self._bytes_before = list(accumulate(self._sizes, initial=0))
        self._reading: tuple[int, FileReader] | None = None  # the file being read, by number
        self._writers: dict[str, ShardWriter] = {}

    def run(self) -> None:
        self._resume()
        self._writers = self._open_writers()
        try:
            for item, ids in encode_in_order(self._items(), self._tokenizer, self._config.num_threads):
                self._take(item, ids)
            self._bad.check_share()
            self._finish_shards()
        except BaseException:
            for writer in self._writers.values():
                writer.discard()
            raise
        write_manifest(self._folder.path, self._manifest())
        self._folder.state_path.unlink(missing_ok=True)
        self._report_progress(finished=True)

    def _items(self) -> Iterator[Document | BadDocument | _FileEnd]:
        first, line = self._done.next
        for number, file in enumerate(self._files[first:], start=first):
            reader = FileReader(file.path)
            self._reading = number, reader
            yield from read_documents(file, self._source, reader, line, self._chats)
            if not reader.bytes_read:  # a table's rows come from another reader
                reader.hash_whole()
            yield _FileEnd(number, file.name, reader.bytes_read, reader.sha256)
            line = 1

    def _take(self, item: Document | BadDocument | _FileEnd, ids: Any) -> None:
        if isinstance(item, _FileEnd):
            self._done.files.append({"path": item.name, "size": item.size, "sha256": item.sha256})
            self._done.next = (item.number + 1, 1)
            self._report_progress()
            return
        if isinstance(item, BadDocument):
            self._bad.add(item)
        else:
            self._bad.add_good()
            split = VALIDATION if is_held_out(item.utf8, self._fraction) else TRAIN
            self._writers[split].append(self._tokens.of(ids))
            self._done.text_bytes[split] += len(item.utf8)
        self._done.next = (self._done.next[0], item.line + 1)
        self._report_progress()
        if sum(writer.tokens for writer in self._writers.values()) >= self._config.shard_tokens:
            self._finish_shards()
            self._done.seen, self._done.bad = self._bad.seen, dict(self._bad.counts)
            self._done.quarantine_bytes = self._bad.quarantine_size()
            self._folder.write(self._done)
            self._writers = self._open_writers()

    def _finish_shards(self) -> None:
        for split, writer in self._writers.items():
            if writer.tokens or not self._done.shards[split]:
                self._done.shards[split].append(writer.close())
            else:
                writer.discard()
        self._writers = {}

    def _resume(self) -> None:
        found = self._folder.read_or_restart()
        if found is not None:
            self._done = found
            _logger.info("%s: continuing at file %d, line %d", self._folder.path, *found.next)
        self._bad.resume(self._done.seen, self._done.bad, self._done.quarantine_bytes)

    def _open_writers(self) -> dict[str, ShardWriter]:
        return {
            split: ShardWriter(
                self._folder.path,
                f"{split}-{len(self._done.shards[split]):05d}",
                vocab_size=self._tokens.vocab_size,
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
            splits={split: tuple(shards) for split, shards in self._done.shards.items()},
            text_bytes=self._done.text_bytes,
            label_mask=self._chats is not None,
            options=_options(self._source, self._config),
            files=tuple(self._done.files),
            bad=dict(self._bad.counts),
        )

    def _report_progress(self, finished: bool = False) -> None:
        if self._report.is_due(finished):
            number, bytes_read = (0, 0) if self._reading is None else (self._reading[0], self._reading[1].bytes_read)
            shards = (info for shards in self._done.shards.values() for info in shards)
            self._report(
                len(self._done.files),
                bytes_done=self._bytes_before[number] + bytes_read,
                tokens=sum(part.tokens for part in (*shards, *self._writers.values())),
                finished=finished,
            )


def _is_prepared(folder: PreparedFolder[_Progress], source: SourceConfig, config: DataConfig) -> bool:
    if not (folder.path / MANIFEST_NAME).is_file():
        return False
    manifest = read_manifest(folder.path)
    if manifest.bad:  # prepared under a looser limit, perhaps
        bad = folder.bad_documents(source.name, config)
        bad.seen = sum(manifest.num_documents(split) for split in _SPLITS) + sum(manifest.bad.values())
        bad.counts.update(manifest.bad)
        bad.check_count()
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
