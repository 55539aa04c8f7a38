"""Paths of steps: on a POSIX file system, or in a store behind fsspec (``s3://``, ``gs://``, ``memory://``).

A local path is a `pathlib.Path`. `RemotePath` is the part of its interface that is used here, for objects of a store.
universal-pathlib is not used: as fsspec, it answers "does not exist" when a request fails, and such an answer may lead to
a deletion here.

The two kinds differ in the commit. A file system renames a folder in one instant, so a step is written under another name
and then renamed. A store cannot rename a folder, but an object appears whole or not at all. There a step is written under
its final name, which no other save uses, and its last object, the manifest, is the commit.
"""

import errno
import fnmatch
import importlib
import json
import os
import posixpath
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""The errors that prove that a file does not exist. Other errors prove nothing."""


def is_there(path: "StorePath") -> bool:
    """Whether a file or folder exists. pathlib's ``exists`` is also False, from Python 3.14 on, if the storage does not answer.

    Raises:
        OSError: The storage does not answer.
    """
    return path.exists() if isinstance(path, RemotePath) else _mode(path) is not None


def is_folder(path: "StorePath") -> bool:
    """Whether a folder exists; as `is_there`."""
    return path.is_dir() if isinstance(path, RemotePath) else stat.S_ISDIR(_mode(path) or 0)


def _mode(path: Path) -> int | None:
    """A file's kind and permissions; None only if it does not exist."""
    try:
        return path.stat().st_mode
    except OSError as err:
        if isinstance(err, ABSENT) or err.errno == errno.ELOOP:  # a link that leads to itself
            return None
        raise


def unanswered(path: object, err: OSError) -> OSError:
    """An error like ``err`` that names the file, which stores behind fsspec do not, and says what to do."""
    text = f"{path} cannot be read: {err.strerror or err}. Try again. If the error stays, move that folder away."
    return OSError(text) if err.errno is None else OSError(err.errno, text)


@dataclass(frozen=True, slots=True)
class _Size:
    st_size: int


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A path in a store behind fsspec, with methods as those of `pathlib.Path`."""

    fs: Any
    """The fsspec file system."""
    path: str
    """The path within it."""

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

    # fsspec's exists() and isdir() return False if a request fails. Here False may lead to a deletion.
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
                yield self / posixpath.basename(path)  # stores may spell listed paths in another way

    def glob(self, pattern: str, /) -> Iterator["RemotePath"]:
        return (child for child in self.iterdir() if fnmatch.fnmatchcase(child.name, pattern))

    def read_bytes(self) -> bytes:
        return bytes(self.ask("cat_file", self.path))

    def read_range(self, begin: int, end: int) -> bytes:
        """Bytes ``begin`` to ``end`` of an object, in one request."""
        return bytes(self.ask("cat_file", self.path, start=begin, end=end))

    def write_bytes(self, data: bytes, /) -> int:
        self.ask("pipe_file", self.path, data)
        return len(data)

    def create(self, data: bytes) -> None:
        """Write an object that must not exist (a conditional put). Raises FileExistsError if it does."""
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
        """Call a method of the file system. Errors of a store's client become OSError."""
        try:
            return getattr(self.fs, method)(*args, **kwargs)
        except (OSError, NotImplementedError):
            raise
        except Exception as err:
            raise OSError(errno.EIO, f"{self}: {type(err).__name__}: {err}") from err

    def _info(self) -> dict[str, Any] | None:
        """The store's information; None only if the store says that the path does not exist."""
        self._forget()
        try:
            return self.ask("info", self.path)
        except ABSENT:
            return None
        except OSError as err:
            raise unanswered(self, err) from err

    def _forget(self) -> None:
        """Drop cached listings: other processes write too."""
        self.fs.invalidate_cache()


StorePath = Path | RemotePath
"""A file or folder of a storage."""


def as_path(path: "StorePath | os.PathLike[str] | str") -> StorePath:
    """A storage path from a user's path or URL.

    Raises:
        ValueError: If fsspec, or the package of this store, is not installed.
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
    """A path as JSON data for another process of the same job. A URL would lose the store's options.

    Raises:
        ValueError: If an option of the store is not plain data.
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
    """Undo `encode_path`. The store's class comes from fsspec's registry."""
    return Path(value) if isinstance(value, str) else RemotePath(_store(value["store"]), value["path"])


def shared_between_processes(path: StorePath) -> bool:
    """Whether another process on this machine can reach the same files.

    False for a store in memory, a store with options that are not plain data, and a store whose class was registered with
    fsspec in this process only.
    """
    if isinstance(path, Path):
        return True
    memory = importlib.import_module("fsspec.implementations.memory").MemoryFileSystem
    known = importlib.import_module("fsspec").available_protocols()
    store = path.fs
    while store is not None:  # a store may be a layer over another one
        if isinstance(store, memory) or _protocol(store) not in known:
            return False
        store = getattr(store, "fs", None)
    try:
        encode_path(path)
    except ValueError:
        return False
    return True


def renames(path: StorePath) -> bool:
    """Whether the storage can rename a folder in one instant."""
    return isinstance(path, Path)


def _protocol(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]


def _plain_store(fs: Any) -> dict[str, Any]:
    """A file system as plain data, also as an option of another one. fsspec's own `to_json` fails for options of None."""
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
