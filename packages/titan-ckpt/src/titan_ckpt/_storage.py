"""Where steps lie: the storage protocol, with a POSIX file system and fsspec's stores behind it.

The protocol is the part of `pathlib.Path` that saving and loading use, so a local path is a storage as it is.
`RemotePath` gives the same to any store that fsspec reaches (``s3://``, ``gs://``, ``memory://``): URLs as paths,
objects as files.

The two differ in how a step becomes valid. A file system renames a whole folder in one instant, so a step is written
under another name and renamed. An object store cannot rename, but a single object appears whole or not at all: there
a step is written where it stays, under a name no other save uses, and its manifest, the last object, is the commit.
Readers have one rule for both: a step is valid if its manifest is there, intact, and every listed file has its size.
"""

import contextlib
import ctypes
import fnmatch
import importlib
import io
import json
import mmap
import os
import posixpath
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from titan_ckpt._format import BLOCK_BYTES

# One request for a range reads at most this much.
_FETCH_BYTES = 64 << 20


class Stat(Protocol):
    """What is known of a file."""

    @property
    def st_size(self) -> int:
        """Bytes."""
        ...


class StorePath(Protocol):
    """A file or folder of a storage. `pathlib.Path` is one."""

    @property
    def name(self) -> str:
        """Last component."""
        ...

    @property
    def parent(self) -> Self:
        """The folder it lies in."""
        ...

    def __truediv__(self, name: str, /) -> Self:
        """The path of ``name`` below."""
        ...

    def exists(self) -> bool:
        """Whether there is a file or a folder with files."""
        ...

    def is_dir(self) -> bool:
        """Whether there is a folder."""
        ...

    def iterdir(self) -> Iterator[Self]:
        """What lies in a folder."""
        ...

    def glob(self, pattern: str, /) -> Iterable[Self]:
        """What lies in a folder and has such a name."""
        ...

    def read_bytes(self) -> bytes:
        """A whole file."""
        ...

    def write_bytes(self, data: bytes, /) -> int:
        """Make or replace a file."""
        ...

    def stat(self) -> Stat:
        """Its size; raises `FileNotFoundError`."""
        ...

    def unlink(self, missing_ok: bool = ...) -> None:
        """Delete a file."""
        ...

    def mkdir(self, *, parents: bool = ..., exist_ok: bool = ...) -> None:
        """Make a folder, where the store has folders."""
        ...


ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""The errors that prove that a file is not there. Any other proves nothing, and may be gone at the next try."""


def unanswered(path: object, err: OSError) -> OSError:
    """The same kind of error as ``err`` with the file's name, which stores behind fsspec leave out, and the way out."""
    text = f"{path} cannot be read: {err.strerror or err}. Try again; if it stays so, move that folder away."
    return OSError(text) if err.errno is None else OSError(err.errno, text)


@dataclass(frozen=True, slots=True)
class _Size:
    st_size: int


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A path in a store that fsspec reaches."""

    fs: Any
    """The fsspec file system."""
    path: str
    """Path within it."""

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.fs, posixpath.dirname(self.path))

    def __truediv__(self, name: str, /) -> "RemotePath":
        return RemotePath(self.fs, posixpath.join(self.path, name))

    # fsspec's own exists() and isdir() take every failed request for an absence. Here whoever gets "no" may delete.
    def exists(self) -> bool:
        return self._info() is not None

    def is_dir(self) -> bool:
        info = self._info()
        return info is not None and info["type"] == "directory"

    def iterdir(self) -> Iterator["RemotePath"]:
        self._forget()
        for found in self.fs.ls(self.path, detail=False):
            path = str(found).rstrip("/")
            if path != self.path:
                yield self / posixpath.basename(path)  # spelled as this one: stores list paths in their own spelling

    def glob(self, pattern: str, /) -> Iterator["RemotePath"]:
        return (child for child in self.iterdir() if fnmatch.fnmatchcase(child.name, pattern))

    def read_bytes(self) -> bytes:
        return bytes(self.fs.cat_file(self.path))

    def read_range(self, begin: int, end: int) -> bytes:
        """Bytes ``begin`` to ``end`` of an object."""
        return bytes(self.fs.cat_file(self.path, start=begin, end=end))

    def write_bytes(self, data: bytes, /) -> int:
        self.fs.pipe_file(self.path, data)
        return len(data)

    def stat(self) -> Stat:
        self._forget()
        return _Size(int(self.fs.info(self.path)["size"]))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.fs.rm_file(self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        self.fs.makedirs(self.path, exist_ok=True)

    def _info(self) -> dict[str, Any] | None:
        """What the store tells of it; None only if the store says that there is no such thing."""
        self._forget()
        try:
            return self.fs.info(self.path)
        except ABSENT:
            return None
        except OSError as err:
            raise unanswered(self, err) from err

    def _forget(self) -> None:
        """Other processes write too: listings are not kept."""
        self.fs.invalidate_cache()


def as_path(path: "StorePath | os.PathLike[str] | str") -> StorePath:
    """A storage path from what a user gives: a path, or a URL of a store.

    Raises:
        ValueError: If fsspec, or what it needs for this store, is not installed.
    """
    if not isinstance(path, str):
        return Path(path) if isinstance(path, os.PathLike) else path
    if "://" not in path:
        return Path(path)
    try:
        fs, inner = importlib.import_module("fsspec.core").url_to_fs(path)
    except ImportError as err:
        raise ValueError(
            f"{path} cannot be reached: {err}. Install titan-ckpt[fsspec] and the store's own package."
        ) from err
    return RemotePath(fs, str(inner).rstrip("/"))


def encode_path(path: StorePath) -> Any:
    """A path as JSON data for another process of the same job. A URL would lose the options of the store.

    Raises:
        ValueError: If the store cannot be told: it was made with options that are no plain data.
    """
    if isinstance(path, Path):
        return str(path)
    assert isinstance(path, RemotePath)
    try:
        return {"store": json.loads(json.dumps(path.fs, default=_told_store)), "path": path.path}
    except (TypeError, ValueError) as err:
        raise ValueError(
            f"the file system of {path} cannot be told to another process: {err}. Make it with options that are plain "
            "data, or save with async_=False in one process."
        ) from err


def decode_path(told: Any) -> StorePath:
    """Undo `encode_path`. The store's class is looked up in fsspec's registry; nothing else is imported.

    Raises:
        ValueError: If fsspec does not know the store.
    """
    return Path(told) if isinstance(told, str) else RemotePath(_store(told["store"]), told["path"])


def shared_between_processes(path: StorePath) -> bool:
    """Whether another process on this machine can reach the same files, as saver processes and other ranks must.

    False of a store in memory, of one made with options that are no plain data, and of one whose class was registered
    with fsspec in this process only.
    """
    if isinstance(path, Path):
        return True
    assert isinstance(path, RemotePath)
    memory = importlib.import_module("fsspec.implementations.memory").MemoryFileSystem
    known = importlib.import_module("fsspec").available_protocols()
    store = path.fs
    while store is not None:  # some stores lie in another one
        if isinstance(store, memory) or _protocol(store) not in known:
            return False
        store = getattr(store, "fs", None)
    try:
        encode_path(path)
    except ValueError:
        return False
    return True


def _protocol(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]


def _told_store(fs: Any) -> dict[str, Any]:
    """A file system as plain data; one among its options too."""
    if not hasattr(fs, "storage_options"):
        raise TypeError(f"{fs!r} is no plain data")
    return {"protocol": _protocol(fs), "args": fs.storage_args, "options": fs.storage_options}


def _store(told: dict[str, Any]) -> Any:
    """Undo `_told_store`."""
    options = {
        key: _store(value) if isinstance(value, dict) and set(value) == {"protocol", "args", "options"} else value
        for key, value in told["options"].items()
    }
    return importlib.import_module("fsspec").get_filesystem_class(told["protocol"])(*told["args"], **options)


def renames(path: StorePath) -> bool:
    """Whether the storage renames a folder in one instant, which is how a step is committed there."""
    return isinstance(path, Path)


def remove_tree(path: StorePath) -> None:
    """Delete a folder with all below; what cannot be deleted is left."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    elif isinstance(path, RemotePath):
        with contextlib.suppress(OSError):
            path.fs.rm(path.path, recursive=True)


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
                shutil.copyfileobj(file, upload, _FETCH_BYTES)
        return
    upload = path.fs.open(path.path, "wb")
    try:
        yield upload
    except BaseException:
        with contextlib.suppress(Exception):  # an object cut short is never listed in a manifest
            upload.discard()
        raise
    upload.close()


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
            self._missing = set(range(-(-size // BLOCK_BYTES)))
        self.view = memoryview(self._map)
        """All bytes; writable without effect on the file. Of a remote file only what was fetched is there."""

    def fetch(self, begin: int, end: int) -> None:
        """Make sure that bytes ``begin`` to ``end`` are there; whole blocks are read, many with one request.

        Raises:
            OSError: If the store does not give them.
        """
        if not self._missing:
            return
        assert isinstance(self._path, RemotePath)
        wanted = [b for b in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)) if b in self._missing]
        most = _FETCH_BYTES // BLOCK_BYTES
        while wanted:
            count = next(
                (i for i in range(1, min(most, len(wanted))) if wanted[i] != wanted[0] + i), min(most, len(wanted))
            )
            at, stop = wanted[0] * BLOCK_BYTES, min((wanted[count - 1] + 1) * BLOCK_BYTES, self._size)
            data = self._path.read_range(at, stop)
            if len(data) != stop - at:
                raise OSError(f"{self._path} gave {len(data)} bytes of {stop - at} from byte {at}.")
            self.view[at:stop] = data
            self._missing.difference_update(wanted[:count])
            del wanted[:count]
