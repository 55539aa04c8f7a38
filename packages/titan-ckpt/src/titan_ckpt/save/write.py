"""Write one file of a step, safetensors or JSON, with block digests. It is on disk when the function returns. No torch."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from titan_ckpt.format.codec import MIN_BYTES, BlockDigester, Buffer, Packer
from titan_ckpt.format.index import FileRecord, Moved
from titan_ckpt.format.names import BLOCK_BYTES, ITEM_BYTES, Entry, encode_header
from titan_ckpt.storage.files import Writeback, write_all, writing
from titan_ckpt.storage.paths import StorePath

# Bytes per write call: few enough that the digest finds them in the processor's cache.
_WRITE_BYTES = 1 << 20
# Older readers of safetensors files require it.
_METADATA = {"format": "pt"}


def write_safetensors(
    folder: StorePath,
    name: str,
    entries: Sequence[Entry],
    buffers: Iterable[Buffer | Iterable[Buffer]],
    *,
    compress: bool = False,
) -> FileRecord:
    """Write a safetensors file and return its record.

    Args:
        folder: The unfinished step's folder.
        name: The file, relative to ``folder``. Its parent folder is made.
        entries: The tensors, in file order.
        buffers: Each tensor's bytes, little-endian and contiguous, whole or in pieces. They are taken one at a time, so a
            generator holds one tensor at a time.
        compress: Whether to compress the tensors that shrink. A compressed tensor is U8 in the file.

    Raises:
        OSError: If the file cannot be written (no space, read-only, device error).
        ValueError: If a buffer has another size than its entry.
    """
    header = encode_header(entries, _METADATA)
    data = _Data(entries, buffers, Packer() if compress else None)
    if not compress:
        return FileRecord(name, *_write(folder, name, itertools.chain([header], data)), len(header))
    # The header is known after the data: leave space for the longest one.
    reserved = len(header) + len(encode_header([Entry(e.name, "U8", (e.nbytes,)) for e in entries], _METADATA))
    size, blocks = _write(
        folder, name, data, reserved, lambda: encode_header(data.stored, _METADATA, at_least=reserved)
    )
    moved = tuple(data.moved) if any(place.frames for place in data.moved) else ()
    return FileRecord(name, size, blocks, reserved, moved)


class _Data:
    """The data of a safetensors file, with a ``packer`` compressed where that makes it smaller, and the place of each tensor."""

    def __init__(
        self, entries: Sequence[Entry], buffers: Iterable[Buffer | Iterable[Buffer]], packer: Packer | None
    ) -> None:
        self._entries, self._buffers, self._packer = entries, buffers, packer
        self.stored: list[Entry] = []
        self.moved: list[Moved] = []

    def __iter__(self) -> Iterator[Buffer]:
        start = planned = 0
        for entry, buffer in zip(self._entries, self._buffers, strict=True):
            whole = isinstance(buffer, bytes | bytearray | memoryview)
            pieces = cast("Iterable[Buffer]", [buffer] if whole else buffer)
            stored, lengths = entry, list[int]()
            if self._packer is not None and entry.nbytes >= MIN_BYTES:
                pieces = list(pieces)
                raw = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces)).cast("B")
                item = ITEM_BYTES[entry.dtype]
                if len(raw) == entry.nbytes and self._packer.gains(raw, item):
                    for frame in self._packer.frames(raw, item):
                        lengths.append(memoryview(frame).nbytes)
                        yield frame
                    padding = -sum(lengths) % 8  # keeps the tensors after it aligned
                    pieces = []
                    yield bytes(padding)
                    stored = Entry(entry.name, "U8", (sum(lengths) + padding,))
            given = 0
            for piece in pieces:
                given += memoryview(piece).nbytes
                yield piece
            if not lengths and given != entry.nbytes:
                raise ValueError(f"{entry.name} needs {entry.nbytes} bytes, got {given}.")
            self.stored.append(stored)
            self.moved.append(Moved(planned, start, tuple(lengths) or None))
            planned += entry.nbytes
            start += stored.nbytes


def write_bytes(folder: StorePath, name: str, data: bytes) -> FileRecord:
    """Write a small file and return its record."""
    return FileRecord(name, *_write(folder, name, [data]))


def _write(
    folder: StorePath,
    name: str,
    pieces: Iterable[Buffer],
    reserved: int = 0,
    header: Callable[[], bytes] = lambda: b"",
) -> tuple[int, tuple[str, ...]]:
    """Write a file; return its size and the digests of its blocks. ``header`` is asked for the first ``reserved`` bytes last."""
    path = folder / name
    if path.parent != folder:  # never make ``folder``: that of a failed save must not come back
        path.parent.mkdir(exist_ok=True)
    # The digests of blocks with a piece of the header are computed last.
    boundary = -(-reserved // BLOCK_BYTES) * BLOCK_BYTES
    beside, rest = bytearray(), BlockDigester()
    with writing(path) as file:
        file.seek(reserved)
        writeback = Writeback(file)
        writeback.wrote(reserved)
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for at in range(0, len(view), _WRITE_BYTES):
                part = view[at : at + _WRITE_BYTES]
                room = min(boundary - reserved - len(beside), len(part))
                beside += part[:room]
                rest.feed(part[room:])
                write_all(file, part)
                writeback.wrote(len(part))
        first = header()
        assert len(first) == reserved
        file.seek(0)
        write_all(file, first)
    front = BlockDigester()
    front.feed(first)
    front.feed(beside)
    return front.size + rest.size, (*front.finish(), *rest.finish())
