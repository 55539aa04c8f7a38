r"""Read Megatron-LM's `.bin`/`.idx` pairs, so that a corpus tokenized for it needs no second copy.

Index layout: magic ``MMIDIDX\0\0``, u64 version 1, u8 dtype code, u64 number of sequences, u64 number of document
entries, i32 length of each sequence, i64 byte offset of each, i64 document entries (numbers of the first sequence of
each document, and the total at the end). Sequences must lie in the order they are listed, without gaps, as its
preprocessing writes them.

Everything that the index says is checked before a token is read: a wrong length or entry would train on tokens of other
documents without a word.
"""

import hashlib
import struct
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_train.config.data import Verify
from titan_train.data.shards.mapped import FileMap
from titan_train.files import open_file

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
# Megatron's codes; signed bytes and shorts hold no vocabulary, and floats no ids.
_DTYPES = {1: "<u1", 4: "<i4", 5: "<i8", 8: "<u2"}
_OTHER_DTYPES = {2: "int8", 3: "int16", 6: "float64", 7: "float32"}
_SAMPLES, _SAMPLE_TOKENS = 64, 4096
# Tokens that a full check reads at a time, and entries of the index that any check does.
_SCANNED, _CHECKED = 2**22, 2**16
_AGAIN = "Copy the pair again, or write it again with Megatron's preprocessing."

_Integers = npt.NDArray[np.int64]


class MegatronTokens:
    """One `.bin`/`.idx` pair as a token source.

    Args:
        prefix: Path without suffix; with `.bin` or `.idx` it is taken off.
        vocab_size: Ids must be below it.
        verify: How many ids are compared with it: 64 pieces of the file (header, sample), or every one (full).

    Raises:
        ValueError: If a file is missing, cut, of another format, or holds ids outside the vocabulary. The message names
            the file and the place in it.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, verify: Verify = "sample") -> None:
        prefix = Path(prefix)
        if prefix.suffix in (".bin", ".idx"):
            prefix = prefix.with_suffix("")
        self.path = prefix.with_name(prefix.name + ".bin")
        index = prefix.with_name(prefix.name + ".idx")
        for path in (self.path, index):
            if not path.is_file():
                raise ValueError(
                    f"{path} is missing: a Megatron data set is a .bin and an .idx file with the same name."
                )
        dtype, sequences, entries = _read_head(index)
        self._offsets_at = _HEAD.size + sequences * 4
        self._documents_at = self._offsets_at + sequences * 8
        self._index, self._dtype = FileMap(index, self._documents_at + entries * 8), dtype
        lengths = self._index.view("<i4", sequences, _HEAD.size)
        offsets, documents = self._offsets_and_documents()
        self.num_tokens = _check_sequences(index, lengths, offsets, dtype.itemsize)
        _check_documents(index, documents, sequences, self._documents_at)
        self._num_documents = bisect_left(documents, sequences)  # those before the end of all sequences
        size, expected = self.path.stat().st_size, self.num_tokens * dtype.itemsize
        if size != expected:
            what = "it was cut" if size < expected else "it has more, or the index is of another file"
            raise ValueError(
                f"{self.path} has {size} bytes, but {index} lists {self.num_tokens} tokens of {dtype.itemsize} bytes, which is "
                f"{expected}: {what}. {_AGAIN}"
            )
        self._file = FileMap(self.path, size)
        if verify == "full":
            for start in range(0, self.num_tokens, _SCANNED):
                self._check_ids(start, self._tokens[start : start + _SCANNED], vocab_size)
        found = hashlib.sha256(self._index.content.data)
        found.update(self._sampled(vocab_size))
        self.fingerprint = found.hexdigest()

    def window(self, start: int, n: int) -> npt.NDArray[Any]:
        return self._tokens[start : start + n]

    def document_starts(self, start: int, n: int) -> npt.NDArray[np.int64]:
        # The index is searched where it lies: of a billion documents, a copy would take 8 GB in each rank.
        offsets, documents = self._offsets_and_documents()
        width = self._dtype.itemsize

        def first_from(token: int, low: int) -> int:
            return bisect_left(documents, token * width, low, self._num_documents, key=offsets.item)

        low = first_from(start + 1, 0)
        high = first_from(start + n, low)
        # A document may be several sequences, or none: then the next one begins where it does.
        return np.unique(offsets[documents[low:high]] // width - start)

    @property
    def _tokens(self) -> npt.NDArray[Any]:
        return self._file.view(self._dtype, self.num_tokens, 0)

    def _offsets_and_documents(self) -> tuple[_Integers, _Integers]:
        """Byte offset of each sequence, and the document entries, as views of the index."""
        content = self._index.content
        return content[self._offsets_at : self._documents_at].view("<i8"), content[self._documents_at :].view("<i8")

    def _sampled(self, vocab_size: int) -> bytes:
        """64 pieces of 4096 tokens, spread evenly: enough to tell datasets apart, and to see a wrong tokenizer."""
        starts = np.linspace(0, max(0, self.num_tokens - _SAMPLE_TOKENS), _SAMPLES).astype(np.int64).tolist()
        pieces = [self._tokens[start : start + _SAMPLE_TOKENS] for start in starts]
        for start, piece in zip(starts, pieces, strict=True):
            self._check_ids(start, piece, vocab_size)
        return b"".join(piece.tobytes() for piece in pieces)

    def _check_ids(self, start: int, ids: npt.NDArray[Any], vocab_size: int) -> None:
        if int(ids.min()) >= 0 and int(ids.max()) < vocab_size:
            return
        at = start + int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise ValueError(
            f"{self.path} holds token id {int(self._tokens[at])} at token {at} (byte {at * self._tokens.itemsize}), but the "
            f"tokenizer has {vocab_size} ids. Use the tokenizer that the data set was made with."
        )


def _read_head(path: Path) -> tuple[np.dtype[Any], int, int]:
    """The type of the tokens, and how many sequences and document entries the index lists."""
    with open_file(path) as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or head[:9] != _MAGIC:
        raise ValueError(
            f"{path} is not a Megatron index: it does not begin with MMIDIDX and a header of {_HEAD.size} bytes. {_AGAIN}"
        )
    _, version, code, sequences, entries = _HEAD.unpack(head)
    if version != 1:
        raise ValueError(f"{path} has format version {version} (byte 9); only version 1 exists. {_AGAIN}")
    if code not in _DTYPES:
        raise ValueError(
            f"{path} has dtype code {code} ({_OTHER_DTYPES.get(code, 'unknown')}, byte 17); tokens of code 1 (uint8), 4 "
            "(int32), 5 (int64) or 8 (uint16) are supported. Write the data set again as one of them."
        )
    size, expected = path.stat().st_size, _HEAD.size + sequences * 12 + entries * 8
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes, but its header lists {sequences} sequences and {entries} document entries, "
            f"which is {expected}. {_AGAIN}"
        )
    if not sequences or not entries:
        raise ValueError(f"{path} lists {sequences} sequences and {entries} document entries: the data set is empty.")
    return np.dtype(_DTYPES[code]), sequences, entries


def _check_sequences(path: Path, lengths: npt.NDArray[np.int32], offsets: _Integers, width: int) -> int:
    """Check the lengths and byte offsets of all sequences. Returns their tokens."""
    total = 0
    offsets_at = _HEAD.size + lengths.nbytes
    for first in range(0, lengths.size, _CHECKED):
        length, offset = lengths[first : first + _CHECKED], offsets[first : first + _CHECKED]
        ends = total + np.cumsum(length, dtype=np.int64)
        _refuse(path, "the length of sequence", length, length < 0, first, _HEAD.size, "must not be negative")
        _refuse(
            path, "the offset of sequence", offset, offset != (ends - length) * width, first, offsets_at,
            "must follow from the lengths before it, in order and without gaps",
        )  # fmt: skip
        total = int(ends[-1])
    if not total:
        raise ValueError(f"{path} lists {lengths.size} sequences without a token: the data set is empty.")
    return total


def _check_documents(path: Path, documents: _Integers, sequences: int, at: int) -> None:
    what, before = "document entry", 0
    for first in range(0, documents.size, _CHECKED):
        entry = documents[first : first + _CHECKED]
        outside = (entry < 0) | (entry > sequences)
        _refuse(path, what, entry, outside, first, at, f"must be in [0, {sequences}]")
        falling = np.diff(entry, prepend=before) < 0
        _refuse(path, what, entry, falling, first, at, "must not be less than the entry before it")
        before = int(entry[-1])
    for first, right in ((0, 0), (documents.size - 1, sequences)):
        entry = documents[first : first + 1]
        rule = f"must be 0 for the first document and {sequences} at the end"
        _refuse(path, what, entry, entry != right, first, at, rule)


def _refuse(
    path: Path, what: str, values: npt.NDArray[Any], wrong: npt.NDArray[Any], first: int, at: int, rule: str
) -> None:
    """Raise for the first value that is wrong, with its place in the file; ``values`` begin with number ``first``."""
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"{path}: {what} {first + i} is {int(values[i])} (byte {at + (first + i) * values.itemsize}); it {rule}. {_AGAIN}"
        )
