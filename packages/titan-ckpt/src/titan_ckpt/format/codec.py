"""Digests of blocks, and compression of optimizer state. No torch; numpy is imported when the first frame is shuffled.

A digest is the xxh3-128 of a 4 MiB block. It is computed while the file is written, at three times the speed of a memory
copy. It detects accidents: a flipped bit, a lost page, a swapped file. It does not detect an attacker who rewrites the
digests too.

Compression shuffles bytes and applies zstd. In a float32 number only the byte with sign and exponent is predictable. The
shuffle puts the first bytes of all elements together, then the second bytes, and so on, so that zstd sees predictable
bytes together. On trained state, float32 moments shrink by 16 to 19 % and bfloat16 moments by 31 to 38 %. Plain
zstd gains half of that. Level 9 gains no more than level 1.

A tensor is compressed in separate frames of 4 MiB: a reader of one part decompresses little more than that part. Digests
cover the stored bytes, so damage is found before anything is decompressed.
"""

from collections.abc import Iterable, Iterator

import xxhash
import zstandard

from titan_ckpt.format.names import BLOCK_BYTES

Buffer = bytes | bytearray | memoryview

FRAME_BYTES = 4 << 20
"""Bytes of a tensor in one frame, before compression; the last frame may be shorter."""

MIN_BYTES = 1 << 20
"""Smaller boxes are not compressed: their entries in the index are larger than what compression saves."""

MAX_JSON_BYTES = 4 << 30
"""Upper limit of the JSON in a compressed file, in bytes."""

_LEVEL = 1
_MIN_RATIO = 1.1
_STREAM_BYTES = 4 << 20


class Packer:
    """Compresses frames. One per file, so that the compressor's buffers are reused."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)

    def gains(self, raw: Buffer, item_bytes: int) -> bool:
        """Whether a frame from the middle shrinks by at least a tenth."""
        view = memoryview(raw).cast("B")
        frames = list(frame_ranges(len(view)))
        begin, end = frames[len(frames) // 2]
        return (end - begin) / len(self._compressed(view[begin:end], item_bytes)) >= _MIN_RATIO

    def frames(self, raw: Buffer, item_bytes: int) -> Iterator[Buffer]:
        """The frames of a tensor in order. A frame that does not shrink is returned raw."""
        view = memoryview(raw).cast("B")
        for begin, end in frame_ranges(len(view)):
            packed = self._compressed(view[begin:end], item_bytes)
            yield packed if len(packed) < end - begin else view[begin:end]

    def _compressed(self, frame: memoryview, item_bytes: int) -> bytes:
        return self._zstd.compress(_shuffled(frame, item_bytes))


def unpack_frame(data: Buffer, raw_bytes: int, item_bytes: int) -> Buffer:
    """Undo `Packer.frames` for one frame of ``raw_bytes``, with elements of ``item_bytes``.

    Raises:
        ValueError: If the frame has another size or is not zstd.
    """
    if len(data) == raw_bytes:
        return data
    shuffled = _decompressed(data, raw_bytes, "a compressed frame")
    if len(shuffled) != raw_bytes:
        raise ValueError(f"a compressed frame holds {len(shuffled)} bytes, {raw_bytes} were expected.")
    return _unshuffled(shuffled, item_bytes)


def unpack_json(data: Buffer) -> bytes:
    """Decompress a JSON file, within a limit: 512 times its size, but at least 64 MiB and at most `MAX_JSON_BYTES`.

    An index shrinks to a fiftieth, that of 256 equal ranks to a 170th. An index of 10^6 tensors has 150 MB from 3.

    Raises:
        ValueError: If it is not one zstd frame, or is larger.
    """
    return _decompressed(data, min(MAX_JSON_BYTES, max(64 << 20, 512 * len(data))), "it")


def _decompressed(data: Buffer, most: int, what: str) -> bytes:
    """Decompress one frame, to at most ``most`` bytes, even if its header promises more."""
    try:
        claimed = zstandard.get_frame_parameters(data).content_size
        if claimed not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            if claimed > most:  # zstandard would allocate them, with any limit
                raise ValueError(f"{what} holds {claimed} bytes, {most} were expected.")
            return zstandard.ZstdDecompressor().decompress(data)
        pieces: list[bytes] = []
        with zstandard.ZstdDecompressor().stream_reader(data) as stream:
            while piece := stream.read(_STREAM_BYTES):
                pieces.append(piece)
                if sum(map(len, pieces)) > most:
                    raise ValueError(f"{what} holds more than the {most} bytes that were expected.")
        return b"".join(pieces)
    except zstandard.ZstdError as err:
        raise ValueError(f"{what} cannot be read: {err}") from err


def frame_ranges(nbytes: int) -> Iterator[tuple[int, int]]:
    """First and end byte of each frame of a tensor of ``nbytes``."""
    for begin in range(0, nbytes, FRAME_BYTES):
        yield begin, min(begin + FRAME_BYTES, nbytes)


def _shuffled(frame: memoryview, item_bytes: int) -> Buffer:
    if item_bytes == 1:
        return frame
    import numpy as np

    items = np.frombuffer(frame, np.uint8).reshape(-1, item_bytes)
    planes = np.empty((item_bytes, len(items)), np.uint8)
    for place in range(item_bytes):  # twice as fast as one transpose
        planes[place] = items[:, place]
    return planes.data.cast("B")


def _unshuffled(data: bytes, item_bytes: int) -> Buffer:
    if item_bytes == 1:
        return data
    import numpy as np

    planes = np.frombuffer(data, np.uint8).reshape(item_bytes, -1)
    items = np.empty((planes.shape[1], item_bytes), np.uint8)
    for place in range(item_bytes):
        items[:, place] = planes[place]
    return items.data.cast("B")


def digest(data: Buffer) -> str:
    """The xxh3-128 of ``data`` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def root_digest(blocks: Iterable[str]) -> str:
    """The digest of a file: that of its block digests, joined as text."""
    return digest("".join(blocks).encode())


class BlockDigester:
    """Computes block digests of a stream that comes in pieces of any size."""

    def __init__(self) -> None:
        self.size = 0
        self._blocks: list[str] = []
        self._open = xxhash.xxh3_128()

    def feed(self, data: Buffer) -> None:
        """Add the next bytes."""
        view = memoryview(data)
        while len(view):
            room = BLOCK_BYTES - self.size % BLOCK_BYTES
            piece, view = view[:room], view[room:]
            self._open.update(piece)
            self.size += len(piece)
            if len(piece) == room:
                self._blocks.append(self._open.hexdigest())
                self._open.reset()

    def finish(self) -> list[str]:
        """The digests of all blocks; the last one may be short."""
        return [*self._blocks, self._open.hexdigest()] if self.size % BLOCK_BYTES else list(self._blocks)


def block_digests(data: Buffer) -> list[str]:
    """The digests of all blocks of ``data``."""
    digester = BlockDigester()
    digester.feed(data)
    return digester.finish()
