"""Token shards on disk: the format, one writer, one reader.

    NAME.tok   64-byte header, then the tokens: u16 if the vocabulary has at most 65536 ids, else u32; little-endian
    NAME.idx   64-byte header, document ends (u64 token offsets, rising, the last = number of tokens),
               crc32 (u32) of every 4 MiB of the token bytes, crc32 of all that

Header: magic, u16 version, u8 bytes per token, u64 tokens, u64 documents, 16 bytes of the tokenizer's fingerprint,
crc32 of the header. A shard is written under a temporary name, synced and renamed: a file with its final name is whole.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_train.data.shards.mapped import FileMap
from titan_train.files import open_file, write_atomic

BLOCK_BYTES = 4 * 2**20

_VERSION = 1
_HEADER = struct.Struct("<8sHBxIQQ16s12xI")
_TOKENS_MAGIC = b"TITANTOK"
_INDEX_MAGIC = b"TITANIDX"


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a manifest says of one shard."""

    name: str
    """File name without `.tok` and `.idx`."""
    tokens: int
    documents: int
    tokens_sha256: str
    """sha256 (hex) of the token bytes, header excluded."""
    index_sha256: str
    """sha256 (hex) of the document ends."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The stored type of ids below ``vocab_size``."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class ShardWriter:
    """Write one shard, document by document.

    Args:
        folder: Where the shard goes; must exist.
        name: Its file name without suffix.
        vocab_size: Bounds the ids and sets their width.
        tokenizer_fingerprint: Hex; its first 16 bytes go into the header.
        sync: Whether the files are on disk when `close` returns, not only with the operating system.
    """

    def __init__(
        self, folder: Path, name: str, *, vocab_size: int, tokenizer_fingerprint: str, sync: bool = True
    ) -> None:
        self.name = name
        self.tokens = 0
        self._sync = sync
        self._folder = folder
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._tokenizer = bytes.fromhex(tokenizer_fingerprint)[:16]
        self._ends: list[int] = []
        self._sha = hashlib.sha256()
        self._crcs: list[int] = []
        self._block = bytearray()
        self._path = folder / f".{name}.tok.tmp"
        self._file = self._path.open("wb")
        self._file.write(bytes(_HEADER.size))

    def append(self, document: Sequence[npt.NDArray[np.int32]]) -> None:
        """Add one document, given as parts to be joined."""
        for part in document:
            if part.size and not (int(part.min()) >= 0 and int(part.max()) < self._vocab_size):
                raise ValueError(
                    f"token id {int(part.max())} is outside the vocabulary of {self._vocab_size}: "
                    "the tokenizer's vocab_size and its ids disagree."
                )
            self._block += part.astype(self._dtype).tobytes()
            self.tokens += part.size
        self._ends.append(self.tokens)
        while len(self._block) >= BLOCK_BYTES:
            self._flush(BLOCK_BYTES)

    def close(self) -> ShardInfo:
        """Finish the shard under its final name."""
        if self._block:
            self._flush(len(self._block))
        self._file.seek(0)
        self._file.write(self._header(_TOKENS_MAGIC))
        if self._sync:
            _sync(self._file)
        self._file.close()
        ends = np.asarray(self._ends, dtype="<u8").tobytes()
        body = ends + np.asarray(self._crcs, dtype="<u4").tobytes()
        index = self._header(_INDEX_MAGIC) + body + struct.pack("<I", zlib.crc32(body))
        write_atomic(self._folder / f"{self.name}.idx", index, sync=self._sync)
        self._path.replace(self._folder / f"{self.name}.tok")
        return ShardInfo(
            self.name, self.tokens, len(self._ends), self._sha.hexdigest(), hashlib.sha256(ends).hexdigest()
        )

    def discard(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _flush(self, size: int) -> None:
        with memoryview(self._block)[:size] as block:
            self._file.write(block)
            self._sha.update(block)
            self._crcs.append(zlib.crc32(block))
        del self._block[:size]

    def _header(self, magic: bytes) -> bytes:
        fields = (magic, _VERSION, self._dtype.itemsize, BLOCK_BYTES, self.tokens, len(self._ends), self._tokenizer)
        head = _HEADER.pack(*fields, 0)[:-4]
        return head + struct.pack("<I", zlib.crc32(head))


class TokenShard:
    """One shard, memory mapped.

    Args:
        folder: Where it lies.
        info: What the manifest says of it.
        tokenizer_fingerprint: Hex; must be the one it was written with.
        keep: Whether it is mapped now and stays so, see `FileMap`.

    Raises:
        ValueError: If a file is missing, cut, damaged in its header, or of another tokenizer.
    """

    def __init__(self, folder: Path, info: ShardInfo, tokenizer_fingerprint: str, *, keep: bool = False) -> None:
        self.path = folder / f"{info.name}.tok"
        index_path = folder / f"{info.name}.idx"
        width = self._check_header(self.path, _TOKENS_MAGIC, info, tokenizer_fingerprint)
        if self._check_header(index_path, _INDEX_MAGIC, info, tokenizer_fingerprint) != width:
            raise ValueError(f"{index_path} belongs to another shard than {self.path}. {_REBUILD}")
        self.num_blocks = -(-info.tokens * width // BLOCK_BYTES)
        """Checksummed blocks of 4 MiB."""
        size, index_size = info.tokens * width, info.documents * 8 + self.num_blocks * 4 + 4
        self._check_size(self.path, _HEADER.size + size)
        self._check_size(index_path, _HEADER.size + index_size)
        self._num_tokens, self._num_documents, self._dtype = info.tokens, info.documents, np.dtype(f"<u{width}")
        self._tokens = FileMap(self.path, _HEADER.size + size, keep=keep)
        self._index = FileMap(index_path, _HEADER.size + index_size, keep=keep)

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens, u16 or u32."""
        return self._tokens.view(self._dtype, self._num_tokens, _HEADER.size)

    @property
    def document_ends(self) -> npt.NDArray[np.uint64]:
        """Token offset behind each document, rising."""
        return self._index.view("<u8", self._num_documents, _HEADER.size)

    def check_documents(self, *, every: bool) -> None:
        """Check that document ends rise up to the number of tokens.

        Args:
            every: All of them, not the last alone.

        Raises:
            ValueError: If they do not.
        """
        ends = self.document_ends
        rising = not every or bool((ends[1:] > ends[:-1]).all())
        if not ends.size or int(ends[-1]) != self._num_tokens or not rising:
            raise ValueError(
                f"{self._index.path}: the document ends do not rise to {self._num_tokens}, the number of tokens. {_REBUILD}"
            )

    def check_block(self, block: int, vocab_size: int = 2**32) -> None:
        """Compare one block with its checksum, and its ids with the vocabulary.

        Raises:
            ValueError: If it differs, naming the shard, the block and the byte range; or if an id is too large.
        """
        start = _HEADER.size + block * BLOCK_BYTES
        data = self._tokens.content[start : start + BLOCK_BYTES]
        crcs = self._index.view("<u4", self.num_blocks, _HEADER.size + self._num_documents * 8)
        if zlib.crc32(data.data) != int(crcs[block]):
            raise ValueError(
                f"{self.path}: block {block} (bytes {start} to {start + data.size}) does not match its checksum: the "
                f"file changed after it was written. {_REBUILD}"
            )
        ids = data.view(self._dtype)
        if int(ids.max()) >= vocab_size:
            raise ValueError(
                f"{self.path}: block {block} holds token id {int(ids.max())}, but the tokenizer has {vocab_size} ids. "
                f"{_REBUILD}"
            )

    def check_index(self) -> None:
        """Compare the document ends and checksums with the index file's own checksum.

        Raises:
            ValueError: If they differ.
        """
        body = self._index.content[_HEADER.size :].data
        if zlib.crc32(body[:-4]) != struct.unpack("<I", body[-4:])[0]:
            raise ValueError(f"{self._index.path} does not match its checksum. {_REBUILD}")

    @staticmethod
    def _check_header(path: Path, magic: bytes, info: ShardInfo, tokenizer_fingerprint: str) -> int:
        try:
            with open_file(path) as file:
                head = file.read(_HEADER.size)
        except FileNotFoundError as err:
            raise ValueError(f"{path} is missing, though the manifest names it. {_REBUILD}") from err
        if len(head) < _HEADER.size or head[:8] != magic or struct.unpack("<I", head[-4:])[0] != zlib.crc32(head[:-4]):
            raise ValueError(f"{path} does not begin with an intact header. {_REBUILD}")
        _, version, width, _, tokens, documents, tokenizer, _ = _HEADER.unpack(head)
        if version != _VERSION:
            raise ValueError(
                f"{path} has format version {version}, but this release reads version {_VERSION}. {_REBUILD}"
            )
        if width not in (2, 4):
            raise ValueError(f"{path} has tokens of {width} bytes; 2 and 4 exist. {_REBUILD}")
        if (tokens, documents) != (info.tokens, info.documents):
            raise ValueError(
                f"{path} holds {tokens} tokens in {documents} documents, the manifest says {info.tokens} in "
                f"{info.documents}. {_REBUILD}"
            )
        if tokenizer != bytes.fromhex(tokenizer_fingerprint)[:16]:
            raise ValueError(
                f"{path} was written with tokenizer {tokenizer.hex()}, not {tokenizer_fingerprint[:32]}. "
                "Open it with its own tokenizer, or prepare it again."
            )
        return width

    @staticmethod
    def _check_size(path: Path, expected: int) -> None:
        if (size := path.stat().st_size) != expected:
            raise ValueError(f"{path} has {size} bytes and should have {expected}: it was cut. {_REBUILD}")


_REBUILD = "Delete its folder and prepare it again."


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
