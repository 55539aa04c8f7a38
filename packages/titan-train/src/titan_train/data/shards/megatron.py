r"""Read Megatron-LM's `.bin`/`.idx` pairs, so that a corpus tokenized for it needs no second copy.

Index layout: magic ``MMIDIDX\0\0``, u64 version 1, u8 dtype code, u64 number of sequences, u64 number of document
entries, i32 length of each sequence, i64 byte offset of each, i64 document entries (numbers of the first sequence of
each document, and the total at the end). Sequences must lie in the order they are listed, without gaps, as its
preprocessing writes them.
"""

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
# Code 4 is i32 and 8 is u16; the other codes (i8, i64, floats) hold no usable token ids or waste space.
_DTYPES = {1: "<u1", 4: "<i4", 5: "<i8", 8: "<u2"}


class MegatronTokens:
    """One `.bin`/`.idx` pair as a token source.

    Args:
        prefix: Path without suffix; with `.bin` or `.idx` it is taken off.
        vocab_size: Ids must be below it; checked on 64 places of the file.

    Raises:
        ValueError: If a file is missing, cut, of another format, or holds ids outside the vocabulary.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
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
        content = index.read_bytes()
        lengths, offsets, documents, dtype = _parse_index(index, content)
        self._tokens: npt.NDArray[Any] = np.fromfile(self.path, dtype=dtype, count=0)
        size = self.path.stat().st_size
        ends = np.cumsum(lengths, dtype=np.int64)
        expected = int(ends[-1]) * dtype.itemsize if ends.size else 0
        if size != expected or not np.array_equal(offsets, (ends - lengths) * dtype.itemsize):
            raise ValueError(
                f"{self.path} has {size} bytes and its index lists {expected}, in order and without gaps: it was cut, "
                "or sequences were moved. Write it again with Megatron's preprocessing."
            )
        if size:
            self._tokens = np.memmap(self.path, dtype=dtype, mode="r").view(np.ndarray)
        # A document may be several sequences; entry i is the first sequence of document i.
        self._ends = ends[documents[1:] - 1] if documents.size > 1 else ends
        self.num_tokens = expected // dtype.itemsize
        self.fingerprint = hashlib.sha256(content + self._sampled(vocab_size)).hexdigest()

    def window(self, start: int, n: int) -> npt.NDArray[Any]:
        return self._tokens[start : start + n]

    def document_starts(self, start: int, n: int) -> npt.NDArray[np.int64]:
        low, high = np.searchsorted(self._ends, [start + 1, start + n])
        return self._ends[low:high] - start

    def _sampled(self, vocab_size: int) -> bytes:
        """64 pieces of 4096 tokens, spread evenly: enough to tell datasets apart, and to see a wrong tokenizer."""
        starts = np.linspace(0, max(0, self.num_tokens - 4096), 64).astype(np.int64).tolist()
        pieces = [self._tokens[start : start + 4096] for start in starts]
        for piece in pieces:
            if piece.size and not (int(piece.min()) >= 0 and int(piece.max()) < vocab_size):
                raise ValueError(
                    f"{self.path} holds token id {int(piece.max())}, but the tokenizer has {vocab_size} ids. "
                    "Use the tokenizer that the data set was made with."
                )
        return b"".join(piece.tobytes() for piece in pieces)


def _parse_index(
    path: Path, content: bytes
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], np.dtype[Any]]:
    if len(content) < _HEAD.size or content[:9] != _MAGIC:
        raise ValueError(f"{path} is not a Megatron index: it does not begin with MMIDIDX.")
    _, version, code, sequences, entries = _HEAD.unpack_from(content)
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"{path} has version {version} and dtype code {code}; version 1 with u1, i4, i8 or u2 tokens is supported."
        )
    if len(content) != _HEAD.size + sequences * 12 + entries * 8:
        raise ValueError(
            f"{path} has {len(content)} bytes, but its header implies {_HEAD.size + sequences * 12 + entries * 8}."
        )
    lengths = np.frombuffer(content, "<i4", sequences, _HEAD.size)
    offsets = np.frombuffer(content, "<i8", sequences, _HEAD.size + sequences * 4)
    documents = np.frombuffer(content, "<i8", entries, _HEAD.size + sequences * 12)
    return lengths, offsets, documents, np.dtype(_DTYPES[code])
