"""What one rank writes for one save, as plain data: made by the trainer, carried out there or in the saver process.

No torch here. A job names the rank's files, their tensors in file order and its JSON files; where the bytes come from
is the caller's business (tensors, or an arena of staged bytes). Rank 0's job also holds what the commit needs.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_ckpt.format.columns import ColumnTable
from titan_ckpt.format.header import Entry
from titan_ckpt.format.index import StoredTensor, pack_tensors, unpack_tensors
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.paths import StorePath, decode_path, encode_path

# Pieces of the arena start at multiples of this, so that every dtype is aligned.
ARENA_ALIGN = 64


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One safetensors file of a job."""

    name: str
    entries: tuple[Entry, ...]
    compress: bool = False
    """Whether to compress tensors where that is worth it."""


@dataclass(frozen=True, slots=True, eq=False)
class SaveLayout:
    """What stays from save to save while the structure of the state does; compared by identity.

    It is by far the larger part of a job where tensors are many, so it is made, sent to the saver and decoded once.
    """

    files: tuple[TensorFile, ...]
    """This rank's safetensors files."""
    file_names: tuple[str, ...] = ()
    """Every rank's safetensors files, in the order the tensors' chunks count them; on rank 0."""
    tensors: dict[str, dict[str, StoredTensor]] = field(default_factory=dict[str, dict[str, StoredTensor]])
    """Section to key to tensor; on rank 0."""

    def encode(self) -> bytes:
        """For the saver process: JSON, then the long columns."""
        table = ColumnTable()
        value = {
            "files": [
                [file.name, file.compress, [[e.name, e.dtype, e.shape] for e in file.entries]] for file in self.files
            ],
            "file_names": self.file_names,
            "tensors": pack_tensors(self.tensors, table),
            "columns": table.sizes(),
        }
        return json.dumps(value, separators=(",", ":")).encode() + b"\0" + table.data()

    @classmethod
    def decode(cls, data: bytes) -> "SaveLayout":
        """Undo `encode`."""
        text, _, columns = data.partition(b"\0")
        value: dict[str, Any] = json.loads(text)
        files = tuple(
            TensorFile(name, tuple(Entry(key, dtype, tuple(shape)) for key, dtype, shape in entries), compress)
            for name, compress, entries in value["files"]
        )
        return cls(files, tuple(value["file_names"]), unpack_tensors(value["tensors"], value["columns"], columns))


@dataclass(frozen=True, slots=True)
class Lead:
    """What rank 0 needs to commit, beside the layout."""

    tied: dict[str, str]
    versions: dict[str, str]
    metrics: dict[str, float]
    retention: Retention
    distrusted: tuple[int, ...] = ()
    """Steps that a restore found damaged: they do not count for retention."""


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One rank's part of one save."""

    folder: StorePath
    """The unfinished step's folder."""
    step: int
    save_id: str
    rank: int
    world_size: int
    layout: SaveLayout
    texts: tuple[tuple[str, str], ...]
    """JSON files: name and content."""
    lead: Lead | None
    """Only on rank 0."""

    def encode(self) -> bytes:
        """All but the layout as JSON, for the saver process."""
        value = {
            "folder": encode_path(self.folder),
            "step": self.step,
            "save_id": self.save_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "texts": self.texts,
            "lead": None if self.lead is None else asdict(self.lead),
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, layout: SaveLayout) -> "WriteJob":
        """Undo `encode`."""
        value: dict[str, Any] = json.loads(data)
        told = value["lead"]
        lead = None
        if told is not None:
            retention, distrusted = Retention(**told["retention"]), tuple(told["distrusted"])
            lead = Lead(told["tied"], told["versions"], told["metrics"], retention, distrusted)
        texts = tuple((name, text) for name, text in value["texts"])
        rest = {key: value[key] for key in ("step", "save_id", "rank", "world_size")}
        return cls(folder=decode_path(value["folder"]), layout=layout, texts=texts, lead=lead, **rest)


def arena_starts(layout: SaveLayout) -> tuple[list[tuple[int, int]], int]:
    """Where each tensor of a layout lies in the arena, (first byte, size), and the arena's size."""
    starts: list[tuple[int, int]] = []
    at = 0
    for file in layout.files:
        for entry in file.entries:
            starts.append((at, entry.nbytes))
            at += -(-entry.nbytes // ARENA_ALIGN) * ARENA_ALIGN
    return starts, at
