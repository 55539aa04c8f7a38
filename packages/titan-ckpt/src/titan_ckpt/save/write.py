"""Write one file of a step, safetensors or JSON, with block digests. It is on disk when the function returns. No torch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

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
    folder: StorePath, name: str, entries: Sequence[Entry], buffers: Iterable[Buffer | Iterable[Buffer]]
) -> FileRecord:
    """Write a safetensors file and return its record.

    Args:
        folder: The unfinished step's folder.
        name: The file, relative to ``folder``. Its parent folder is made.
        entries: The tensors, in file order.
        buffers: Each tensor's bytes, little-endian and contiguous, whole or in pieces. They are taken one at a time, so a
            generator holds one tensor at a time.

    Raises:
        OSError: If the file cannot be written (no space, read-only, device error).
        ValueError: If a buffer has another size than its entry.
    """
    header = encode_header(entries, _METADATA)

    def pieces() -> Iterable[Buffer]:
        yield header
        for entry, buffer in zip(entries, buffers, strict=True):
            given = 0
            whole = isinstance(buffer, bytes | bytearray | memoryview)
            for piece in cast("Iterable[Buffer]", [buffer] if whole else buffer):
                given += memoryview(piece).nbytes
                yield piece
            _check_size(entry, given)

    size, blocks = _write(folder, name, pieces())
    return FileRecord(name, size, blocks, len(header))


class _PackedPieces:
    """The data of a file whose tensors are compressed if they shrink, and the place of each."""

    def __init__(self, entries: Sequence[Entry], buffers: Iterable[Buffer | Iterable[Buffer]]) -> None:
        self._entries, self._buffers, self._packer = entries, buffers, Packer()
        self.stored: list[Entry] = []
        self.moved: list[Moved] = []

    def __iter__(self) -> Iterator[Buffer]:
        start = planned = 0
        for entry, buffer in zip(self._entries, self._buffers, strict=True):
            whole = isinstance(buffer, bytes | bytearray | memoryview)
            raw = memoryview(cast(Any, buffer) if whole else b"".join(cast(Any, buffer))).cast("B")
            _check_size(entry, len(raw))
            item, lengths = ITEM_BYTES[entry.dtype], list[int]()
            if len(raw) >= MIN_BYTES and self._packer.gains(raw, item):
                for frame in self._packer.frames(raw, item):
                    lengths.append(memoryview(frame).nbytes)
                    yield frame
                padding = -sum(lengths) % 8  # keeps the tensors after it aligned
                yield bytes(padding)
                self.stored.append(Entry(entry.name, "U8", (sum(lengths) + padding,)))
            else:
                yield raw
                self.stored.append(entry)
            self.moved.append(Moved(planned, start, tuple(lengths) or None))
            planned += entry.nbytes
            start += self.stored[-1].nbytes


def write_packed_safetensors(
    folder: StorePath, name: str, entries: Sequence[Entry], buffers: Iterable[Buffer | Iterable[Buffer]]
) -> FileRecord:
    """As `write_safetensors`, but tensors are compressed if they shrink. A compressed tensor is U8 in the file.

    The header is known only after the data. So space for the longest possible header is left, and it is written last.
    """
    as_bytes = [Entry(e.name, "U8", (e.nbytes,)) for e in entries]
    reserved = len(encode_header(entries, _METADATA)) + len(encode_header(as_bytes, _METADATA))
    pieces, path = _PackedPieces(entries, buffers), folder / name
    _make_parent(folder, path)
    # The digests of blocks with a piece of the header are computed last.
    boundary = -(-reserved // BLOCK_BYTES) * BLOCK_BYTES
    beside, rest = bytearray(), BlockDigester()
    with writing(path) as file:
        file.seek(reserved)
        writeback = Writeback(file)
        writeback.wrote(reserved)
        for piece in pieces:
            view = memoryview(piece).cast("B")
            write_all(file, view)
            writeback.wrote(len(view))
            room = min(boundary - reserved - len(beside), len(view))
            beside += view[:room]
            rest.feed(view[room:])
        header = encode_header(pieces.stored, _METADATA, at_least=reserved)
        assert len(header) == reserved
        file.seek(0)
        write_all(file, header)
    front = BlockDigester()
    front.feed(header)
    front.feed(beside)
    moved = tuple(pieces.moved) if any(place.frames for place in pieces.moved) else ()
    return FileRecord(name, front.size + rest.size, (*front.finish(), *rest.finish()), reserved, moved)


def write_bytes(folder: StorePath, name: str, data: bytes) -> FileRecord:
    """Write a small file and return its record."""
    size, blocks = _write(folder, name, [data])
    return FileRecord(name, size, blocks)


def _check_size(entry: Entry, given: int) -> None:
    if given != entry.nbytes:
        raise ValueError(f"{entry.name} needs {entry.nbytes} bytes, got {given}.")


def _make_parent(folder: StorePath, path: StorePath) -> None:
    """Make ``optim/`` or ``state/``, but never ``folder``: the folder of a failed save must not come back."""
    if path.parent != folder:
        path.parent.mkdir(exist_ok=True)


def _write(folder: StorePath, name: str, pieces: Iterable[Buffer]) -> tuple[int, tuple[str, ...]]:
    path = folder / name
    _make_parent(folder, path)
    digester = BlockDigester()
    with writing(path) as file:
        writeback = Writeback(file)
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for at in range(0, len(view), _WRITE_BYTES):
                part = view[at : at + _WRITE_BYTES]
                digester.feed(part)
                write_all(file, part)
                writeback.wrote(len(part))
    return digester.size, tuple(digester.finish())
