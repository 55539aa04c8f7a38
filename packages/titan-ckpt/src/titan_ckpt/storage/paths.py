"""Where steps lie: the storage protocol, with a POSIX file system and fsspec's stores behind it.

The protocol is the part of `pathlib.Path` that saving and loading use, so a local path is a storage as it is.
`RemotePath` gives the same to any store that fsspec reaches (``s3://``, ``gs://``, ``memory://``): URLs as paths,
objects as files.

The two differ in how a step becomes valid. A file system renames a whole folder in one instant, so a step is written
under another name and renamed. An object store cannot rename, but a single object appears whole or not at all: there
a step is written where it stays, under a name no other save uses, and its manifest, the last object, is the commit.
Readers have one rule for both: a step is valid if its manifest is there, intact, and every listed file has its size.
"""

import fnmatch
import importlib
import json
import os
import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

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
            f"the file system of {path} cannot be passed to another process: {err}. Make it with options that are plain "
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
        raise TypeError(f"{fs!r} is not plain data")
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
