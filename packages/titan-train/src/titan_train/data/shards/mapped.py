"""Files that are read through memory maps, few of them mapped at a time.

A map holds a descriptor, of which a process may often have 1024, and one of the 65530 maps that Linux allows it. A corpus has a
pair of files for every 268 million tokens. So a file is mapped when it is first read, and let go once that many others were
mapped after it. What a reader holds of it stays valid.
"""

import os
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Of the whole process, as its limits are.
_MOST = 128
_mapped: "deque[weakref.ref[FileMap]]" = deque()
_lock = threading.Lock()


class FileMap:
    """A file as bytes. Threads may share it.

    Args:
        path: The file; it is not opened yet.
        size: Its size (bytes), more than 0.
        keep: Whether it is mapped now and stays so, as a file must that others may remove.
    """

    def __init__(self, path: Path, size: int, *, keep: bool = False) -> None:
        self.path, self.size = path, size
        self._written_at = 0  # (ns) as it was mapped first; what file systems of user space give as st_ino may change
        self._content = self._map() if keep else None

    @property
    def content(self) -> npt.NDArray[np.uint8]:
        """All of it, read-only.

        Raises:
            OSError: It is gone.
            ValueError: It has another size now, or was written to since it was mapped first.
        """
        if (content := self._content) is not None:
            return content
        with _lock:
            if self._content is None:
                while len(_mapped) >= _MOST:
                    if (oldest := _mapped.popleft()()) is not None:
                        oldest._content = None
                self._content = self._map()
                _mapped.append(weakref.ref(self))
            return self._content

    def view(self, dtype: np.dtype[Any] | str, count: int, offset: int) -> npt.NDArray[Any]:
        """``count`` numbers from byte ``offset`` on."""
        dtype = np.dtype(dtype)
        return self.content[offset : offset + count * dtype.itemsize].view(dtype)

    def _map(self) -> npt.NDArray[np.uint8]:
        with self.path.open("rb") as file:
            about = os.fstat(file.fileno())
            written_at = self._written_at or about.st_mtime_ns
            if about.st_size != self.size or about.st_mtime_ns != written_at:
                sizes = f"it has {about.st_size} bytes and had {self.size} before"
                how = "it was written to" if about.st_size == self.size else sizes
                raise ValueError(
                    f"{self.path} changed while it was in use: {how}. Restore it, or start again with what is there now."
                )
            self._written_at = written_at
            return np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
