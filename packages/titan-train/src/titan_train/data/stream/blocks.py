"""Blocks of a stream on disk: each made once, by whichever process comes first, and removed when it lies well behind.

    blocks.json                        the last blocks: where each begins, where the next one begins, the files it was read from
    block-00000012-1f0c9b7e.tok/.idx   its tokens, as any shard; named after where it begins and the files it was read from

A block whose files have changed since, or whose shard is gone or damaged, is made again from where it begins, as are the blocks
behind a changed one; a checkpoint knows that place too. If the place of a block is not known, the blocks before it are made until
it is.

The folder is locked to make a block, not to open one: its files and the list appear whole, and no other content has their names.
Of all files, the disk is asked when a stream opens or resumes and when a block is made; of those that a block was read from, also
when it is opened.
"""

import threading
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from titan_train.config import DataConfig, SourceConfig
from titan_train.config.data import Verify
from titan_train.data.prepared import PreparedFolder, content_key
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
        self._read: dict[int, _Record] = {}  # blocks made or opened last: other runs may push them out of the record
        self._stamps = stamps_of(self._files)  # as the disk was last asked
        self._found: set[str] = set()  # shards that are older: a machine that lost power may have damaged them
        self.step_blocks = 1
        """Blocks that a step reads."""
        self._bad = self._folder.bad_documents(source.name, config, streamed=True)
        self._forget_outdated()

    def open(self, number: int) -> ShardedTokens:
        """A block, made if it is not there. Waits while another process makes one.

        Raises:
            ValueError: As `StreamReader.take`.
        """
        if (found := self._on_disk(number)) is not None:
            return found
        with self._lock, self._folder.one_process():
            found = self._on_disk(number)  # another process may have made it meanwhile
            return found if found is not None else self._make(number)

    def cursor(self, number: int) -> tuple[int, StreamCursor | None]:
        """The last block up to ``number`` whose beginning is known, and that place; None is the first document."""
        if (record := self._read.get(number)) is not None:
            return number, record.begins
        if (record := self._read.get(number - 1)) is not None:
            return number, record.next
        return self._last_known(number)

    def stands_at(self, number: int) -> bool:
        """Whether this process made the block before ``number``, so that it can continue without reading anything again."""
        return self._reader is not None and self._reader_block == number

    def files(self, number: int) -> list[list[Any]]:
        """Name and size of each file that a block was read from; those that a checkpoint gave if the block is not on record."""
        record = self._read.get(number) or self._recorded(number)
        return self._given_files if record is None else [[name, size] for name, size, _ in record.files]

    def files_hash(self) -> str:
        """Hash (hex) of the names and sizes of all files."""
        return hash_of(self._stamps)

    def give(self, number: int, cursor: StreamCursor | None, files: list[list[Any]]) -> None:
        """Set where a block begins, as a checkpoint states it, unless it is at the first document.

        Args:
            number: The block.
            cursor: Where it begins; None is the first document.
            files: What `files` gave for the last block that was read.

        Raises:
            ValueError: If the files are not those that it was read from.
        """
        self._stamps = stamps = stamps_of(self._files)
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
        self._given_files, self._read = files, {}
        if cursor is not None:
            self._given[number] = cursor

    def _make(self, number: int) -> ShardedTokens:
        first, cursor = self._last_known(number)
        records = {record.block: record for record in self._records()}
        try:
            for block in range(first, number + 1):
                made = self._make_one(block, cursor)
                cursor = made.next
                records.pop(block, None)
                records[block] = made
                self._remember(made)
        finally:
            self._folder.write([*records.values()][-self._num_records :], sync=False)
        self._remove_before(number - max(_KEPT_BLOCKS, _KEPT_STEPS * self.step_blocks))
        return self._opened(records[number].shard, "full")

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
            f"block-{number:08d}-{content_key([None if cursor is None else asdict(cursor), reader.touched])[:8]}",
            vocab_size=reader.stored.vocab_size,
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            sync=False,  # a block is checked in full when a later process finds it, and made again if it is damaged
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

    @property
    def _num_records(self) -> int:
        return max(_KEPT_RECORDS, _RECORDED_STEPS * self.step_blocks)

    def _remember(self, record: _Record) -> None:
        # Replaced as a whole: several threads read it. Of two that add at once, one may be lost, and is then read from the disk.
        others = [other for other in self._read.items() if other[0] != record.block]
        self._read = dict([*others, (record.block, record)][-self._num_records :])

    def _last_known(self, number: int) -> tuple[int, StreamCursor | None]:
        """As `cursor`, where the files are unchanged."""
        given = max((block for block in self._given if block <= number), default=0)
        before = [r for r in (*self._records(), *self._read.values()) if given <= r.block < number]
        if before:
            self._stamps = stamps_of(self._files)
        for record in sorted(before, key=lambda record: record.block, reverse=True):
            if self._is_current(record, self._stamps):
                return record.block + 1, record.next
        return given, self._given.get(given)

    def _on_disk(self, number: int) -> ShardedTokens | None:
        record = self._recorded(number)
        if record is None or record.begins != self._given.get(number, record.begins):
            return None
        names = {name for name, *_ in record.files}
        asked = zip(self._files, self._stamps, strict=True)
        if not self._is_current(record, [file.stamp() if file.name in names else stamp for file, stamp in asked]):
            return None
        try:
            found = self._opened(record.shard, "full" if record.shard.name in self._found else "header")
        except (ValueError, FileNotFoundError):  # removed, or cut by a full disk: it is made again
            return None
        self._remember(record)
        return found

    def _opened(self, shard: ShardInfo, verify: Verify) -> ShardedTokens:
        return ShardedTokens(
            [self._folder.path],
            [shard],
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            fingerprint=shard.tokens_sha256,
            verify=verify,
            vocab_size=self._tokenizer.vocab_size * (1 if self._chats is None else 2),
            not_learned_from=None if self._chats is None else self._tokenizer.vocab_size,
            keep=True,  # it may be removed while it is read
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
        records = self._records()
        current = self._current(records)
        if len(current) < len(records):
            with self._folder.one_process():  # another process may have done it meanwhile, and made other blocks
                current = self._current(self._records())
                self._folder.write(current, sync=False)
        self._found = {record.shard.name for record in current}

    def _current(self, records: list[_Record]) -> list[_Record]:
        in_order = sorted(records, key=lambda record: record.block)
        return list(takewhile(lambda record: self._is_current(record, self._stamps), in_order))

    def _recorded(self, number: int) -> _Record | None:
        return next((record for record in self._records() if record.block == number), None)

    def _records(self) -> list[_Record]:
        return self._folder.read_or_restart() or []

    def _remove_before(self, number: int) -> None:
        for path in self._folder.path.glob("block-*.*"):
            if int(path.stem.split("-")[1]) < number:
                path.unlink(missing_ok=True)
