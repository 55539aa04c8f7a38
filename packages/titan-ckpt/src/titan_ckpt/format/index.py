"""The index of a step: where each box of each tensor is stored, and the digest of every block.

It is JSON compressed with zstd. The boxes of a tensor are stored by column: file, start, and offsets and sizes per
dimension. Long columns follow the JSON (`titan_ckpt.format.columns`). An index of 3,000 tensors on 1,024 ranks opens in
well under a second.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zstandard

from titan_ckpt.format.boxes import Box
from titan_ckpt.format.codec import unpack_json
from titan_ckpt.format.columns import (
    PACKED_FROM,
    Column,
    ColumnTable,
    column_array,
    column_numbers,
    pack_column,
    resolver,
)
from titan_ckpt.format.names import BLOCK_BYTES, FORMAT_VERSION, ITEM_BYTES, parse_object


class Moved(NamedTuple):
    """The place of a tensor in a file with compressed tensors. Bytes are counted from the start of the file's data."""

    planned: int
    """First byte if nothing were compressed."""
    start: int
    """First byte."""
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
    """For a file with compressed tensors: the place of each. The commit moves it into the tensors' boxes."""

    def to_json(self) -> dict[str, Any]:
        """As in the index."""
        return {"name": self.name, "size": self.size, "blocks": "".join(self.blocks), "data_start": self.data_start}

    def to_report(self) -> dict[str, Any]:
        """As a rank reports it for the commit."""
        return {**self.to_json(), "moved": self.moved}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "FileRecord":
        """Undo `to_json` or `to_report`."""
        joined: str = value["blocks"]
        blocks = tuple(joined[i : i + 32] for i in range(0, len(joined), 32))
        moved = tuple(Moved(m[0], m[1], None if m[2] is None else tuple(m[2])) for m in value.get("moved", ()))
        return cls(value["name"], value["size"], blocks, value["data_start"], moved)


class StoredChunk(NamedTuple):
    """A box of a tensor and where its bytes are."""

    file: int
    """Index into `Index.files`."""
    start: int
    """First byte, from the start of the file's data."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    frames: tuple[int, ...] | None = None
    """Stored length of each compressed frame; None if the bytes are plain."""

    @property
    def box(self) -> Box:
        """Where it lies in the tensor."""
        return self.offsets, self.sizes


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
    def count(self) -> int:
        """Number of boxes."""
        return self.columns["count"]

    @property
    def chunks(self) -> list[StoredChunk]:
        """All boxes, unpacked."""
        n = self.count
        files, starts = (column_numbers(self.columns[name], n) for name in ("file", "start"))
        offsets, sizes = ([column_numbers(c, n) for c in self.columns[name]] for name in ("offsets", "sizes"))
        where = list(zip(*offsets, strict=True)) if offsets else [()] * n
        shapes = list(zip(*sizes, strict=True)) if sizes else [()] * n
        listed: list[list[int] | None] = self.columns.get("frames") or [None] * n
        frames = [None if lengths is None else tuple(lengths) for lengths in listed]
        return [StoredChunk(*row) for row in zip(files, starts, where, shapes, frames, strict=True)]

    def overlapping(self, box: Box) -> list[StoredChunk]:
        """The boxes that may overlap ``box``; the others are not unpacked."""
        if self.count <= PACKED_FROM:
            return self.chunks
        import numpy as np

        meets = np.ones(self.count, dtype=bool)
        for at, n, begin, size in zip(*box, self.columns["offsets"], self.columns["sizes"], strict=True):
            begins, sizes = column_array(begin), column_array(size)
            meets &= np.less(begins, at + n) & np.greater(begins + sizes, at)
        frames: list[list[int] | None] = self.columns.get("frames") or []
        found: list[StoredChunk] = []
        for i in np.flatnonzero(meets).tolist():
            file, start = (_entry(self.columns[name], i) for name in ("file", "start"))
            offsets, sizes = (tuple(_entry(c, i) for c in self.columns[name]) for name in ("offsets", "sizes"))
            lengths = frames[i] if frames else None
            found.append(StoredChunk(file, start, offsets, sizes, None if lengths is None else tuple(lengths)))
        return found


def _entry(column: Column, i: int) -> int:
    if isinstance(column, int):
        return column
    return column[i] if isinstance(column, list) else int(column.array[i])


def pack_tensor(dtype: str, shape: Sequence[int], chunks: Sequence[StoredChunk]) -> StoredTensor:
    """Store a tensor's boxes by column."""
    dims = range(len(shape))
    columns: dict[str, Any] = {
        "count": len(chunks),
        "file": pack_column([c.file for c in chunks]),
        "start": pack_column([c.start for c in chunks]),
        "offsets": [pack_column([c.offsets[d] for c in chunks]) for d in dims],
        "sizes": [pack_column([c.sizes[d] for c in chunks]) for d in dims],
    }
    if any(c.frames is not None for c in chunks):
        columns["frames"] = [c.frames for c in chunks]
    return StoredTensor(dtype, tuple(shape), columns)


def move_boxes(
    tensors: dict[str, dict[str, StoredTensor]], files: Sequence[FileRecord]
) -> dict[str, dict[str, StoredTensor]]:
    """The tensors, with each box at the place its writer reported; unchanged if nothing was compressed."""
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


def pack_tensors(tensors: Mapping[str, Mapping[str, StoredTensor]], table: ColumnTable) -> dict[str, Any]:
    """Section to key to tensor, as JSON data; long columns go to ``table``."""
    return {
        section: {
            key: {"dtype": t.dtype, "shape": t.shape, "chunks": table.refer(t.columns)} for key, t in entries.items()
        }
        for section, entries in tensors.items()
    }


def unpack_tensors(value: Mapping[str, Any], sizes: Any, data: bytes) -> dict[str, dict[str, StoredTensor]]:
    """Undo `pack_tensors`, given the table's sizes and data.

    Raises:
        ValueError: If a column is missing. Values of the wrong type may also raise `LookupError`, `TypeError` or
            `AttributeError`.
    """
    resolve = resolver(sizes, data)
    return {
        section: {k: StoredTensor(t["dtype"], tuple(t["shape"]), resolve(t["chunks"])) for k, t in entries.items()}
        for section, entries in value.items()
    }


@dataclass(frozen=True, slots=True)
class Index:
    """What is needed to find and check a tensor's bytes."""

    files: tuple[FileRecord, ...]
    tensors: dict[str, dict[str, StoredTensor]]
    """Section to key to tensor."""
    tied: dict[str, str]
    """Additional name of a model tensor, to the name it is stored under."""
    _numbers: dict[str, int] = field(default_factory=dict[str, int], repr=False, compare=False)

    def find(self, section: str, key: str) -> StoredTensor | None:
        """The tensor of a name, or of the name it is tied to; None if there is none."""
        tensors = self.tensors.get(section, {})
        return tensors.get(key) or (tensors.get(self.tied.get(key, "")) if section == "model" else None)

    def file_number(self, name: str) -> int | None:
        """Index in `files` of a file name; None if it is not listed."""
        if not self._numbers:
            self._numbers.update({record.name: number for number, record in enumerate(self.files)})
        return self._numbers.get(name)

    def encode(self) -> tuple[bytes, int]:
        """The bytes to store, and the lowest version of the format that can hold them."""
        table = ColumnTable()
        tensors = pack_tensors(self.tensors, table)
        compressed = any("frames" in t.columns for entries in self.tensors.values() for t in entries.values())
        columns = table.sizes()
        version = 3 if columns else 2 if compressed else 1
        value: dict[str, Any] = {
            "format": version,
            "block_bytes": BLOCK_BYTES,
            "files": [record.to_json() for record in self.files],
            "tensors": tensors,
            "tied": self.tied,
        }
        if columns:
            value["columns"] = columns
        text = json.dumps(value, separators=(",", ":")).encode()
        if columns:
            text += b"\0" + table.data()
        return zstandard.ZstdCompressor(level=3).compress(text), version

    @classmethod
    def decode(cls, data: bytes) -> "Index":
        """Undo `encode`. Check the bytes against the manifest's digest first, and the result with `validate` afterwards.

        Raises:
            ValueError: If the bytes are not an index, or have a newer format. Missing keys and values of the wrong
                type may also raise `LookupError`, `TypeError` or `AttributeError`.
        """
        try:
            text, _, columns = unpack_json(data).partition(b"\0")
            value = parse_object(text, "its text")
        except ValueError as err:
            raise ValueError(f"the index is not zstd-compressed JSON: {err}") from err
        if value["format"] > FORMAT_VERSION:
            raise ValueError(f"format {value['format']} is newer than {FORMAT_VERSION}: update titan-ckpt to read it.")
        tensors = unpack_tensors(value["tensors"], value.get("columns", []), columns)
        return cls(tuple(FileRecord.from_json(f) for f in value["files"]), tensors, value["tied"])
