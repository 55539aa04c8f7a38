"""A file's bytes as memory."""

import mmap
from pathlib import Path

from titan_ckpt.format.names import BLOCK_BYTES
from titan_ckpt.storage.paths import RemotePath, StorePath

# One request for a range reads at most this much.
_FETCH_BYTES = 64 << 20


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
