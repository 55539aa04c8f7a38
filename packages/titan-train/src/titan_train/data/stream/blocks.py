"""Blocks of a stream on disk: each made once, by whichever process comes first, and removed when it lies well behind.

    blocks.json               the last blocks: where each begins, where the next one begins, the files it was read from
    block-00000012.tok/.idx   its tokens, as any shard

A block whose files have changed since, or whose shard is gone, is made again from where it begins, as are the blocks behind a
changed one; a checkpoint knows that place too. If the place of a block is not known, the blocks before it are made until it is.
"""

import threading
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from titan_train.config import DataConfig, SourceConfig
from titan_train.data.prepared import PreparedFolder
from titan_train.data.shards.format import ShardInfo, ShardWriter
from titan_train.data.shards.token_source import ShardedTokens
from titan_train.data.sources.chat import Conversations
from titan_train.data.sources.documents import list_files
from titan_train.data.stream.reader import PassCounts, Stamp, StreamCursor, StreamReader, hash_of, stamps_of
from titan_train.tokenizers import Tokenizer

# Ranks stand at most a step apart; a block removed before somebody reads it is made again.
_KEPT_BLOCKS, _KEPT_RECORDS = 8, 64
# Of a step that reads more blocks than that: how many such steps are kept.
_KEPT_STEPS, _RECORDED_STEPS = 2, 6


@dataclass(frozen=True, slots=True)
class _Record:
    """One block in `blocks.json`."""

    block: int
    begins: StreamCursor | None
    """None begins at the first document."""
    next: StreamCursor
    files: list[Stamp]
    """Stamps of the files it was read from."""
    shard: ShardInfo
    counted: PassCounts | None = None
    """What its last pass had read where it ends."""


class StreamBlocks:
    """The blocks of one stream.

    Args:
        source: A source of text.
        config: Threads, and what malformed documents do.
        tokenizer: Makes the tokens.
        folder: Shared by the processes that read the stream.
        seq_len: Inputs of a sample; a block is ``source.stream_window`` of them.
        chats: Writes the conversations of a source of chats.
    """

    def __init__(
        self,
        source: SourceConfig,
        config: DataConfig,
        tokenizer: Tokenizer,
        folder: Path,
        *,
        seq_len: int,
        chats: Conversations | None = None,
    ) -> None:
        self._source, self._config, self._tokenizer = source, config, tokenizer
        self._folder = PreparedFolder(folder, "blocks.json", list[_Record])
        self._seq_len, self._chats = seq_len, chats
        self._files = list_files(source)
        self._given: dict[int, StreamCursor] = {}  # from a checkpoint
        self._given_files: list[list[Any]] = []
        self._lock = threading.Lock()
        self._reader: StreamReader | None = None
        self._reader_at: StreamCursor | None = None
        self._reader_block = -1  # the block that it makes next
        self._last: _Record | None = None  # the block made or opened last: other runs may push it out of the record
        self.step_blocks = 1
        """Blocks that a step reads."""
        self._bad = self._folder.bad_documents(source.name, config, streamed=True)
        with self._folder.one_process():
            self._forget_outdated()

    def open(self, number: int) -> ShardedTokens:
        """A block, made if it is not there. Waits while another process makes it.

        Raises:
            ValueError: As `StreamReader.take`.
        """
        with self._lock, self._folder.one_process():
            found = self._on_disk(number)
            return found if found is not None else self._make(number)

    def cursor(self, number: int) -> tuple[int, StreamCursor | None]:
        """The last block up to ``number`` whose beginning is known, and that place; None is the first document."""
        known = self._known(number)
        return max(known), known[max(known)]

    def stands_at(self, number: int) -> bool:
        """Whether this process made the block before ``number``, so that it can continue without reading anything again."""
        return self._reader is not None and self._reader_block == number

    def files(self, number: int) -> list[list[Any]]:
        """Name and size of each file that a block was read from; those that a checkpoint gave if the block is not on record."""
        found = next((record.files for record in self._records() if record.block == number), None)
        return self._given_files if found is None else [[name, size] for name, size, _ in found]

    def files_hash(self) -> str:
        """Hash (hex) of the names and sizes of all files."""
        return hash_of(stamps_of(self._files))

    def give(self, number: int, cursor: StreamCursor | None, files: list[list[Any]]) -> None:
        """Set where a block begins, as a checkpoint states it, unless it is at the first document.

        Args:
            number: The block.
            cursor: Where it begins; None is the first document.
            files: What `files` gave for the last block that was read.

        Raises:
            ValueError: If the files are not those that it was read from.
        """
        stamps = stamps_of(self._files)
        if cursor is not None:
            cursor.file_number(stamps, self._source.name)
            cursor.check_earlier(stamps, self._source.name)
        present = {(name, size) for name, size, _ in stamps}
        for name, size in files:
            if (name, size) not in present:
                raise ValueError(
                    f"the stream of source {self._source.name!r} has read {name!r} with {size} bytes, which is gone or has "
                    "another size now: other samples would come. Restore the file, or allow it: "
                    "checkpoint.allow_data_change=true."
                )
        self._given_files = files
        if cursor is not None:
            self._given[number] = cursor

    def _make(self, number: int) -> ShardedTokens:
        known = self._known(number)
        records = {record.block: record for record in self._records()}
        try:
            for block in range(max(known), number + 1):
                made = self._make_one(block, known[block])
                known[block + 1] = made.next
                records.pop(block, None)
                records[block] = self._last = made
        finally:
            kept = max(_KEPT_RECORDS, _RECORDED_STEPS * self.step_blocks)
            self._folder.write([*records.values()][-kept:], sync=False)
        self._remove_before(number - max(_KEPT_BLOCKS, _KEPT_STEPS * self.step_blocks))
        return self._opened(records[number].shard)

    def _make_one(self, number: int, cursor: StreamCursor | None) -> _Record:
        reader = self._reader_from(number, cursor)
        try:
            if self._source.packs_whole:
                documents, after = reader.take_rows(self._source.stream_window, self._seq_len + 1)
            else:  # a block's last token is the next one's first
                documents, after = reader.take(self._source.stream_window * self._seq_len + 1)
        except BaseException:
            self._stop()
            raise
        self._reader_at, self._reader_block = after, number + 1
        writer = ShardWriter(
            self._folder.path,
            f"block-{number:08d}",
            vocab_size=reader.stored.vocab_size,
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            sync=False,  # a block is checked in full when it is opened, and made again if it is damaged
        )
        try:
            for document in documents:
                writer.append([document])
            shard = writer.close()
        except BaseException:
            writer.discard()
            raise
        return _Record(number, cursor, after, reader.touched, shard, reader.counted)

    def _reader_from(self, number: int, cursor: StreamCursor | None) -> StreamReader:
        """The reader that made the block before, if it stands there; else a new one."""
        if self._reader is None or self._reader_at != cursor:
            self._stop()
            before = [record for record in self._records() if record.block == number - 1 and record.next == cursor]
            counted = before[0].counted if before else None
            self._reader = StreamReader(
                self._source, self._config, self._tokenizer, cursor, self._bad, self._chats, counted
            )
        return self._reader

    def close(self) -> None:
        """Stop the threads that tokenize, after a block that another thread is making."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = self._reader_at = None

    def _known(self, number: int) -> dict[int, StreamCursor | None]:
        """Where blocks up to ``number`` begin, as far as it is known and their files are unchanged."""
        known: dict[int, StreamCursor | None] = {0: None}
        records = [*([] if self._last is None else [self._last]), *self._records()]
        if before := [record for record in records if record.block < number]:
            stamps = stamps_of(self._files)
            known |= {record.block + 1: record.next for record in before if self._is_current(record, stamps)}
        return known | {block: cursor for block, cursor in self._given.items() if block <= number}

    def _on_disk(self, number: int) -> ShardedTokens | None:
        record = next((record for record in self._records() if record.block == number), None)
        if record is None or not self._is_current(record, stamps_of(self._files)):
            return None
        if record.begins != self._given.get(number, record.begins):
            return None
        try:
            found = self._opened(record.shard)
        except ValueError:  # removed, or cut by a full disk: it is made again
            return None
        self._last = record
        return found

    def _opened(self, shard: ShardInfo) -> ShardedTokens:
        return ShardedTokens(
            [self._folder.path],
            [shard],
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            fingerprint=shard.tokens_sha256,
            verify="full",
            vocab_size=self._tokenizer.vocab_size * (1 if self._chats is None else 2),
            not_learned_from=None if self._chats is None else self._tokenizer.vocab_size,
        )

    def _is_current(self, record: _Record, stamps: list[Stamp]) -> bool:
        """Whether the files it was read from, and those before them, are unchanged, by the stamps of all files."""
        if not set(record.files) <= set(stamps):
            return False
        began = 0 if record.begins is None else record.begins.epoch
        if record.next.epoch > began and stamps[-1] not in record.files:  # a file was added behind those of that pass
            return False
        try:
            record.next.file_number(stamps, self._source.name)
        except ValueError:
            return False
        return True

    def _forget_outdated(self) -> None:
        """Drop the first block whose files have changed, and those behind it, which may begin elsewhere now."""
        records = sorted(self._records(), key=lambda record: record.block)
        if not records:
            return
        stamps = stamps_of(self._files)
        current = list(takewhile(lambda record: self._is_current(record, stamps), records))
        if len(current) < len(records):
            self._folder.write(current, sync=False)

    def _records(self) -> list[_Record]:
        return self._folder.read_or_restart() or []

    def _remove_before(self, number: int) -> None:
        for path in self._folder.path.glob("block-*.*"):
            if int(path.stem.split("-")[1]) < number:
                path.unlink(missing_ok=True)
