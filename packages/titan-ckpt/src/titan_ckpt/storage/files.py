"""Write a file and bring it to disk, or into the store; delete a folder."""

import contextlib
import ctypes
import io
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from titan_ckpt.storage.paths import RemotePath, StorePath

# An upload copies so many bytes at a time.
_COPY_BYTES = 64 << 20


@contextlib.contextmanager
def writing(path: StorePath, *, seekable: bool = False) -> Generator[Any]:
    """A new binary file to write; on disk, or in the store, when the block ends well.

    Args:
        path: Where; must not exist on a file system.
        seekable: Whether earlier bytes will be filled in. An upload then goes through a temporary local file.
    """
    if isinstance(path, Path):
        # "x": a leftover of the same name would mean that two saves share a folder.
        with path.open("xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        return
    assert isinstance(path, RemotePath)
    if seekable:
        with tempfile.TemporaryFile(buffering=0) as file:
            yield file
            file.seek(0)
            with path.fs.open(path.path, "wb") as upload:
                shutil.copyfileobj(file, upload, _COPY_BYTES)
        return
    upload = path.fs.open(path.path, "wb")
    try:
        yield upload
    except BaseException:
        with contextlib.suppress(Exception):  # an object cut short is never listed in a manifest
            upload.discard()
        raise
    upload.close()


def write_plain(path: StorePath, data: bytes) -> None:
    """Write a small file and bring it to disk; replaces one of that name."""
    if not isinstance(path, Path):
        path.write_bytes(data)
        return
    with path.open("wb", buffering=0) as file:
        write_all(file, data)
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Bring a folder's entries (new and renamed files) to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_tree(path: StorePath) -> None:
    """Delete a folder with all below; what cannot be deleted is left."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    elif isinstance(path, RemotePath):
        with contextlib.suppress(OSError):
            path.fs.rm(path.path, recursive=True)


def write_all(file: Any, data: bytes | bytearray | memoryview) -> None:
    """Write every byte; an unbuffered file may take fewer at a time."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


class Writeback:
    """Has the kernel bring a local file to disk while it is written, so that the final ``fsync`` waits for little.

    A hint: nothing depends on it, and a kernel or C library without ``sync_file_range`` goes without. On a
    virtual disk, 256 MiB with the ``fsync`` took a third less time.
    """

    _WINDOW_BYTES = 32 << 20
    _SYNC_FILE_RANGE_WRITE = 2

    def __init__(self, file: Any) -> None:
        self._fd = file.fileno() if isinstance(file, io.FileIO) else -1
        self._call: Any = getattr(ctypes.CDLL(None), "sync_file_range", None) if self._fd >= 0 else None
        self._written = self._started = 0

    def wrote(self, nbytes: int) -> None:
        """The file grew by so many bytes, in order."""
        self._written += nbytes
        if self._call is not None and self._written - self._started >= self._WINDOW_BYTES:
            begin, length = ctypes.c_int64(self._started), ctypes.c_int64(self._written - self._started)
            self._call(self._fd, begin, length, self._SYNC_FILE_RANGE_WRITE)
            self._started = self._written
