"""The saver process: takes staged bytes from one rank's trainer and brings them to disk, without torch.

Started as ``python -P -m titan_ckpt._saver FD TRAINER`` with one end of a socket pair and the trainer's process id.
Each message is a length word, then the meeting, the job and, where it is a new one, the layout, in JSON; the arena's
file descriptor travels with the first message that uses it. Once a job is here, it is finished even if the trainer is
killed: the process has its own session, and reads the end of its input only after the job. Forked children of the
trainer (data loaders) hold its end of the socket too, so the process also watches the trainer itself.

How the savers of a step meet is `titan_ckpt._meeting`.
"""

import contextlib
import json
import mmap
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_ckpt import _commit
from titan_ckpt._job import Job, Layout, commit_job, write_job
from titan_ckpt._meeting import (
    NotCommitted,
    Patience,
    SignOfLife,
    await_outcome,
    await_report,
    give_up,
    in_place,
    report,
)
from titan_ckpt._process import Process
from titan_ckpt._storage import StorePath, remove_tree

# How often one end of the socket looks whether the other end's process lives.
_WATCH_S = 1.0
# How long a new Checkpointer waits for a save that a killed trainer's saver is still finishing.
_INHERITED_SAVE_S = 120.0
# Pieces of the arena start at multiples of this, so that every dtype is aligned.
ARENA_ALIGN = 64


def main() -> None:
    """Serve one trainer until it closes its end, or is no more."""
    control, trainer = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    arena, layout = memoryview(b""), Layout(())

    def trainer_gone() -> bool:
        return os.getppid() != trainer  # an orphan gets another parent

    while (message := receive(control, trainer_gone)) is not None:
        head, fd = message
        if fd is not None:
            arena = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
            os.close(fd)
        meeting, told, new_layout = unpack(head)
        if new_layout:
            layout = Layout.decode(new_layout)
        answer, left = _carry_out(Job.decode(told, layout), arena, json.loads(meeting), trainer_gone)
        with contextlib.suppress(OSError):  # the trainer may be gone; the step is what matters
            send(control, json.dumps(answer).encode())
        for folder in left:
            remove_tree(folder)
        if "ends" in answer:
            return


def command(fd: int) -> list[str]:
    """How a trainer starts its saver; modules of the trainer's working folder are not imported (``-P``)."""
    return [sys.executable, "-P", "-m", __name__, str(fd), str(os.getpid())]


def await_inherited(root: StorePath) -> None:
    """Let savers finish whose trainer is gone, or is this process: their step is the one to resume from."""
    deadline = time.monotonic() + _INHERITED_SAVE_S
    while time.monotonic() < deadline:
        owners = [_commit.owner_of(path) for path in _commit.unfinished(root)]
        if not any(owner and owner.local and owner.alive and _inherited(owner.pid) for owner in owners):
            return
        time.sleep(0.05)


def _inherited(pid: int) -> bool:
    """Whether a local process is a saver whose trainer is gone, or is this process."""
    try:
        told = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False  # it has just ended
    if len(told) < 6 or told[3] != __name__.encode():
        return False  # a trainer that saves by itself
    return parent == os.getpid() or str(parent).encode() != told[5]


def pack(parts: Sequence[bytes]) -> bytes:
    """Several byte strings as one: their lengths, a word each, before them."""
    return b"".join([len(parts).to_bytes(8, "little"), *(len(p).to_bytes(8, "little") for p in parts), *parts])


def unpack(message: bytes) -> list[bytes]:
    """Undo `pack`."""
    count = int.from_bytes(message[:8], "little")
    lengths = [int.from_bytes(message[8 * i : 8 * i + 8], "little") for i in range(1, count + 1)]
    at, parts = 8 * (count + 1), list[bytes]()
    for length in lengths:
        parts.append(message[at : at + length])
        at += length
    return parts


def send(control: socket.socket, message: bytes, fd: int | None = None) -> None:
    """Send a message, with a file descriptor if one is given."""
    head = len(message).to_bytes(8, "little")
    socket.send_fds(control, [head], [] if fd is None else [fd])
    control.sendall(message)


def receive(control: socket.socket, other_gone: Callable[[], bool]) -> tuple[bytes, int | None] | None:
    """The next message and the descriptor that came with it; None if there will be none.

    Args:
        control: This process's end.
        other_gone: Says whether the process of the other end has ended; forked children of it may hold that end open.
    """
    fds: list[int] = []

    def take(nbytes: int) -> bytes | None:
        parts: list[bytes] = []
        while nbytes:
            if not _readable(control, other_gone):
                return None
            part, more, _, _ = socket.recv_fds(control, min(nbytes, 1 << 20), 1)
            if not part:
                return None
            fds.extend(more)
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)

    try:
        head = take(8)
        message = take(int.from_bytes(head, "little")) if head is not None else None
    except (OSError, ValueError):  # of a closed socket
        return None
    return None if message is None else (message, fds[0] if fds else None)


def _readable(control: socket.socket, other_gone: Callable[[], bool]) -> bool:
    """Wait until there is something to read; False if the other process is gone and left nothing."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        gone = other_gone()  # asked before looking: it may have sent its last and ended in between
        if poller.poll(0 if gone else 1000 * _WATCH_S):
            return True
        if gone:
            return False


def arena_starts(layout: Layout) -> tuple[list[tuple[int, int]], int]:
    """Where each tensor of a layout lies in the arena, (first byte, size), and the arena's size."""
    starts: list[tuple[int, int]] = []
    at = 0
    for shard in layout.shards:
        for entry in shard.entries:
            starts.append((at, entry.nbytes))
            at += -(-entry.nbytes // ARENA_ALIGN) * ARENA_ALIGN
    return starts, at


def _carry_out(
    job: Job, arena: memoryview, meeting: dict[str, Any], trainer_gone: Callable[[], bool]
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
    except Exception as err:  # also what a compressor or a store's client raises: the others must not wait for ever
        return _failed(job, err), []
    try:
        return {"path": await_outcome(job, peers[0], patience).name}, []
    except Exception as err:
        return {"error": str(err)}, []


def _failed(job: Job, err: Exception) -> dict[str, Any]:
    """The answer for the trainer; the other savers are told too."""
    if isinstance(err, NotCommitted):
        text = f"step {job.step} was not committed: {err}"
    elif isinstance(err, FileNotFoundError) and not in_place(job):
        text = f"step {job.step} was not committed: rank 0 gave up, for a reason of its own, or its folder was deleted"
    else:
        kind = "" if isinstance(err, OSError) else f"{type(err).__name__}: "
        text = f"rank {job.rank} cannot write below {job.folder}: {kind}{err}. Earlier steps are intact."
    # If the disk takes not even a note, the other savers see that this one ends.
    return {"error": text} if give_up(job, text) else {"error": text, "ends": True}


def _buffers(job: Job, arena: memoryview) -> Iterator[memoryview]:
    for start, size in arena_starts(job.layout)[0]:
        yield arena[start : start + size]


if __name__ == "__main__":
    main()
