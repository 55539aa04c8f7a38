"""Files as chunks and lines of bytes: plain, gzip or zstandard, with truncation seen and a hash on the way.

zstandard's own stream reader ends quietly where a truncated file ends. Frames are therefore decompressed one by one:
a file that stops inside a frame is an error.
"""

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from titan_train.files import open_file

# What a damaged archive loses before the damage is at most what one of these decompresses to.
_CHUNK_BYTES = 64 * 1024
# Four bytes of zstandard can stand for 128 KiB, and its decompressor returns all that its input holds: 8 MiB at once of this
# much, and not 2 GiB of _CHUNK_BYTES. Smaller pieces are no slower.
_ZSTD_BYTES = 256
# Decompressing holds one window. Files made with `--long=31` have one of 2 GiB; a small file has no use for it.
_SMALL_WINDOW = 2**27
_WINDOW_FACTOR = 64


class DamagedFileError(Exception):
    """A compressed file that ends early or does not decompress; the bytes before the damage were delivered."""


class FileReader:
    """Read one file, decompressed by its suffix, hashing the raw bytes.

    Args:
        path: A file; `.zst` and `.gz` are decompressed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._suffix = path.suffix.lower()
        self._sha = hashlib.sha256()
        self.bytes_read = 0
        """Raw (compressed) bytes read so far."""
        self._start = 0

    def go_to(self, byte: int) -> int:
        """Begin at this byte of the content, or at 0 in a compressed file; returns the choice."""
        self._start = 0 if self._suffix in (".gz", ".zst") else byte
        return self._start

    @property
    def sha256(self) -> str:
        """sha256 (hex) of the raw bytes read so far."""
        return self._sha.hexdigest()

    def chunks(self) -> Iterator[bytes]:
        """The content in pieces.

        Raises:
            DamagedFileError: If the file is truncated or damaged, after the pieces before that.
        """
        with open_file(self.path) as file:
            if self._suffix in (".gz", ".zst") and not os.fstat(file.fileno()).st_size:
                raise DamagedFileError("the file is empty, which no compressed file is: it is truncated")
            if self._suffix == ".zst":
                yield from self._zstd_chunks(file)
            elif self._suffix == ".gz":
                yield from self._gzip_chunks(file)
            else:
                file.seek(self._start)
                yield from self._raw_chunks(file)

    def hash_whole(self) -> None:
        """Read the file as it is, for its hash and size: what read its content used another reader."""
        with open_file(self.path) as file:
            for _ in self._raw_chunks(file):
                pass

    def lines(self, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
        """Lines without their newline, each with its byte offset; None stands for a line over ``max_bytes``.

        Raises:
            DamagedFileError: As `chunks`; a line cut by the damage is not delivered.
        """
        offset = self._start  # of the line being collected
        held: list[bytes] = []  # its pieces so far
        held_bytes = 0
        dropped = False  # it is over max_bytes: count its bytes, keep none
        for chunk in self.chunks():
            first, *others = chunk.split(b"\n")
            for piece in others:
                held_bytes += len(first)
                whole = b"".join([*held, first]) if held else first
                yield offset, None if dropped or held_bytes > max_bytes else whole
                offset += held_bytes + 1
                held, held_bytes, dropped, first = [], 0, False, piece
            held_bytes += len(first)
            dropped = dropped or held_bytes > max_bytes
            held = [] if dropped else [*held, first]
        if held_bytes:
            yield offset, None if dropped else b"".join(held)

    def _raw_chunks(self, file: IO[bytes]) -> Iterator[bytes]:
        while chunk := file.read(_CHUNK_BYTES):
            self._sha.update(chunk)
            self.bytes_read += len(chunk)
            yield chunk

    def _zstd_chunks(self, file: IO[bytes]) -> Iterator[bytes]:
        size = os.fstat(file.fileno()).st_size
        window = min(2**31, max(_SMALL_WINDOW, 2 ** (_WINDOW_FACTOR * size).bit_length()))
        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
        frame: Any = None
        for chunk in self._raw_chunks(file):
            raw = memoryview(chunk)
            while raw:
                if frame is None:
                    frame = decompressor.decompressobj()
                try:
                    content = frame.decompress(raw[:_ZSTD_BYTES])
                except zstandard.ZstdError as err:
                    large = f"; its window may have {window} bytes" if "memory" in str(err) else ""
                    raise DamagedFileError(f"zstd data is damaged ({err}{large})") from err
                for start in range(0, len(content), _CHUNK_BYTES):
                    yield content[start : start + _CHUNK_BYTES]
                raw = raw[_ZSTD_BYTES:]
                if frame.eof:
                    raw, frame = memoryview(frame.unused_data + bytes(raw)), None
        if frame is not None:
            raise DamagedFileError("the zstd file ends inside a frame: it is truncated")

    def _gzip_chunks(self, file: IO[bytes]) -> Iterator[bytes]:
        with gzip.GzipFile(fileobj=_Hashed(file, self)) as content:  # pyright: ignore[reportArgumentType]
            while True:
                try:
                    chunk = content.read(_CHUNK_BYTES)
                except EOFError as err:
                    raise DamagedFileError("the gzip file ends inside a member: it is truncated") from err
                except (gzip.BadGzipFile, zlib.error) as err:
                    raise DamagedFileError(f"gzip data is damaged ({err})") from err
                if not chunk:
                    return
                yield chunk

    def count_raw(self, raw: bytes) -> None:
        """Hash and count bytes that gzip read."""
        self._sha.update(raw)
        self.bytes_read += len(raw)


class _Hashed:
    """What gzip reads through: a file whose reads are hashed. gzip reads forward only."""

    def __init__(self, file: IO[bytes], reader: FileReader) -> None:
        self._file = file
        self._reader = reader

    def read(self, size: int = -1) -> bytes:
        raw = self._file.read(size)
        self._reader.count_raw(raw)
        return raw
