"""The saver process: takes staged bytes from one rank's trainer and brings them to disk, without torch.

Started as ``python -m titan_ckpt._saver FD`` with one end of a socket pair. Each message is a length word, then the
meeting, the job and, where it is a new one, the layout, in JSON; the arena's file descriptor travels with the first
message that uses it. Once a job is here, it is finished even if the trainer is killed: the process has its own session,
and reads the end of its input only after the job.

The savers of a step meet in its folder, not over a network: each leaves a report file there, rank 0's waits for all
and commits. So there are no ports, no host names, and nothing on the trainer's process groups. A saver that dies on
this machine is seen at once, one elsewhere by the time limit.
"""

import contextlib
import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_ckpt import _commit
from titan_ckpt._commit import Process
from titan_ckpt._format import step_name
from titan_ckpt._index import FileRecord
from titan_ckpt._job import Job, Layout, commit_job, write_job
from titan_ckpt._manifest import Manifest
from titan_ckpt._storage import StorePath, remove_tree, renames

_POLL_S = 0.01
_REMOTE_POLL_S = 0.2
# Pieces of the arena start at multiples of this, so that every dtype is aligned.
ARENA_ALIGN = 64


def main() -> None:
    """Serve one trainer until it closes its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    arena, layout = memoryview(b""), Layout(())
    while (message := receive(control)) is not None:
        head, fd = message
        if fd is not None:
            arena = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
            os.close(fd)
        meeting, told, new_layout = unpack(head)
        if new_layout:
            layout = Layout.decode(new_layout)
        answer, left = _carry_out(Job.decode(told, layout), arena, json.loads(meeting))
        with contextlib.suppress(OSError):  # the trainer may be gone; the step is what matters
            send(control, json.dumps(answer).encode())
        for folder in left:
            remove_tree(folder)


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


def receive(control: socket.socket) -> tuple[bytes, int | None] | None:
    """The next message and the descriptor that came with it; None if the other end is closed."""
    try:
        head, fds, _, _ = socket.recv_fds(control, 8, 1)
        while head and len(head) < 8:
            more = control.recv(8 - len(head))
            if not more:
                return None
            head += more
    except OSError:
        return None
    if not head:
        return None
    left = int.from_bytes(head, "little")
    parts: list[bytes] = []
    while left:
        part = control.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts), fds[0] if fds else None


def arena_starts(layout: Layout) -> tuple[list[tuple[int, int]], int]:
    """Where each tensor of a layout lies in the arena, (first byte, size), and the arena's size."""
    starts: list[tuple[int, int]] = []
    at = 0
    for shard in layout.shards:
        for entry in shard.entries:
            starts.append((at, entry.nbytes))
            at += -(-entry.nbytes // ARENA_ALIGN) * ARENA_ALIGN
    return starts, at


def _carry_out(job: Job, arena: memoryview, meeting: dict[str, Any]) -> tuple[dict[str, Any], list[StorePath]]:
    """Write, meet, commit; the answer for the trainer, ``path`` or ``error``, and what is to be deleted after it."""
    peers = [Process(**peer) for peer in meeting["savers"]]
    deadline = time.monotonic() + meeting["timeout_s"]
    try:
        _report(job, {"files": [record.to_report() for record in write_job(job, _buffers(job, arena))]})
    except (OSError, ValueError) as err:
        text = f"rank {job.rank} cannot write below {job.folder}: {err}. Earlier steps are intact."
        report_failure(job, text)
        if job.lead is None:
            return {"error": text}, []
    return _lead(job, peers, deadline) if job.lead is not None else (_follow(job, peers[0], deadline), [])


def _buffers(job: Job, arena: memoryview) -> Iterator[memoryview]:
    for start, size in arena_starts(job.layout)[0]:
        yield arena[start : start + size]


def report_failure(job: Job, text: str) -> None:
    """Tell the savers of the other ranks that this rank's part will not come."""
    with contextlib.suppress(OSError):
        _report(job, {"error": text})


def _report(job: Job, value: dict[str, Any]) -> None:
    """Leave a report in the step's folder, whole or not at all."""
    report, data = job.folder / _report_name(job.rank), json.dumps(value).encode()
    if not isinstance(report, Path):
        report.write_bytes(data)  # an object appears whole
        return
    part = report.with_name(f".part-r{job.rank:05d}")
    part.write_bytes(data)
    part.rename(report)


def _report_name(rank: int) -> str:
    return f".report-r{rank:05d}.json"


def _lead(job: Job, peers: list[Process], deadline: float) -> tuple[dict[str, Any], list[StorePath]]:
    """Rank 0's saver: wait for every report, then commit."""
    records: list[FileRecord] = []
    try:
        for rank in range(job.world_size):
            report = _await_report(job.folder / _report_name(rank), peers[rank], deadline)
            if "error" in report:
                raise OSError(f"rank {rank} failed: {report['error']}")
            records += [FileRecord.from_json(record) for record in report["files"]]
        path, left = commit_job(job, records)
        return {"path": str(path)}, left
    except (OSError, ValueError) as err:
        with contextlib.suppress(OSError):
            _commit.discard(job.folder)
        return {"error": f"step {job.step} was not committed: {err}"}, []


def _await_report(path: StorePath, saver: Process, deadline: float) -> dict[str, Any]:
    while True:
        alive = saver.alive  # asked before looking: a saver may report and end in between
        if path.exists():
            return json.loads(path.read_bytes())
        if not alive:
            return {"error": f"its saver process {saver.pid} ended before its part was on disk"}
        if time.monotonic() > deadline:
            return {"error": "its part was not on disk in time"}
        time.sleep(_POLL_S if renames(path) else _REMOTE_POLL_S)


def _follow(job: Job, lead: Process, deadline: float) -> dict[str, Any]:
    """Other savers: wait until the folder became a step, or did not."""
    while True:
        alive = lead.alive
        if not (job.folder / _commit.OWNER_NAME).exists():  # committed, or given up
            return _outcome(job)
        if not alive:
            return {"error": f"step {job.step} was not committed: rank 0's saver process {lead.pid} ended"}
        if time.monotonic() > deadline:
            return {"error": f"step {job.step} was not committed in time"}
        time.sleep(_POLL_S if renames(job.folder) else _REMOTE_POLL_S)


def _outcome(job: Job) -> dict[str, Any]:
    for step, path in _commit.step_folders(job.folder.parent):
        if step == job.step:
            with contextlib.suppress(RuntimeError, ValueError):
                if Manifest.open(path).save_id == job.save_id:
                    return {"path": str(path)}
    # A newer save may have replaced or outdated the step already; nothing of this rank's part was wrong.
    reason = "was not committed: another rank failed; rank 0 has the reason"
    return {"error": f"step {job.step} ({step_name(job.step)}) {reason}"}


if __name__ == "__main__":
    main()
