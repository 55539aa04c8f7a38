"""Write one file of a step: safetensors or JSON, digested on the way, on disk before it is reported.

No torch here: the bytes come as buffers, from tensors in the trainer.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from titan_ckpt.format.codec import MIN_BYTES, Buffer, Packer
from titan_ckpt.format.digest import BlockDigester
from titan_ckpt.format.header import Entry, encode_header
from titan_ckpt.format.index import FileRecord, Moved
from titan_ckpt.format.names import BLOCK_BYTES, ITEM_BYTES
from titan_ckpt.storage.files import Writeback, write_all, writing
from titan_ckpt.storage.paths import StorePath

# One write call takes at most this much, so that hashing finds the bytes still in the processor's cache.
_WRITE_BYTES = 1 << 20


def write_safetensors(
    folder: StorePath,
    name: str,
    entries: Sequence[Entry],
    buffers: Iterable[Buffer | Iterable[Buffer]],
    metadata: dict[str, str],
) -> FileRecord:
    """Write a safetensors file.

    Args:
        folder: The unfinished step's folder.
        name: The file, relative to it; its parent folder is made.
        entries: The tensors, in the order their bytes come.
        buffers: Each tensor's bytes, little-endian and contiguous, whole or in pieces. Taken one at a time, so that a
            generator can copy one tensor from the device while none other is held.
        metadata: The header's ``__metadata__``.

    Returns:
        The file's record, for the index.

    Raises:
        OSError: If the file cannot be written (no space, read-only, device error).
        ValueError: If a buffer has another size than its entry.
    """
    header = encode_header(entries, metadata)

    def pieces() -> Iterable[Buffer]:
        yield header
        for entry, buffer in zip(entries, buffers, strict=True):
            given = 0
            whole = isinstance(buffer, bytes | bytearray | memoryview)
            for piece in cast("Iterable[Buffer]", [buffer] if whole else buffer):
                given += memoryview(piece).nbytes
                yield piece
            if given != entry.nbytes:
                raise ValueError(f"{entry.name} needs {entry.nbytes} bytes, got {given}.")

    size, blocks = _write(folder, name, pieces())
    return FileRecord(name, size, blocks, len(header))


def write_packed_safetensors(
    folder: StorePath,
    name: str,
    entries: Sequence[Entry],
    buffers: Iterable[Buffer | Iterable[Buffer]],
    metadata: dict[str, str],
) -> FileRecord:
    """Write a safetensors file whose tensors are compressed where that is worth it.

    A compressed tensor stands in the file as a U8 one. What that takes is known only after the data is written, so
    room for the longest possible header is left, and the header is written last.

    Args and errors as `write_safetensors`, but each buffer is whole.
    """
    plain = encode_header(entries, metadata)
    as_bytes = encode_header((Entry(e.name, "U8", (e.nbytes,)) for e in entries), metadata)
    reserved = len(plain) + len(as_bytes)
    packer, stored, moved = Packer(), list[Entry](), list[Moved]()

    def pieces() -> Iterable[Buffer]:
        start = planned = 0
        for entry, buffer in zip(entries, buffers, strict=True):
            raw = _whole(buffer)
            if len(raw) != entry.nbytes:
                raise ValueError(f"{entry.name} needs {entry.nbytes} bytes, got {len(raw)}.")
            item = ITEM_BYTES[entry.dtype]
            if len(raw) >= MIN_BYTES and packer.gains(raw, item):
                lengths: list[int] = []
                for frame in packer.frames(raw, item):
                    lengths.append(memoryview(frame).nbytes)
                    yield frame
                padding = -sum(lengths) % 8  # keeps the tensors after it aligned
                yield bytes(padding)
                stored.append(Entry(entry.name, "U8", (sum(lengths) + padding,)))
                moved.append(Moved(planned, start, tuple(lengths)))
            else:
                yield raw
                stored.append(entry)
                moved.append(Moved(planned, start, None))
            planned += entry.nbytes
            start += stored[-1].nbytes

    path = folder / name
    _make_parent(folder, path)
    # Digests of blocks that hold a piece of the header wait for it; the others are taken as their bytes pass.
    boundary = -(-reserved // BLOCK_BYTES) * BLOCK_BYTES
    beside, rest = bytearray(), BlockDigester()
    with writing(path) as file:
        file.seek(reserved)
        writeback = Writeback(file)
        writeback.wrote(reserved)
        for piece in pieces():
            view = memoryview(piece).cast("B")
            write_all(file, view)
            writeback.wrote(len(view))
            room = min(boundary - reserved - len(beside), len(view))
            beside += view[:room]
            rest.feed(view[room:])
        header = encode_header(stored, metadata, at_least=reserved)
        assert len(header) == reserved
        file.seek(0)
        write_all(file, header)
    front = BlockDigester()
    front.feed(header)
    front.feed(beside)
    packed = any(place.frames is not None for place in moved)
    return FileRecord(
        name,
        front.size + rest.size,
        (*front.finish(), *rest.finish()),
        reserved,
        tuple(moved) if packed else (),
    )


def _whole(buffer: Buffer | Iterable[Buffer]) -> memoryview:
    if isinstance(buffer, bytes | bytearray | memoryview):
        return memoryview(buffer).cast("B")
    return memoryview(b"".join(buffer))


def write_bytes(folder: StorePath, name: str, data: bytes) -> FileRecord:
    """Write a small file (JSON); see `write_safetensors`."""
    size, blocks = _write(folder, name, [data])
    return FileRecord(name, size, blocks)


def _make_parent(folder: StorePath, path: StorePath) -> None:
    """Make ``optim/`` or ``state/``, never ``folder`` itself: a save that was given up must not come back as a folder."""
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
