"""Write a file and bring it to disk, or into the store; map a file, or fetch it; delete a folder."""

import contextlib
import ctypes
import io
import mmap
import os
import shutil
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from titan_ckpt.storage.paths import RemotePath, StorePath

# Remote bytes are fetched in units of this size: a digested block of the format.
_FETCH_UNIT_BYTES = 4 << 20
# One request for a range reads at most this much; so many requests run at the same time.
_FETCH_BYTES = 64 << 20
_PARALLEL_FETCHES = 8


@contextlib.contextmanager
def writing(path: StorePath) -> Generator[Any]:
    """A new binary file to write; on disk, or in the store, when the block ends well.

    An object goes through a temporary local file (``TMPDIR``): so the store's client can send several parts of it at
    the same time, and send a part again.

    Args:
        path: Where; must not exist on a file system.
    """
    if isinstance(path, Path):
        # "x": a leftover of the same name would mean that two saves share a folder.
        with path.open("xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        return
    with tempfile.NamedTemporaryFile(buffering=0, prefix="titan-ckpt-") as file:
        yield file
        path.ask("put_file", file.name, path.path)


def write_plain(path: StorePath, data: bytes) -> None:
    """Write a small file and bring it to disk; replaces one of that name."""
    if isinstance(path, RemotePath):
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
        return
    with contextlib.suppress(OSError):
        path.ask("rm", path.path, recursive=True)


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


class MappedFile:
    """A file's bytes as memory: a local one mapped, a remote one fetched where it is asked for.

    Args:
        path: The file. Its size must have been checked: touching a mapped page past the end of a file kills the process.
        size: Its bytes.
    """

    def __init__(self, path: StorePath, size: int) -> None:
        self._path, self._size = path, size
        self._missing: set[int] = set()
        self._map: mmap.mmap | bytearray
        if not size:
            self._map = bytearray()
        elif isinstance(path, Path):
            with path.open("rb") as opened:
                self._map = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
        else:
            self._map = mmap.mmap(-1, size)  # pages take memory when they are written
            self._missing = set(range(-(-size // _FETCH_UNIT_BYTES)))
        self.view = memoryview(self._map)
        """All bytes; writable without effect on the file. Of a remote file only what was fetched is there."""

    def fetch(self, begin: int, end: int) -> None:
        """Make sure that bytes ``begin`` to ``end`` are there; whole blocks are read, many with one request.

        Raises:
            OSError: If the store does not give them.
        """
        for run in self.missing(begin, end):
            self.read(*run)

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The requests that `fetch` would make: first and end byte of each."""
        runs: list[tuple[int, int]] = []
        for block in range(begin // _FETCH_UNIT_BYTES, -(-end // _FETCH_UNIT_BYTES)) if self._missing else ():
            at, stop = block * _FETCH_UNIT_BYTES, min((block + 1) * _FETCH_UNIT_BYTES, self._size)
            if block not in self._missing:
                continue
            if runs and runs[-1][1] == at and stop - runs[-1][0] <= _FETCH_BYTES:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((at, stop))
        return runs

    def read(self, at: int, stop: int) -> None:
        """Make one request of `missing`."""
        assert isinstance(self._path, RemotePath)
        data = self._path.read_range(at, stop)
        if len(data) != stop - at:
            raise OSError(f"{self._path} gave {len(data)} bytes of {stop - at} from byte {at}.")
        self.view[at:stop] = data
        self._missing.difference_update(range(at // _FETCH_UNIT_BYTES, -(-stop // _FETCH_UNIT_BYTES)))


def fetch_all(ranges: Iterable[tuple[MappedFile, int, int]]) -> None:
    """Fetch byte ranges of several files, several at the same time.

    Raises:
        OSError: If a store does not give them.
    """
    requests = [(file, *run) for file, begin, end in ranges for run in file.missing(begin, end)]
    if len(requests) < 2:
        for file, at, stop in requests:
            file.read(at, stop)
        return
    from concurrent.futures import ThreadPoolExecutor  # saver processes start without

    with ThreadPoolExecutor(_PARALLEL_FETCHES, "titan-ckpt-fetch") as pool:
        for _ in pool.map(lambda request: request[0].read(*request[1:]), requests):
            pass
