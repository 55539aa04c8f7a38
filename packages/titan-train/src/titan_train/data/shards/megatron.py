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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_train.config.data import Verify
from titan_train.files import read_bytes

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
# Megatron's codes; signed bytes and shorts hold no vocabulary, and floats no ids.
_DTYPES = {1: "<u1", 4: "<i4", 5: "<i8", 8: "<u2"}
_OTHER_DTYPES = {2: "int8", 3: "int16", 6: "float64", 7: "float32"}
_SAMPLES, _SAMPLE_TOKENS = 64, 4096
# Tokens that a full check reads at a time.
_SCANNED = 2**22
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
        content = read_bytes(index)
        dtype, ends, documents = _read_index(index, content)
        size, self.num_tokens = self.path.stat().st_size, int(ends[-1])
        expected = self.num_tokens * dtype.itemsize
        if size != expected:
            what = "it was cut" if size < expected else "it has more, or the index is of another file"
            raise ValueError(
                f"{self.path} has {size} bytes, but {index} lists {self.num_tokens} tokens of {dtype.itemsize} bytes, which is "
                f"{expected}: {what}. {_AGAIN}"
            )
        self._tokens: npt.NDArray[Any] = np.memmap(self.path, dtype=dtype, mode="r").view(np.ndarray)
        # A document may be several sequences, or none; entry i is the first sequence of document i.
        last = documents[1:][np.diff(documents) > 0] - 1
        self._ends = np.unique(ends[last])
        if verify == "full":
            for start in range(0, self.num_tokens, _SCANNED):
                self._check_ids(start, self._tokens[start : start + _SCANNED], vocab_size)
        self.fingerprint = hashlib.sha256(content + self._sampled(vocab_size)).hexdigest()

    def window(self, start: int, n: int) -> npt.NDArray[Any]:
        return self._tokens[start : start + n]

    def document_starts(self, start: int, n: int) -> npt.NDArray[np.int64]:
        low, high = np.searchsorted(self._ends, [start + 1, start + n])
        return self._ends[low:high] - start

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


def _read_index(path: Path, content: bytes) -> tuple[np.dtype[Any], _Integers, _Integers]:
    """The type of the tokens, the end of each sequence in tokens, and the document entries."""
    if len(content) < _HEAD.size or content[:9] != _MAGIC:
        raise ValueError(
            f"{path} is not a Megatron index: it does not begin with MMIDIDX and a header of {_HEAD.size} bytes. {_AGAIN}"
        )
    _, version, code, sequences, entries = _HEAD.unpack_from(content)
    if version != 1:
        raise ValueError(f"{path} has format version {version} (byte 9); only version 1 exists. {_AGAIN}")
    if code not in _DTYPES:
        raise ValueError(
            f"{path} has dtype code {code} ({_OTHER_DTYPES.get(code, 'unknown')}, byte 17); tokens of code 1 (uint8), 4 "
            "(int32), 5 (int64) or 8 (uint16) are supported. Write the data set again as one of them."
        )
    expected = _HEAD.size + sequences * 12 + entries * 8
    if len(content) != expected:
        raise ValueError(
            f"{path} has {len(content)} bytes, but its header lists {sequences} sequences and {entries} document entries, "
            f"which is {expected}. {_AGAIN}"
        )
    if not sequences or not entries:
        raise ValueError(f"{path} lists {sequences} sequences and {entries} document entries: the data set is empty.")
    dtype = np.dtype(_DTYPES[code])
    offsets_at = _HEAD.size + sequences * 4
    lengths = np.frombuffer(content, "<i4", sequences, _HEAD.size)
    offsets = np.frombuffer(content, "<i8", sequences, offsets_at)
    documents = np.frombuffer(content, "<i8", entries, offsets_at + sequences * 8)
    _refuse(path, "the length of sequence", lengths, lengths < 0, _HEAD.size, "must not be negative")
    ends = np.cumsum(lengths, dtype=np.int64)
    if not ends[-1]:
        raise ValueError(f"{path} lists {sequences} sequences without a token: the data set is empty.")
    _refuse(
        path, "the offset of sequence", offsets, offsets != (ends - lengths) * dtype.itemsize, offsets_at,
        "must follow from the lengths before it, in order and without gaps",
    )  # fmt: skip
    _check_documents(path, documents, sequences, offsets_at + sequences * 8)
    return dtype, ends, documents


def _check_documents(path: Path, documents: _Integers, sequences: int, at: int) -> None:
    what = "document entry"
    _refuse(path, what, documents, (documents < 0) | (documents > sequences), at, f"must be in [0, {sequences}]")
    falling = np.zeros(documents.size, dtype=bool)
    falling[1:] = documents[1:] < documents[:-1]
    _refuse(path, what, documents, falling, at, "must not be less than the entry before it")
    ends = np.zeros(documents.size, dtype=bool)
    ends[0], ends[-1] = documents[0] != 0, documents[-1] != sequences
    _refuse(path, what, documents, ends, at, f"must be 0 for the first document and {sequences} at the end")


def _refuse(path: Path, what: str, values: npt.NDArray[Any], wrong: npt.NDArray[Any], at: int, rule: str) -> None:
    """Raise for the first value that is wrong, with its place in the file."""
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"{path}: {what} {i} is {int(values[i])} (byte {at + i * values.itemsize}); it {rule}. {_AGAIN}"
        )
