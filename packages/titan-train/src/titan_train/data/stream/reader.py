"""Documents of a stream from a cursor on, tokenized ahead by threads, and the runs of tokens they give.

A cursor is where a block of the stream begins. It also identifies the files before it: they must be those that were read.
"""

import hashlib
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from titan_train.config import DataConfig, SourceConfig
from titan_train.data.sources.chat import Conversations
from titan_train.data.sources.document import CorpusFile, Document
from titan_train.data.sources.documents import list_files, read_documents
from titan_train.data.sources.encoding import DocumentTokens, encode_in_order
from titan_train.data.sources.files import FileReader
from titan_train.data.sources.malformed import BadDocument, BadDocuments
from titan_train.tokenizers import Tokenizer

Tokens = npt.NDArray[np.int32]
Count = Annotated[int, Field(ge=0)]
Stamp = tuple[str, int, int]
"""Of a file, `CorpusFile.stamp`."""


@dataclass(frozen=True, slots=True)
class StreamCursor:
    """A place in a stream."""

    epoch: Count
    """How many times all files were read before."""
    file: str
    """Name of the file, as `CorpusFile.name`."""
    line: Count
    """Line or row of the document, from 1."""
    byte: Count
    """Where that line begins, in the decompressed file; 0 in a table."""
    skip: Count
    """Tokens of that document that were taken before."""
    before: str
    """Hash (hex) of the names and sizes of the files before this one."""
    earlier: tuple[Count, str] | None = None
    """How many files the pass before read, and the hash of their names and sizes; None in the first pass, and in cursors of
    earlier releases."""

    def check_earlier(self, stamps: Sequence[Stamp], source: str) -> None:
        """Refuse other files than the pass before read, given the stamps of all.

        Raises:
            ValueError: One was added between them, removed or changed its size.
        """
        if self.earlier is not None and hash_of(stamps[: self.earlier[0]]) != self.earlier[1]:
            raise ValueError(
                f"the stream of source {source!r} has read {self.earlier[0]} files in the pass before, and one of them has "
                "another size now, is gone, or has a new one before it: other samples would come. Restore the files (new ones "
                "may come last), or allow it: checkpoint.allow_data_change=true."
            )

    def file_number(self, stamps: Sequence[Stamp], source: str) -> int:
        """Which of the stream's files it lies in, given the stamps of all.

        Raises:
            ValueError: If that file, or one before it, is not the one that was read.
        """
        numbers = [number for number, (name, *_) in enumerate(stamps) if name == self.file]  # folders may share names
        if not numbers:
            raise ValueError(
                f"the stream of source {source!r} was at {self.file!r}, line {self.line}, which is no longer among its "
                f"{len(stamps)} files. Restore the file, or allow it: checkpoint.allow_data_change=true."
            )
        for number in numbers:
            if hash_of(stamps[:number]) == self.before:
                return number
        raise ValueError(
            f"the stream of source {source!r} was at {self.file!r}, line {self.line}, but a file before it in the order of "
            "names was added, removed or changed its size: other samples would come. Restore the files (new ones may "
            "come last), or allow it: checkpoint.allow_data_change=true."
        )


_ADAPTER = TypeAdapter(StreamCursor)


def cursor_from_json(content: Any) -> StreamCursor:
    """Read a cursor from the JSON object of its fields.

    Raises:
        ValueError: If it is not one.
    """
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as err:
        raise ValueError(f"{content!r} is not a place in a stream.") from err


def stamps_of(files: Sequence[CorpusFile]) -> list[Stamp]:
    """What the disk says of each file now: a question for each, which a network disk may take long to answer."""
    return [file.stamp() for file in files]


def hash_of(stamps: Sequence[Stamp]) -> str:
    """Hash (hex) of names and sizes."""
    return hashlib.sha256(json.dumps([stamp[:2] for stamp in stamps]).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Documents that a pass has read before a place."""

    seen: int
    bad: dict[str, int]
    """Malformed ones, by class."""
    whole: bool
    """Whether they are counted from the beginning of the pass."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The documents that follow come from here."""

    epoch: int
    file: int


class _PassEnd:
    """All files were read once more."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong behind the documents before it. Raised in its turn, not when it is met ahead of time."""

    error: Exception


_Item = _Place | Document | BadDocument | _PassEnd | _Failure


class StreamReader:
    """Tokens from a cursor on. One thread may use it.

    Memory is bounded: `encode_in_order` holds a few megabytes of text for each thread.

    Args:
        source: A source of text.
        config: Threads and what malformed documents do.
        tokenizer: Makes the tokens.
        start: Where to begin; None begins at the first document.
        bad: Counts malformed documents.
        chats: Writes the conversations of a source of chats.
        counted: What the pass has read before ``start``; None if that is not known.

    Raises:
        ValueError: If the cursor does not belong to the files.
    """

    def __init__(
        self,
        source: SourceConfig,
        config: DataConfig,
        tokenizer: Tokenizer,
        start: StreamCursor | None,
        bad: BadDocuments,
        chats: Conversations | None = None,
        counted: PassCounts | None = None,
    ) -> None:
        self._source, self._chats = source, chats
        self._files = list_files(source)
        self._bad = bad
        counted = counted or PassCounts(0, {}, start is None)
        bad.begin_pass(counted.seen, counted.bad)
        self._whole_pass = counted.whole  # a share of what follows a resume is not that of the source
        first = _Place(0, 0)
        if start is not None:
            first = _Place(start.epoch, start.file_number(stamps_of(self._files), source.name))
        self._line, self._byte = (1, 0) if start is None else (start.line, start.byte)
        self._skip = 0 if start is None else start.skip
        self.stored = DocumentTokens(config, tokenizer, chats)
        self._place = first
        self._items = encode_in_order(self._in_turn(first), tokenizer, config.num_threads)
        self._held: tuple[int, int, Tokens] | None = None  # the document in progress: its line, byte and tokens
        self._used = 0  # tokens of it that were given
        # the pass, and what its cursors say of the one before
        self._earlier = (first.epoch, None if start is None else start.earlier)
        self.touched: list[Stamp] = []
        """Stamps of the files that the last `take` read from."""

    def take(self, count: int) -> tuple[list[Tokens], StreamCursor]:
        """The next ``count`` tokens as documents, and the cursor of the last of them, where the next block begins.

        The last token is given again as the first of the next call.

        Raises:
            ValueError: If a pass gives no document, or more passes are needed than the source allows; and as
                `MalformedInputError`.
        """
        parts: list[Tokens] = []
        self.touched = []
        while True:
            line, byte, tokens = self._document()
            self._touch()
            part = tokens[self._used : self._used + count]
            parts.append(part)
            self._used += part.size
            count -= part.size
            if not count:
                self._used -= 1
                return parts, self._cursor(line, byte)
            if self._used == tokens.size:
                self._held, self._used = None, 0

    def take_rows(self, rows: int, capacity: int) -> tuple[list[Tokens], StreamCursor]:
        """The documents that fill the next ``rows`` rows, and the cursor of the first one that does not fit.

        Rows are those of `titan_train.data.loader.rows.whole_rows`: a document that does not fit into the rest of a row begins
        the next one, and one longer than ``capacity`` tokens fills rows of its own, which overlap by a token.

        Raises:
            ValueError: As `take`.
        """
        parts: list[Tokens] = []
        self.touched = []
        room = 0  # of the row that is being filled
        begun: int | None = None  # where this block's part of the document in progress begins
        while True:
            line, byte, tokens = self._document()
            rest = tokens.size - self._used
            if rest > room:
                if not rows:
                    if begun is not None:
                        parts.append(tokens[begun : self._used + 1])
                    return parts, self._cursor(line, byte)
                rows, room = rows - 1, capacity
            begun = self._used if begun is None else begun
            self._touch()
            if rest > room:
                self._used, room = self._used + capacity - 1, 0
                continue
            parts.append(tokens[begun:])
            room -= rest
            self._held, self._used, begun = None, 0, None

    def _touch(self) -> None:
        stamp = self._files[self._place.file].stamp()
        if stamp not in self.touched:
            self.touched.append(stamp)

    def _cursor(self, line: int, byte: int) -> StreamCursor:
        """The place that the document in progress was given up to."""
        place = self._place
        if place.epoch != self._earlier[0]:
            self._earlier = place.epoch, (len(self._files), hash_of(stamps_of(self._files)))
        return StreamCursor(
            epoch=place.epoch,
            file=self._files[place.file].name,
            line=line,
            byte=byte,
            skip=self._used,
            before=hash_of(stamps_of(self._files[: place.file])),
            earlier=self._earlier[1],
        )

    @property
    def counted(self) -> PassCounts:
        """What the pass has read before the document in progress, which a reader that begins here reads again."""
        return PassCounts(self._bad.seen - 1, dict(self._bad.counts), self._whole_pass)

    def close(self) -> None:
        if isinstance(self._items, Generator):
            self._items.close()

    def _document(self) -> tuple[int, int, Tokens]:
        """The line, byte and tokens of the document in progress, or of the next one."""
        while self._held is None:
            item, ids = next(self._items)
            if isinstance(item, Document):
                assert ids is not None
                self._bad.add_good()
                self._held = item.line, item.byte, np.concatenate(self.stored.of(ids))
                self._used, self._skip = self._skip, 0
            elif isinstance(item, BadDocument):
                self._bad.add(item)
            elif isinstance(item, _Place):
                self._place = item
            elif isinstance(item, _PassEnd):
                self._touch()  # the last file, though it may hold nothing: one added behind it comes before the next pass
                if self._whole_pass:
                    self._bad.check_share()
                self._bad.begin_pass()
                self._whole_pass = True
            else:
                raise item.error
        line, _, tokens = self._held
        if self._used >= tokens.size:
            raise ValueError(
                f"{self._files[self._place.file].path}, line {line} gives {tokens.size} tokens, but {self._used} of it were "
                "read before: the file was changed. Restore it, or start a new run."
            )
        return self._held

    def _in_turn(self, first: _Place) -> Iterator[_Item]:
        try:
            yield from self._read(first)
        except Exception as error:
            yield _Failure(error)

    def _read(self, first: _Place) -> Iterator[_Item]:
        """Every item of every pass."""
        epoch, start, limit = first.epoch, first.file, self._source.max_epochs
        line, byte = self._line, self._byte
        while True:
            if limit and epoch >= limit:
                raise ValueError(
                    f"source {self._source.name!r} has been read {limit} times, the limit set by "
                    f"data.sources[{self._source.name!r}].max_epochs={limit}, but the run needs more. It reads blocks of "
                    f"stream_window={self._source.stream_window} samples as a whole: train fewer steps, lower its weight, or "
                    "raise max_epochs (0: no limit); a new run may also set a smaller stream_window."
                )
            found = 0
            for number in range(start, len(self._files)):
                yield _Place(epoch, number)
                file = self._files[number]
                for item in read_documents(
                    file, self._source, FileReader(file.path), line, self._chats, first_byte=byte
                ):
                    found += isinstance(item, Document)
                    yield item
                line, byte = 1, 0
            if not found and not start:
                raise ValueError(
                    f"source {self._source.name!r}: none of its {len(self._files)} files holds a document, so the stream would "
                    "never end. Check data.sources.paths and text_key."
                )
            yield _PassEnd()
            epoch, start = epoch + 1, 0


def stream_windows(
    source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, *, seq_len: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Windows of ``seq_len + 1`` tokens, overlapping by one, of one text source: one pass, nothing kept on disk.

    For looking at a corpus; there is no shuffle, mixture or resume.

    Args:
        source: stdlib, text or jsonl.
        config: Its malformed-input policy and number of threads are used.
        tokenizer: Makes the tokens; its end-of-sequence id ends every document.
        seq_len: Tokens of a sample.

    Yields:
        int64 ``[seq_len + 1]``; what is left at the end, less than a window, is not given.

    Raises:
        MalformedInputError: As the policy says.
    """
    bad = BadDocuments(
        source.name, on_error=config.on_error, max_fraction=config.max_bad_fraction, max_count=config.max_bad
    )
    stored = DocumentTokens(config, tokenizer, None)
    documents = (item for file in list_files(source) for item in read_documents(file, source, FileReader(file.path)))
    held = np.empty(0, dtype=np.int32)
    for item, ids in encode_in_order(documents, tokenizer, config.num_threads):
        if ids is None:
            assert isinstance(item, BadDocument)
            bad.add(item)
            continue
        bad.add_good()
        held = np.concatenate([held, *stored.of(ids)])
        while held.size > seq_len:
            yield held[: seq_len + 1].astype(np.int64)
            held = held[seq_len:]
    bad.check_share()
