"""Carry out a save in this process, with every rank."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import write_failure
from titan_ckpt.format import tagged_json
from titan_ckpt.format.index import FileRecord
from titan_ckpt.save.carry_out import commit_job, write_job
from titan_ckpt.save.job import WriteJob
from titan_ckpt.save.prepare import Planned
from titan_ckpt.state.leaves import tensor_bytes
from titan_ckpt.steps import commit
from titan_ckpt.storage.files import remove_tree
from titan_ckpt.storage.paths import StorePath


def save_now(job: WriteJob, planned: Planned, comm: ByteComm) -> StorePath:
    """Carry out a job in this process; when this returns, the step is on disk and committed. Collective.

    Raises:
        CheckpointError: If a rank cannot write. The step does not exist then; earlier ones are intact.
    """
    doing = f"save of step {job.step}"
    final = ""
    try:
        records: list[FileRecord] = []
        error = _attempt(lambda: records.extend(write_job(job, _bytes(planned))), job)
        reports = comm.gather(tagged_json.dump_json([record.to_report() for record in records]))
        comm.agree(error, doing)
        if reports is not None:
            everyone = [FileRecord.from_json(record) for report in reports for record in json.loads(report)]
            committed: list[tuple[StorePath, list[StorePath]]] = []
            error = _attempt(lambda: committed.append(commit_job(job, everyone)), job)
            for path, left in committed:
                final = path.name
                for folder in left:
                    remove_tree(folder)
        comm.agree(error, doing)
    except Exception:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                commit.discard(job.folder)
        raise
    return job.folder.parent / comm.broadcast(final.encode() if comm.rank == 0 else None).decode()


def _attempt(action: Callable[[], Any], job: WriteJob) -> Exception | None:
    try:
        action()
    except OSError as err:
        return write_failure(err, job.folder, job.rank)
    except Exception as err:  # also no memory for a copy: the others must not wait for ever
        return err
    return None


def _bytes(planned: Planned) -> Iterator[memoryview]:
    for view in planned.views():
        yield tensor_bytes(view)
