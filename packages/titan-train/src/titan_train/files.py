"""Writing files so that a reader sees the old content or the new one, and reading files that may hold anything."""

import contextlib
import errno
import gzip
import json
import os
import re
import stat
import tomllib
from importlib import resources
from io import BufferedReader
from pathlib import Path
from typing import Any

_MOST_TOML = 1_000_000
_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){100}""")


def open_file(path: Path | str) -> BufferedReader:
    """Open a file for reading, as `Path.open` with ``"rb"`` does, but nothing that a reader may wait for for ever.

    A pipe, a socket or a device is refused, and so is a file that the kernel makes up, such as `/proc/kmsg`: its size is 0
    and reading may wait.

    Raises:
        OSError: It cannot be opened, or it is not a regular file.
    """
    flags = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))  # not all exist everywhere
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode) or (status.st_size == 0 and _holds_something(descriptor)):
            raise OSError(
                errno.EINVAL, "a pipe, a device or a file of the kernel; copy its content to a regular file", str(path)
            )
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str) -> bytes:
    """The content of a regular file; see `open_file`."""
    with open_file(path) as file:
        return file.read()


def read_text(path: Path | str, *, errors: str = "strict") -> str:
    """The content of a regular file in UTF-8, newlines as they are read in text mode; see `open_file`."""
    text = read_bytes(path).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _holds_something(descriptor: int) -> bool:
    """Whether a file of size 0 has content anyway, now or later."""
    try:
        found = os.read(descriptor, 1)
    except BlockingIOError:
        return True
    if not found or os.fstat(descriptor).st_size:  # empty, or written to this moment
        os.lseek(descriptor, 0, os.SEEK_SET)
        return False
    return True


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, but a text that is nested too deeply is damaged like any other.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err


def read_toml(path: Path | str) -> dict[str, Any]:
    """The content of a TOML file of at most 1 MB, whose keys have at most 100 parts; see `open_file`.

    `tomllib` takes minutes for a longer key of many parts, and a configuration is never that large.

    Raises:
        OSError: It cannot be read.
        ValueError: It is larger, or not TOML.
    """
    with open_file(path) as file:
        content = file.read(_MOST_TOML + 1)
    if len(content) > _MOST_TOML:
        raise ValueError(f"it is larger than the {_MOST_TOML:,} bytes that a TOML file may have here")
    text = content.decode("utf-8").replace("\r\n", "\n")
    if _LONG_KEY.search(text):
        raise ValueError("it has a key of more than 100 parts")
    try:
        return tomllib.loads(text)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err


def read_gzip(path: Path | str) -> bytes:
    """The content of a gzip file, of at most 64 times its size, but 64 MiB in any case; see `open_file`.

    Raises:
        OSError: It cannot be read, or is not gzip.
        EOFError: It ends early.
        ValueError: It decompresses to more.
    """
    with open_file(path) as raw:
        most = max(64 << 20, 64 * os.fstat(raw.fileno()).st_size)
        with gzip.GzipFile(fileobj=raw) as file:
            content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it decompresses to more than {most:,} bytes, more than such a file can hold")
    return content


def refuse_link_out(file: Path) -> None:
    """Refuse a file that is a link out of its folder. In a cache of the Hugging Face hub, links to its blobs are allowed.

    Raises:
        ValueError: It is one.
    """
    folder = file.absolute().parent
    allowed = [os.path.realpath(folder)]
    if folder.parent.name == "snapshots":
        allowed.append(os.path.realpath(folder.parent.parent / "blobs"))
    found = os.path.realpath(file)
    if all(os.path.commonpath([found, place]) != place for place in allowed):
        raise ValueError(f"{file} is a link to {found}, out of the folder. Copy the file it links to, if you trust it.")


def write_atomic(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Write ``content`` under a temporary name in the same folder, then rename it to ``path``.

    Args:
        path: The file; its folder is created if it is missing.
        content: Text is encoded as UTF-8.
        sync: Flush to the disk before the rename, so that the file survives a power failure.

    Raises:
        OSError: The file cannot be written; ``path``, which the error names, and its folder are as before.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as err:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(err, OSError):
            err.filename = str(path)  # what was to be written, not the temporary name
        raise


SHIPPED = "shipped:"
PARTS_NAME = ".parts"
"""In a folder of `titan-train data download` while files of it are missing: what has arrived of them."""


def local_path(given: str) -> Path:
    """The file or folder that a setting names: ``shipped:NAME`` is in this package; ``hf:`` is dropped."""
    given = given.removeprefix("hf:")
    if given.startswith(SHIPPED):
        return Path(str(resources.files("titan_train") / "configs" / given.removeprefix(SHIPPED)))
    return Path(given).expanduser()


def download_hint(given: str) -> str:
    """How to get a folder that is not here, if it may be a repository of the Hugging Face hub; else nothing."""
    name = given.removeprefix("hf:")
    if not given.startswith("hf:") or re.fullmatch(r"(datasets/)?[\w.-]+/[\w.-]+", name, re.ASCII) is None:
        return ""
    return (
        f" To load it from the Hugging Face hub: titan-train data download hf:{name} --out {name}; or pass --download."
    )
