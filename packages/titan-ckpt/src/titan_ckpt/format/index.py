"""The index of a step: which bytes of which file are which part of which tensor, and every block's digest.

JSON compressed with zstd. A tensor's boxes are stored by column (file, start, offsets and sizes a dimension); a
column whose entries are all equal is stored as that one number. At 256 ranks with 900 tensors each that is well under
a megabyte and parses in a fraction of a second, where pickled metadata of the same takes 44 MB and 6 s.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zstandard

from titan_ckpt.format.codec import unpack_json
from titan_ckpt.format.names import BLOCK_BYTES, FORMAT_VERSION, ITEM_BYTES, parse_object


class Moved(NamedTuple):
    """Where a tensor of a file with compressed tensors lies."""

    planned: int
    """Where it would start if nothing were compressed; bytes from the start of the file's data, as the next."""
    start: int
    frames: tuple[int, ...] | None
    """Stored length of each frame; None if it is not compressed."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a step, as its writer reported it."""

    name: str
    """Path relative to the step's folder, with forward slashes."""
    size: int
    """Bytes."""
    blocks: tuple[str, ...]
    """Digest of each 4 MiB block, 32 hex digits."""
    data_start: int = 0
    """Where tensor data begins; 0 for files that hold no tensors."""
    moved: tuple[Moved, ...] = ()
    """Of a file with compressed tensors: where each tensor went. Reported to the commit, which writes it into the
    tensors' boxes; not kept with the file."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; the digests joined, since they are all of one length."""
        return {"name": self.name, "size": self.size, "blocks": "".join(self.blocks), "data_start": self.data_start}

    def to_report(self) -> dict[str, Any]:
        """As a JSON object, with what the commit needs to know beside."""
        return {**self.to_json(), "moved": self.moved}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "FileRecord":
        """Undo `to_json` or `to_report`."""
        joined: str = value["blocks"]
        blocks = tuple(joined[i : i + 32] for i in range(0, len(joined), 32))
        moved = tuple(Moved(m[0], m[1], None if m[2] is None else tuple(m[2])) for m in value.get("moved", ()))
        return cls(value["name"], value["size"], blocks, value["data_start"], moved)


class StoredChunk(NamedTuple):
    """A box of a tensor and the bytes that hold it."""

    file: int
    """Index into `Index.files`."""
    start: int
    """First byte, from the start of the file's data."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    frames: tuple[int, ...] | None = None
    """Stored length of each compressed frame; None if the bytes are plain."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the step holds it."""

    dtype: str
    """Safetensors dtype name."""
    shape: tuple[int, ...]
    columns: dict[str, Any] = field(repr=False)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def chunks(self) -> list[StoredChunk]:
        """The boxes, unpacked from their columns."""
        n = self.columns["count"]
        files = _unpack(self.columns["file"], n)
        starts = _unpack(self.columns["start"], n)
        offsets = [_unpack(column, n) for column in self.columns["offsets"]]
        sizes = [_unpack(column, n) for column in self.columns["sizes"]]
        where = list(zip(*offsets, strict=True)) if offsets else [()] * n
        shapes = list(zip(*sizes, strict=True)) if sizes else [()] * n
        listed: list[list[int] | None] = self.columns.get("frames") or [None] * n
        frames = [None if lengths is None else tuple(lengths) for lengths in listed]
        return [StoredChunk(*row) for row in zip(files, starts, where, shapes, frames, strict=True)]


def pack_tensor(dtype: str, shape: Sequence[int], chunks: Sequence[StoredChunk]) -> StoredTensor:
    """Store a tensor's boxes by column."""
    boxes = [(c.offsets, c.sizes) for c in chunks]
    tensor = pack_columns(dtype, shape, [c.file for c in chunks], [c.start for c in chunks], boxes)
    if any(c.frames is not None for c in chunks):
        tensor.columns["frames"] = [c.frames for c in chunks]
    return tensor


def pack_columns(
    dtype: str,
    shape: Sequence[int],
    files: list[int],
    starts: list[int],
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> StoredTensor:
    """Store a tensor's boxes (offsets and sizes), given where each lies: its file and its first byte there."""
    columns: dict[str, Any] = {
        "count": len(boxes),
        "file": _pack(files),
        "start": _pack(starts),
        "offsets": [_pack([offsets[d] for offsets, _ in boxes]) for d in range(len(shape))],
        "sizes": [_pack([sizes[d] for _, sizes in boxes]) for d in range(len(shape))],
    }
    return StoredTensor(dtype, tuple(shape), columns)


def move_boxes(
    tensors: dict[str, dict[str, StoredTensor]], files: Sequence[FileRecord]
) -> dict[str, dict[str, StoredTensor]]:
    """The tensors, with boxes where the files' writers say they went; the same if nothing was compressed."""
    places = {
        number: {moved.planned: moved for moved in record.moved} for number, record in enumerate(files) if record.moved
    }

    def moved(chunk: StoredChunk) -> StoredChunk:
        if chunk.file not in places or not math.prod(chunk.sizes):
            return chunk
        place = places[chunk.file][chunk.start]
        return chunk._replace(start=place.start, frames=place.frames)

    if not places:
        return tensors
    return {
        section: {k: pack_tensor(t.dtype, t.shape, [moved(c) for c in t.chunks]) for k, t in entries.items()}
        for section, entries in tensors.items()
    }


@dataclass(frozen=True, slots=True)
class Index:
    """Everything needed to find and check a tensor's bytes."""

    files: tuple[FileRecord, ...]
    tensors: dict[str, dict[str, StoredTensor]]
    """Section to key to tensor."""
    tied: dict[str, str]
    """Model key to the key it shares its tensor with, for weights saved once."""

    def find(self, section: str, key: str) -> StoredTensor | None:
        """The tensor of that name, through ties; None if there is none."""
        tensors = self.tensors.get(section, {})
        return tensors.get(key) or (tensors.get(self.tied.get(key, "")) if section == "model" else None)

    def file(self, name: str) -> FileRecord | None:
        """The record of a file, by name."""
        return next((record for record in self.files if record.name == name), None)

    @property
    def format(self) -> int:
        """The lowest version of the format that can hold it."""
        return 2 if any("frames" in t.columns for entries in self.tensors.values() for t in entries.values()) else 1

    def encode(self) -> bytes:
        """As stored."""
        value = {
            "format": self.format,
            "block_bytes": BLOCK_BYTES,
            "files": [record.to_json() for record in self.files],
            "tensors": {
                section: {key: {"dtype": t.dtype, "shape": t.shape, "chunks": t.columns} for key, t in tensors.items()}
                for section, tensors in self.tensors.items()
            },
            "tied": self.tied,
        }
        text = json.dumps(value, separators=(",", ":")).encode()
        return zstandard.ZstdCompressor(level=3).compress(text)

    @classmethod
    def decode(cls, data: bytes) -> "Index":
        """Undo `encode`. The bytes must have been checked against the manifest's digest.

        What comes out may still name anything; `titan_ckpt.format.validate` checks it before it is used.

        Raises:
            ValueError: If they are not an index, or of a newer format. Where keys are missing or values are of the wrong
                type, also `LookupError`, `TypeError` or `AttributeError`.
        """
        try:
            value = parse_object(unpack_json(data), "its text")
        except ValueError as err:
            raise ValueError(f"the index is not zstd-compressed JSON: {err}") from err
        if value["format"] > FORMAT_VERSION:
            raise ValueError(f"format {value['format']} is newer than {FORMAT_VERSION}: update titan-ckpt to read it.")
        tensors = {
            section: {k: StoredTensor(t["dtype"], tuple(t["shape"]), t["chunks"]) for k, t in entries.items()}
            for section, entries in value["tensors"].items()
        }
        return cls(tuple(FileRecord.from_json(f) for f in value["files"]), tensors, value["tied"])


def _pack(column: list[int]) -> int | list[int]:
    return column[0] if column and column.count(column[0]) == len(column) else column


def _unpack(column: int | list[int], count: int) -> list[int]:
    return [column] * count if isinstance(column, int) else column
