"""Write one file of a step: safetensors or JSON, digested on the way, on disk before it is reported.

No torch here: the bytes come as buffers, from tensors in the trainer.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from titan_ckpt._digest import BlockDigester, Buffer
from titan_ckpt._format import Entry, encode_header
from titan_ckpt._index import FileRecord

# One write call takes at most this much, so that hashing finds the bytes still in the processor's cache.
_WRITE_BYTES = 1 << 20


def write_safetensors(
    folder: Path,
    name: str,
    entries: Sequence[Entry],
    buffers: Iterable[Buffer | Iterable[Buffer]],
    metadata: dict[str, str],
) -> FileRecord:
    """Write a safetensors file.

    Args:
        folder: The unfinished step's folder.
        name: The file, relative to it; its parent folder is made.
        entries: The tensors, in the order their bytes come.
        buffers: Each tensor's bytes, little-endian and contiguous, whole or in pieces. Taken one at a time, so that a
            generator can copy one tensor from the device while none other is held.
        metadata: The header's ``__metadata__``.

    Returns:
        The file's record, for the index.

    Raises:
        OSError: If the file cannot be written (no space, read-only, device error).
        ValueError: If a buffer has another size than its entry.
    """
    header = encode_header(entries, metadata)

    def pieces() -> Iterable[Buffer]:
        yield header
        for entry, buffer in zip(entries, buffers, strict=True):
            given = 0
            whole = isinstance(buffer, bytes | bytearray | memoryview)
            for piece in cast("Iterable[Buffer]", [buffer] if whole else buffer):
                given += memoryview(piece).nbytes
                yield piece
            if given != entry.nbytes:
                raise ValueError(f"{entry.name} needs {entry.nbytes} bytes, got {given}.")

    size, blocks = _write(folder / name, pieces())
    return FileRecord(name, size, blocks, len(header))


def write_bytes(folder: Path, name: str, data: bytes) -> FileRecord:
    """Write a small file (JSON); see `write_safetensors`."""
    size, blocks = _write(folder / name, [data])
    return FileRecord(name, size, blocks)


def write_plain(path: Path, data: bytes) -> None:
    """Write a file and bring it to disk."""
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), data)
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Bring a folder's entries (new and renamed files) to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(path: Path, pieces: Iterable[Buffer]) -> tuple[int, tuple[str, ...]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    digester = BlockDigester()
    # "x": a leftover of the same name would mean that two saves share a folder.
    with path.open("xb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for at in range(0, len(view), _WRITE_BYTES):
                part = view[at : at + _WRITE_BYTES]
                digester.feed(part)
                _write_all(file.fileno(), part)
        os.fsync(file.fileno())
    return digester.size, tuple(digester.finish())


def _write_all(fd: int, data: Buffer) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]
