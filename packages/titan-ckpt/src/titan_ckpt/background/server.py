"""The saver process: takes staged bytes from one rank's trainer and brings them to disk, without torch.

Started as ``python -P -m titan_ckpt.background.server FD TRAINER`` with one end of a socket pair and the trainer's process id.
Each message is a length word, then the meeting, the job and, where it is a new one, the layout, in JSON; the arena's
file descriptor travels with the first message that uses it. Once a job is here, it is finished even if the trainer is
killed: the process has its own session, and reads the end of its input only after the job. Forked children of the
trainer (data loaders) hold its end of the socket too, so the process also watches the trainer itself.

How the savers of a step meet is `titan_ckpt.background.rendezvous`.
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
from titan_ckpt.background.wire import receive, send, unpack
from titan_ckpt.save.job import SaveLayout, WriteJob, arena_starts, commit_job, write_job
from titan_ckpt.steps.claim import Process
from titan_ckpt.storage.files import remove_tree
from titan_ckpt.storage.paths import StorePath


def main() -> None:
    """Serve one trainer until it closes its end, or has exited."""
    control, trainer = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    arena, layout = memoryview(b""), SaveLayout(())

    def trainer_gone() -> bool:
        return os.getppid() != trainer  # an orphan gets another parent

    while (message := receive(control, trainer_gone)) is not None:
        head, fd = message
        if fd is not None:
            arena = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
            os.close(fd)
        meeting, job, new_layout = unpack(head)
        if new_layout:
            layout = SaveLayout.decode(new_layout)
        answer, left = _carry_out(WriteJob.decode(job, layout), arena, json.loads(meeting), trainer_gone)
        with contextlib.suppress(OSError):  # the trainer may be gone; the step is what matters
            send(control, json.dumps(answer).encode())
        for folder in left:
            remove_tree(folder)
        if "ends" in answer:
            return


def _carry_out(
    job: WriteJob, arena: memoryview, meeting: dict[str, Any], trainer_gone: Callable[[], bool]
) -> tuple[dict[str, Any], list[StorePath]]:
    """Write, meet, commit.

    Returns:
        The answer for the trainer, ``path`` (the folder's name) or ``error`` (``ends`` if this process ends with it), and
        what is to be deleted after it.
    """
    peers = [Process(**peer) for peer in meeting["savers"]]
    try:
        with SignOfLife(job) as life:
            records = write_job(job, _buffers(job, arena))
            patience = Patience(meeting["timeout_s"], trainer_gone)
            if job.lead is not None:
                for rank in range(1, job.world_size):
                    records += await_report(job, rank, peers[rank], patience)
                life.stop()  # the commit deletes the notes
                path, left = commit_job(job, records)
                return {"path": path.name}, left
        report(job, records)
    except Exception as err:  # also what a compressor or a store's client raises: the other ranks must not hang
        return _failed(job, err), []
    try:
        return {"path": await_outcome(job, peers[0], patience).name}, []
    except Exception as err:
        return {"error": str(err)}, []


def _failed(job: WriteJob, err: Exception) -> dict[str, Any]:
    """The answer for the trainer; the other savers get it too."""
    if isinstance(err, NotCommitted):
        text = f"step {job.step} was not committed: {err}"
    elif isinstance(err, FileNotFoundError) and not in_place(job):
        text = f"step {job.step} was not committed: rank 0 gave up, or its folder was deleted"
    else:
        kind = "" if isinstance(err, OSError) else f"{type(err).__name__}: "
        text = f"rank {job.rank} cannot write below {job.folder}: {kind}{err}. Earlier steps are intact."
    # If the disk takes not even a note, the other savers see that this one ends.
    return {"error": text} if give_up(job, text) else {"error": text, "ends": True}


def _buffers(job: WriteJob, arena: memoryview) -> Iterator[memoryview]:
    for start, size in arena_starts(job.layout)[0]:
        yield arena[start : start + size]


if __name__ == "__main__":
    main()
