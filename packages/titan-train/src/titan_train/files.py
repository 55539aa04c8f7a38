"""Writing files so that a reader sees the old content or the new one, and reading files that may hold anything."""

import contextlib
import errno
import json
import os
import tomllib
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, but a text that is nested too deeply is damaged like any other.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err


def parse_toml(text: str) -> dict[str, Any]:
    """As `tomllib.loads`, but a text that is nested too deeply is damaged like any other.

    Raises:
        ValueError: It is not TOML.
    """
    try:
        return tomllib.loads(text)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err


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
        OSError: The file cannot be written; ``path`` and its folder are as before.
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
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
