"""Carry out one rank's part of a save, in the trainer or in the saver process. No torch."""

from collections.abc import Iterable

from titan_ckpt.format.codec import Buffer
from titan_ckpt.format.index import FileRecord, Index, move_boxes
from titan_ckpt.save.job import WriteJob
from titan_ckpt.save.write import write_bytes, write_packed_safetensors, write_safetensors
from titan_ckpt.steps import commit
from titan_ckpt.storage.paths import StorePath


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
        pieces = (next(supply) for _ in file.entries)
        # Older readers of safetensors files refuse one that does not say it came from PyTorch.
        write = write_packed_safetensors if file.compress else write_safetensors
        records.append(write(job.folder, file.name, file.entries, pieces, {"format": "pt"}))
    records += [write_bytes(job.folder, name, text.encode()) for name, text in job.texts]
    return records


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
    files = [*files, *(by_name[name] for name in sorted(by_name))]
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
