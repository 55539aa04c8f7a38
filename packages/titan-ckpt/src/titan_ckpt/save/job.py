"""One rank's part of a save as plain data, and how it is written and committed. No torch.

A job names the rank's safetensors files, their tensors in file order, and its JSON files. The caller supplies the bytes:
the trainer those of its tensors, the saver process those of the arena. Rank 0's job also has what the commit needs.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_ckpt.format.codec import Buffer
from titan_ckpt.format.columns import ColumnTable
from titan_ckpt.format.index import FileRecord, Index, StoredTensor, move_boxes, pack_tensors, unpack_tensors
from titan_ckpt.format.names import Entry
from titan_ckpt.save.write import write_bytes, write_safetensors
from titan_ckpt.steps import commit
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.files import remove_tree
from titan_ckpt.storage.paths import StorePath, decode_path, encode_path

# Tensors in the arena start at multiples of this, so that every dtype is aligned.
ARENA_ALIGN = 64


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One safetensors file of a job."""

    name: str
    entries: tuple[Entry, ...]
    compress: bool = False
    """Whether to compress the tensors that shrink."""


@dataclass(frozen=True, slots=True, eq=False)
class SaveLayout:
    """What stays the same from save to save while the structure of the state does. Compared by identity.

    With many tensors it is by far the largest part of a job. So it is made once, and sent to the saver once.
    """

    files: tuple[TensorFile, ...]
    """This rank's safetensors files."""
    file_names: tuple[str, ...] = ()
    """On rank 0: the safetensors files of every rank, in the order of the tensors' file numbers."""
    tensors: dict[str, dict[str, StoredTensor]] = field(default_factory=dict[str, dict[str, StoredTensor]])
    """On rank 0: section to key to tensor."""

    def encode(self) -> bytes:
        """As a message: JSON, then the packed columns."""
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
    """What rank 0 needs for the commit, besides the layout."""

    tied: dict[str, str]
    versions: dict[str, str]
    metrics: dict[str, float]
    retention: Retention
    distrusted: tuple[int, ...] = ()
    """Steps that a restore found damaged. Retention does not count them."""


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
    """Name and content of each JSON file."""
    lead: Lead | None
    """Only on rank 0."""

    def encode(self) -> bytes:
        """The job as a message, without the layout."""
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
    """First byte and size of each tensor of a layout in the arena, and the arena's size."""
    starts: list[tuple[int, int]] = []
    at = 0
    for file in layout.files:
        for entry in file.entries:
            starts.append((at, entry.nbytes))
            at += -(-entry.nbytes // ARENA_ALIGN) * ARENA_ALIGN
    return starts, at


def write_job(job: WriteJob, buffers: Iterable[Buffer | Iterable[Buffer]]) -> list[FileRecord]:
    """Write a rank's files and bring them to disk.

    ``buffers`` has the bytes of each tensor, whole or in pieces, in the order of the layout.
    """
    supply = iter(buffers)
    records: list[FileRecord] = []
    for file in job.layout.files:
        mine = (next(supply) for _ in file.entries)
        records.append(write_safetensors(job.folder, file.name, file.entries, mine, compress=file.compress))
    return records + [write_bytes(job.folder, name, text.encode()) for name, text in job.texts]


def commit_job(job: WriteJob, records: Iterable[FileRecord]) -> tuple[StorePath, list[StorePath]]:
    """On rank 0: commit the step with every rank's records, then retire the steps that retention does not keep.

    Returns:
        The step's folder, and the retired folders, to delete with `remove_tree`.

    Raises:
        OSError: If the commit fails. The step does not exist then.
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


def commit_now(job: WriteJob, records: Iterable[FileRecord]) -> StorePath:
    """As `commit_job`; also deletes the retired folders."""
    path, left = commit_job(job, records)
    for folder in left:
        remove_tree(folder)
    return path
