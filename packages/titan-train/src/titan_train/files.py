"""Writing files so that a reader sees the old content or the new one, never a part."""

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Write ``content`` under a temporary name in the same folder, then rename it to ``path``.

    Args:
        path: The file; its folder is created if it is missing.
        content: Text is encoded as UTF-8.
        sync: Flush to the disk before the rename, so that the file survives a power failure.

    Raises:
        OSError: The file cannot be written; ``path`` and its folder are as before.
    """
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
