"""A synchronous save."""

import contextlib
import json
from collections.abc import Callable

from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import write_failure
from titan_ckpt.format.index import FileRecord
from titan_ckpt.format.tagged_json import dump_json
from titan_ckpt.save.job import WriteJob, commit_job, write_job
from titan_ckpt.save.prepare import Planned
from titan_ckpt.state.leaves import tensor_bytes
from titan_ckpt.steps import commit
from titan_ckpt.storage.files import remove_tree
from titan_ckpt.storage.paths import StorePath


def save_now(job: WriteJob, planned: Planned, comm: ByteComm) -> StorePath:
    """Write and commit in this process; return the step's folder. Collective.

    Raises:
        CheckpointError: If a rank cannot write. The step does not exist then, and earlier steps are intact.
    """
    doing, final = f"save of step {job.step}", ""
    records: list[FileRecord] = []

    def commit_all(reports: list[bytes]) -> None:
        nonlocal final
        path, left = commit_job(job, [FileRecord.from_json(r) for report in reports for r in json.loads(report)])
        final = path.name
        for folder in left:
            remove_tree(folder)

    try:
        error = _attempt(lambda: records.extend(write_job(job, map(tensor_bytes, planned.views()))), job)
        reports = comm.gather(dump_json([record.to_report() for record in records]))
        comm.agree(error, doing)
        if reports is not None:
            error = _attempt(lambda: commit_all(reports), job)
        comm.agree(error, doing)
    except Exception:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                commit.discard(job.folder)
        raise
    return job.folder.parent / comm.broadcast(final.encode() if comm.rank == 0 else None).decode()


def _attempt(action: Callable[[], None], job: WriteJob) -> Exception | None:
    try:
        action()
    except OSError as err:
        return write_failure(err, job.folder, job.rank)
    except Exception as err:  # of any kind: the other ranks must not hang
        return err
    return None
