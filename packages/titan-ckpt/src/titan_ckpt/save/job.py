"""One rank's part of a save, as plain data, and how it is carried out: in the trainer or in the saver process.

No torch here. A job names the rank's files, their tensors in file order and its JSON files; the caller supplies the bytes
(of tensors, or of staged memory). Rank 0's job also holds what the commit needs.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_ckpt.format.codec import Buffer
from titan_ckpt.format.columns import ColumnTable
from titan_ckpt.format.index import FileRecord, Index, StoredTensor, move_boxes, pack_tensors, unpack_tensors
from titan_ckpt.format.names import Entry
from titan_ckpt.save.write import write_bytes, write_packed_safetensors, write_safetensors
from titan_ckpt.steps import commit
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

    By far the larger part of a job where tensors are many, so it is made, sent to the saver and decoded once.
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
            "files": [[f.name, f.compress, [[e.name, e.dtype, e.shape] for e in f.entries]] for f in self.files],
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
        value = {name: getattr(self, name) for name in ("step", "save_id", "rank", "world_size", "texts")}
        value |= {"folder": encode_path(self.folder), "lead": None if self.lead is None else asdict(self.lead)}
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, layout: SaveLayout) -> "WriteJob":
        """Undo `encode`."""
        value: dict[str, Any] = json.loads(data)
        lead: dict[str, Any] | None = value["lead"]
        if lead is not None:
            lead["retention"] = Retention(**lead["retention"])
            lead["distrusted"] = tuple(lead["distrusted"])
            value["lead"] = Lead(**lead)
        value["texts"] = tuple((name, text) for name, text in value["texts"])
        value["folder"] = decode_path(value["folder"])
        return cls(**value, layout=layout)


def arena_starts(layout: SaveLayout) -> tuple[list[tuple[int, int]], int]:
    """Where each tensor of a layout lies in the arena, (first byte, size), and the arena's size."""
    starts: list[tuple[int, int]] = []
    at = 0
    for file in layout.files:
        for entry in file.entries:
            starts.append((at, entry.nbytes))
            at += -(-entry.nbytes // ARENA_ALIGN) * ARENA_ALIGN
    return starts, at


def write_job(job: WriteJob, buffers: Iterable[Buffer | Iterable[Buffer]]) -> list[FileRecord]:
    """Write a rank's files and bring them to disk.

    Args:
        job: What to write.
        buffers: Bytes of each tensor, whole or in pieces, file after file, entry after entry.

    Raises:
        OSError: If the disk refuses.
    """
    supply = iter(buffers)
    records: list[FileRecord] = []
    for file in job.layout.files:
        write = write_packed_safetensors if file.compress else write_safetensors
        records.append(write(job.folder, file.name, file.entries, (next(supply) for _ in file.entries)))
    return records + [write_bytes(job.folder, name, text.encode()) for name, text in job.texts]


def commit_job(job: WriteJob, records: Iterable[FileRecord]) -> tuple[StorePath, list[StorePath]]:
    """Rank 0: commit the step from every rank's records, then retire what retention no longer keeps.

    Returns:
        The step's folder, and folders that are steps no longer: delete them with `remove_tree` when there is time.

    Raises:
        OSError: If the disk refuses; the step does not exist then.
    """
    assert job.lead is not None
    lead, layout = job.lead, job.layout
    by_name = {record.name: record for record in records}
    files = [by_name.pop(name) for name in layout.file_names]
    files += [by_name[name] for name in sorted(by_name)]
    path = commit.commit_save(
        job.folder,
        step=job.step,
        save_id=job.save_id,
        world_size=job.world_size,
        files=files,
        index=Index(tuple(files), move_boxes(layout.tensors, files), lead.tied),
        versions=lead.versions,
        metrics=lead.metrics,
    )
    return path, commit.purge(path, job.step, lead.retention, lead.distrusted)
