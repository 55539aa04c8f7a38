"""The saver process: writes the staged bytes of one rank to disk, without torch.

It is started as ``python -P -m titan_ckpt.background.server FD TRAINER``, with one end of a socket pair and the trainer's
process id. A message holds the rendezvous, the job and, if it is new, the layout. The arena's file descriptor comes with
the first message that uses it. Once it has a job, the process finishes it even if the trainer is killed: it has its own
session, and reads the end of its input only after the job. The trainer's forked children (data loaders) hold its end of
the socket too, so the process also watches the trainer itself.
"""

import contextlib
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from titan_ckpt.background.rendezvous import (
    NotCommitted,
    Patience,
    SignOfLife,
    await_outcome,
    await_report,
    give_up,
    in_place,
    report,
)
from titan_ckpt.background.wire import receive, send
from titan_ckpt.format.tagged_json import split_parts
from titan_ckpt.save.job import SaveLayout, WriteJob, arena_starts, commit_job, write_job
from titan_ckpt.steps.claim import Process
from titan_ckpt.storage.files import remove_tree
from titan_ckpt.storage.paths import StorePath


def main() -> None:
    """Serve one trainer until it closes its end or exits."""
    control, trainer = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    arena, layout = memoryview(b""), SaveLayout(())

    def trainer_gone() -> bool:
        return os.getppid() != trainer  # an orphan gets another parent

    while (message := receive(control, trainer_gone)) is not None:
        head, fd = message
        if fd is not None:
            arena = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
            os.close(fd)
        rendezvous, job, new_layout = split_parts(head)
        if new_layout:
            layout = SaveLayout.decode(new_layout)
        answer, left = _carry_out(WriteJob.decode(job, layout), arena, json.loads(rendezvous), trainer_gone)
        with contextlib.suppress(OSError):  # the trainer may be gone; the step is what matters
            send(control, json.dumps(answer).encode())
        for folder in left:
            remove_tree(folder)
        if "ends" in answer:
            return


def _carry_out(
    job: WriteJob, arena: memoryview, rendezvous: dict[str, Any], trainer_gone: Callable[[], bool]
) -> tuple[dict[str, Any], list[StorePath]]:
    """Write, meet the other savers, commit.

    Returns:
        The answer for the trainer: ``path`` (the folder's name) or ``error`` (``ends`` if this process then exits). And
        the folders to delete after the answer.
    """
    peers = [Process(**peer) for peer in rendezvous["savers"]]
    try:
        with SignOfLife(job) as life:
            records = write_job(job, _buffers(job, arena))
            patience = Patience(rendezvous["timeout_s"], trainer_gone)
            if job.lead is not None:
                for rank in range(1, job.world_size):
                    records += await_report(job, rank, peers[rank], patience)
                life.stop()  # the commit deletes the notes
                path, left = commit_job(job, records)
                return {"path": path.name}, left
        report(job, records)
    except Exception as err:  # of any kind: the other ranks must not hang
        return _failed(job, err), []
    try:
        return {"path": await_outcome(job, peers[0], patience).name}, []
    except Exception as err:
        return {"error": str(err)}, []


def _failed(job: WriteJob, err: Exception) -> dict[str, Any]:
    """The answer for the trainer. Also notifies the other savers."""
    if isinstance(err, NotCommitted):
        text = f"step {job.step} was not committed: {err}"
    elif isinstance(err, FileNotFoundError) and not in_place(job):
        text = f"step {job.step} was not committed: rank 0 gave up, or its folder was deleted"
    else:
        kind = "" if isinstance(err, OSError) else f"{type(err).__name__}: "
        text = f"rank {job.rank} cannot write below {job.folder}: {kind}{err}. Earlier steps are intact."
    # If not even a note can be written, the other savers see this process end.
    return {"error": text} if give_up(job, text) else {"error": text, "ends": True}


def _buffers(job: WriteJob, arena: memoryview) -> Iterator[memoryview]:
    for start, size in arena_starts(job.layout)[0]:
        yield arena[start : start + size]


if __name__ == "__main__":
    main()
