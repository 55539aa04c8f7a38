"""What one rank writes for one save, as plain data: made by the trainer, carried out there or in the saver process.

No torch here. A job names the rank's files, their tensors in file order and its JSON files; where the bytes come from
is the caller's business (tensors, or an arena of staged bytes). Rank 0's job also holds what the commit needs.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_ckpt import _commit
from titan_ckpt._digest import Buffer
from titan_ckpt._format import Entry
from titan_ckpt._index import FileRecord, Index, StoredTensor, move_boxes
from titan_ckpt._retention import Retention
from titan_ckpt._storage import StorePath, decode_path, encode_path
from titan_ckpt._write import write_bytes, write_packed_safetensors, write_safetensors


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a job."""

    name: str
    entries: tuple[Entry, ...]
    compress: bool = False
    """Whether to compress tensors where that is worth it."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What stays from save to save while the structure of the state does; compared by identity.

    It is by far the larger part of a job where tensors are many, so it is made, sent to the saver and decoded once.
    """

    shards: tuple[Shard, ...]
    """This rank's safetensors files."""
    shard_names: tuple[str, ...] = ()
    """Every rank's safetensors files, in the order the tensors' chunks count them; on rank 0."""
    tensors: dict[str, dict[str, StoredTensor]] = field(default_factory=dict[str, dict[str, StoredTensor]])
    """Section to key to tensor; on rank 0."""

    def encode(self) -> bytes:
        """As JSON, for the saver process."""
        value = {
            "shards": [
                [shard.name, shard.compress, [[e.name, e.dtype, e.shape] for e in shard.entries]]
                for shard in self.shards
            ],
            "shard_names": self.shard_names,
            "tensors": {
                section: {key: [t.dtype, t.shape, t.columns] for key, t in entries.items()}
                for section, entries in self.tensors.items()
            },
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Layout":
        """Undo `encode`."""
        value: dict[str, Any] = json.loads(data)
        shards = tuple(
            Shard(name, tuple(Entry(key, dtype, tuple(shape)) for key, dtype, shape in entries), compress)
            for name, compress, entries in value["shards"]
        )
        tensors = {
            section: {key: StoredTensor(dtype, tuple(shape), columns) for key, (dtype, shape, columns) in kept.items()}
            for section, kept in value["tensors"].items()
        }
        return cls(shards, tuple(value["shard_names"]), tensors)


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
class Job:
    """One rank's part of one save."""

    folder: StorePath
    """The unfinished step's folder."""
    step: int
    save_id: str
    rank: int
    world_size: int
    layout: Layout
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
    def decode(cls, data: bytes, layout: Layout) -> "Job":
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


def write_job(job: Job, buffers: Iterable[Buffer | Iterable[Buffer]]) -> list[FileRecord]:
    """Write a rank's files and bring them to disk.

    Args:
        job: What to write.
        buffers: Bytes of each tensor, whole or in pieces, shard after shard, entry after entry.

    Raises:
        OSError: If the disk refuses.
    """
    supply = iter(buffers)
    records: list[FileRecord] = []
    for shard in job.layout.shards:
        pieces = (next(supply) for _ in shard.entries)
        # Older readers of safetensors files refuse one that does not say it came from PyTorch.
        write = write_packed_safetensors if shard.compress else write_safetensors
        records.append(write(job.folder, shard.name, shard.entries, pieces, {"format": "pt"}))
    records += [write_bytes(job.folder, name, text.encode()) for name, text in job.texts]
    return records


def commit_job(job: Job, records: Iterable[FileRecord]) -> tuple[StorePath, list[StorePath]]:
    """Rank 0: commit the step from every rank's records, then retire what retention no longer keeps.

    Returns:
        The step's folder, and folders that are steps no longer: delete them with `remove_tree` when there is time.

    Raises:
        OSError: If the disk refuses; the step does not exist then.
    """
    assert job.lead is not None
    lead, layout = job.lead, job.layout
    by_name = {record.name: record for record in records}
    shards = [by_name.pop(name) for name in layout.shard_names]
    files = [*shards, *(by_name[name] for name in sorted(by_name))]
    path = _commit.commit_save(
        job.folder,
        step=job.step,
        save_id=job.save_id,
        world_size=job.world_size,
        files=files,
        index=Index(tuple(files), move_boxes(layout.tensors, files), lead.tied),
        versions=lead.versions,
        metrics=lead.metrics,
    )
    return path, _commit.purge(path, job.step, lead.retention, lead.distrusted)
