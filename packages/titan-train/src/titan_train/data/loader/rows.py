"""How the tokens of one source become samples of a fixed length: cut anywhere, or filled with whole documents.

A row is ``seq_len + 1`` tokens: ``seq_len`` inputs and their next tokens.

- `CutRows`: rows follow each other and overlap by one token. No token is padded or dropped, but for less than one row at the
  source's end; documents are cut where a row ends.
- `WholeRows`: a row takes documents in order for as long as the next one fits whole. What is left of the row is padding
  without labels. A document longer than a row fills rows of its own, cut as `CutRows` would; nothing is dropped.
"""

from array import array
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from titan_train.data.shards.token_source import DocumentEnds, TokenSource


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. S is its number of inputs."""

    tokens: npt.NDArray[Any]
    """``[S + 1]``, any integer type; possibly a read-only view of a file."""
    document_starts: npt.NDArray[np.int64]
    """Where documents (and padding) begin inside: places in ``[1, S]``, rising."""
    learned: npt.NDArray[np.bool_] | None = None
    """Which tokens are labels, ``[S + 1]``; None if all are."""
    num_real: int | None = None
    """Tokens before the padding; None if there is none."""


class TokenRows(Protocol):
    """The samples of one source, by number."""

    @property
    def num_rows(self) -> int | None:
        """How many there are before the source repeats; None if that is not known, as of a stream."""
        ...

    def read(self, row: int) -> Row: ...


@runtime_checkable
class StreamedRows(TokenRows, Protocol):
    """The samples of a source that is read as it comes, in an order of its own, without an end."""

    @property
    def fingerprint(self) -> str:
        """Hash (hex) of what decides its samples besides the files, which its state identifies."""
        ...

    def files_hash(self) -> str:
        """Hash (hex) of the names and sizes of its files: one that differs on another machine reads other samples there."""
        ...

    def require(self, samples: int) -> None:
        """Have the first ``samples`` samples at hand, or raise on every rank alike."""
        ...

    def state(self, samples: int) -> Any:
        """What `load_state` needs to continue after ``samples`` samples, as JSON."""
        ...

    def load_state(self, state: Any) -> None:
        """Continue from a state."""
        ...

    def close(self) -> None:
        """Stop its threads."""
        ...


class CutRows:
    """Rows of ``seq_len + 1`` tokens one after the other, overlapping by one."""

    def __init__(self, source: TokenSource, seq_len: int) -> None:
        self._source = source
        self._not_learned_from = not_learned_from(source)
        self._seq_len = seq_len
        self.num_rows: int = (source.num_tokens - 1) // seq_len

    def read(self, row: int) -> Row:
        start, count = row * self._seq_len, self._seq_len + 1
        tokens, learned = read_window(self._source, start, count, self._not_learned_from)
        return Row(tokens, self._source.document_starts(start, count), learned)


class WholeRows:
    """Rows of whole documents, padded at the end.

    Args:
        source: Also knows where all its documents end.
        seq_len: Inputs of a row.
        pad_id: Fills what is left.

    Raises:
        ValueError: If the source cannot say where its documents end.
    """

    def __init__(self, source: TokenSource, seq_len: int, pad_id: int) -> None:
        if not isinstance(source, DocumentEnds):
            raise ValueError(
                f'packing="whole" needs the ends of all documents, which {type(source).__name__} does not give. '
                'Use packing="cut".'
            )
        self._source = source
        self._not_learned_from = not_learned_from(source)
        self._seq_len = seq_len
        self._pad_id = pad_id
        self._bounds = whole_rows(source.document_ends(), seq_len + 1)
        self.num_rows: int = len(self._bounds)

    def read(self, row: int) -> Row:
        start, end = self._bounds[row].tolist()
        count, full = end - start, self._seq_len + 1
        tokens, learned = read_window(self._source, start, count, self._not_learned_from)
        starts = self._source.document_starts(start, count)
        if count == full:
            return Row(tokens, starts, learned)
        padded = np.full(full, self._pad_id, dtype=np.int64)
        padded[:count] = tokens
        labels = np.zeros(full, dtype=bool)
        labels[:count] = True if learned is None else learned
        return Row(padded, np.append(starts, count), labels, count)


def whole_rows(ends: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """First token and end of each row, ``[N, 2]``, for documents that end at ``ends`` (rising, exclusive).

    Args:
        ends: Where documents end.
        capacity: Tokens of a row, 2 or more.
    """
    total = int(ends[-1]) if ends.size else 0
    rows = array("q")  # a list of pairs takes ten times the memory
    start = 0
    while start < total:
        last = int(np.searchsorted(ends, start + capacity, side="right")) - 1
        if last >= 0 and int(ends[last]) > start:
            rows.extend((start, int(ends[last])))
            start = int(ends[last])
        else:  # a document longer than a row: the next part begins with this one's last token, which it has not learned from
            rows.extend((start, start + capacity))
            start += capacity - 1
    return np.asarray(rows, dtype=np.int64).reshape(-1, 2)


def not_learned_from(source: TokenSource) -> int | None:
    """See `DocumentEnds`. Asked once: whether an object has a protocol's methods takes longer than to read a row."""
    return source.not_learned_from if isinstance(source, DocumentEnds) else None


def read_window(
    source: TokenSource, start: int, count: int, boundary: int | None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Tokens of a source and, if it says so (``boundary``), which of them are learned."""
    stored = source.window(start, count)
    if boundary is None:
        return stored, None
    learned = stored < boundary
    return np.where(learned, stored, stored.astype(np.int64) - boundary), learned
