"""Where steps lie: a POSIX file system, or any store that fsspec reaches (``s3://``, ``gs://``, ``memory://``).

A local path is a `pathlib.Path`. `RemotePath` gives a store's objects the part of `pathlib.Path` that is used here.

The two differ in how a step becomes valid. A file system renames a whole folder in one instant, so a step is written
under another name and renamed. An object store cannot rename, but a single object appears whole or not at all: there
a step is written where it stays, under a name no other save uses, and its manifest, the last object, is the commit.
Readers have one rule for both: a step is valid if its manifest is there, intact, and every listed file has its size.
"""

import errno
import fnmatch
import importlib
import json
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """A path in a store that fsspec reaches; methods as those of `pathlib.Path`."""

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

    # fsspec's own exists() and isdir() return False when a request fails. Here False may lead to a deletion.
    def exists(self) -> bool:
        return self._info() is not None

    def is_dir(self) -> bool:
        info = self._info()
        return info is not None and info["type"] == "directory"

    def iterdir(self) -> Iterator["RemotePath"]:
        self._forget()
        for found in self.ask("ls", self.path, detail=False):
            path = str(found).rstrip("/")
            if path != self.path:
                yield self / posixpath.basename(path)  # spelled as this one: stores list paths in their own spelling

    def glob(self, pattern: str, /) -> Iterator["RemotePath"]:
        return (child for child in self.iterdir() if fnmatch.fnmatchcase(child.name, pattern))

    def read_bytes(self) -> bytes:
        return bytes(self.ask("cat_file", self.path))

    def read_range(self, begin: int, end: int) -> bytes:
        """Bytes ``begin`` to ``end`` of an object: one request."""
        return bytes(self.ask("cat_file", self.path, start=begin, end=end))

    def write_bytes(self, data: bytes, /) -> int:
        self.ask("pipe_file", self.path, data)
        return len(data)

    def create(self, data: bytes) -> None:
        """Write an object that must not exist: a conditional put, of which one of several writers wins.

        Raises:
            FileExistsError: If it exists.
        """
        self.ask("pipe_file", self.path, data, mode="create")

    def stat(self) -> _Size:
        self._forget()
        return _Size(int(self.ask("info", self.path)["size"]))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.ask("rm_file", self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        self.ask("makedirs", self.path, exist_ok=True)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system. What a store's client raises of its own is an `OSError` here.

        Raises:
            OSError: If the store fails, refuses, or cannot be reached.
        """
        try:
            return getattr(self.fs, method)(*args, **kwargs)
        except (OSError, NotImplementedError):
            raise
        except Exception as err:
            raise OSError(errno.EIO, f"{self}: {type(err).__name__}: {err}") from err

    def _info(self) -> dict[str, Any] | None:
        """What the store knows of it; None only if the store says that there is no such thing."""
        self._forget()
        try:
            return self.ask("info", self.path)
        except ABSENT:
            return None
        except OSError as err:
            raise unanswered(self, err) from err

    def _forget(self) -> None:
        """Other processes write too: listings are not kept."""
        self.fs.invalidate_cache()


StorePath = Path | RemotePath
"""A file or folder of a storage."""


def as_path(path: "StorePath | os.PathLike[str] | str") -> StorePath:
    """A storage path from what a user gives: a path, or a URL of a store.

    Raises:
        ValueError: If fsspec, or what it needs for this store, is not installed.
    """
    if isinstance(path, RemotePath):
        return path
    if not isinstance(path, str) or "://" not in path:
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
        ValueError: If the store was made with options that are not plain data.
    """
    if isinstance(path, Path):
        return str(path)
    try:
        return {"store": json.loads(json.dumps(path.fs, default=_plain_store)), "path": path.path}
    except (TypeError, ValueError) as err:
        raise ValueError(
            f"the file system of {path} cannot be passed to another process: {err}. Make it with options that are plain "
            "data, or save with async_=False in one process."
        ) from err


def decode_path(value: Any) -> StorePath:
    """Undo `encode_path`. The store's class is looked up in fsspec's registry; nothing else is imported.

    Raises:
        ValueError: If fsspec does not know the store.
    """
    return Path(value) if isinstance(value, str) else RemotePath(_store(value["store"]), value["path"])


def shared_between_processes(path: StorePath) -> bool:
    """Whether another process on this machine can reach the same files, as saver processes and other ranks must.

    False of a store in memory, of one made with options that are not plain data, and of one whose class was registered
    with fsspec in this process only.
    """
    if isinstance(path, Path):
        return True
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


def renames(path: StorePath) -> bool:
    """Whether the storage renames a folder in one instant, which is how a step is committed there."""
    return isinstance(path, Path)


def _protocol(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]


def _plain_store(fs: Any) -> dict[str, Any]:
    """A file system as plain data; one among its options too."""
    if not hasattr(fs, "storage_options"):
        raise TypeError(f"{fs!r} is not plain data")
    return {"protocol": _protocol(fs), "args": fs.storage_args, "options": fs.storage_options}


def _store(value: dict[str, Any]) -> Any:
    """Undo `_plain_store`."""
    options = {
        key: _store(option) if isinstance(option, dict) and set(option) == {"protocol", "args", "options"} else option
        for key, option in value["options"].items()
    }
    return importlib.import_module("fsspec").get_filesystem_class(value["protocol"])(*value["args"], **options)
