"""The rendezvous of one step's savers: in the step's folder, not over a network.

Each saver writes two files. ``.life-r<rank>`` is its note. It is created first, with a fixed size, and overwritten in
place: with a count while the saver works, which distinguishes a slow saver on another machine from a lost one, and with the
reason if its part fails. On a full disk no new file can be written, but this one can. ``.report-r<rank>.json`` holds the
records of its files once they are on disk. Rank 0's saver waits for all reports and commits, which deletes the notes. The
other savers wait until the unfinished folder is gone, committed or not.

The end of a saver on the same machine is seen at once. A saver on another machine is waited for as long as the own
trainer is alive: the launcher ends it when a machine is lost, and a trainer whose saver dies writes the reason itself.
After that, a saver that is silent for 20 s counts as lost.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_ckpt.format.index import FileRecord
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.names import step_name
from titan_ckpt.save.job import WriteJob
from titan_ckpt.steps import claim, commit, listing
from titan_ckpt.steps.claim import Process
from titan_ckpt.storage.paths import StorePath, is_there, renames

# How often a saver polls a file system, or a store, where each poll is a request. It polls less often over time.
_POLL_S = 0.01
_REMOTE_POLL_S = 0.5
_LONGEST_POLL_S = 0.5
# How often a working saver writes its note.
_BEAT_S = 4.0
# A saver on another machine that is silent for so long counts as lost, once the own trainer is gone.
_SILENCE_S = 20.0

_NOTE_BYTES = 4096
# Escaped in JSON, a character takes up to six bytes.
_REASON_CHARS = 640


class NotCommitted(OSError):
    """The step will not be committed: another rank failed or was lost, or the folder is gone."""


class SignOfLife:
    """Writes this rank's note every few seconds while the block runs."""

    def __init__(self, job: WriteJob) -> None:
        self._job = job
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "SignOfLife":
        """Create the note."""
        _write_note(self._job, {"beat": 0}, make=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop writing the note."""
        self._stopped.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        beats = 0
        while not self._stopped.wait(_BEAT_S):
            beats += 1
            with contextlib.suppress(Exception):  # the work itself meets the same error and reports it
                _write_note(self._job, {"beat": beats}, make=False)


class Patience:
    """How long a saver whose own part is on disk waits for the others.

    Args:
        timeout_s: Limit per step.
        trainer_gone: Whether the own trainer has ended.
    """

    def __init__(self, timeout_s: float, trainer_gone: Callable[[], bool]) -> None:
        self._trainer_gone = trainer_gone
        self._deadline = time.monotonic() + timeout_s
        self._heard: Any = None
        self._heard_at = time.monotonic()

    def ended(self, saver: Process, note: dict[str, Any]) -> bool:
        """Whether to stop waiting for ``saver``, given its current note."""
        now = time.monotonic()
        if (saver, note) != self._heard or not self._trainer_gone():
            self._heard, self._heard_at = (saver, note), now
        return now > self._deadline or (not saver.local and now - self._heard_at > _SILENCE_S)


def report(job: WriteJob, records: list[FileRecord]) -> None:
    """Report that this rank's files are on disk. The report appears whole or not at all."""
    path, data = job.folder / _report_name(job.rank), json.dumps([r.to_report() for r in records]).encode()
    if not isinstance(path, Path):
        path.write_bytes(data)  # an object appears whole
        return
    part = path.with_name(f".part-r{job.rank:05d}")
    part.write_bytes(data)
    part.rename(path)


def give_up(job: WriteJob, reason: str) -> bool:
    """Tell the other savers that this rank's part will not come; False if not even that can be written."""
    try:
        if job.lead is not None:
            commit.discard_unfinished(job.folder)  # the others see that it is gone
        else:
            _write_note(job, {"error": reason[:_REASON_CHARS]}, make=True)
    except Exception:  # a store's client has its own kinds
        with contextlib.suppress(Exception):
            return not in_place(job)
        return False
    return True


def await_report(job: WriteJob, rank: int, saver: Process, patience: Patience) -> list[FileRecord]:
    """Wait until a rank's files are on disk. Raises `NotCommitted` if they will not be."""
    path, began = job.folder / _report_name(rank), time.monotonic()
    while True:
        alive = saver.alive  # before the look: a saver may report and end in between
        if is_there(path):
            return [FileRecord.from_json(record) for record in json.loads(path.read_bytes())]
        note = _read_note(job, rank)
        if "error" in note:
            raise NotCommitted(f"rank {rank} failed: {note['error']}")
        if not alive:
            raise NotCommitted(f"rank {rank} failed: its saver process {saver.pid} ended before its part was on disk")
        if not in_place(job):
            raise NotCommitted(f"{job.folder} is gone: something else deleted it")
        if patience.ended(saver, note):
            raise NotCommitted(f"rank {rank} failed: its part was not on disk in time")
        _pause(path, began)


def await_outcome(job: WriteJob, lead: Process, patience: Patience) -> StorePath:
    """Wait until rank 0's saver has committed the step; its folder. Raises `NotCommitted` if it has not."""
    began = time.monotonic()
    while True:
        alive = lead.alive
        if not in_place(job):  # committed, or given up
            return _outcome(job)
        if not alive:
            raise NotCommitted(f"step {job.step} was not committed: rank 0's saver process {lead.pid} ended")
        if patience.ended(lead, _read_note(job, 0)):
            raise NotCommitted(f"step {job.step} was not committed in time")
        _pause(job.folder, began)


def _pause(path: StorePath, began: float) -> None:
    least = _POLL_S if renames(path) else _REMOTE_POLL_S
    time.sleep(max(least, min(_LONGEST_POLL_S, (time.monotonic() - began) / 20)))


def _outcome(job: WriteJob) -> StorePath:
    for step, path in listing.step_folders(job.folder.parent):
        if step == job.step:
            with contextlib.suppress(RuntimeError, ValueError):
                if Manifest.open(path).save_id == job.save_id:
                    return path
    reason = "was not committed: another rank failed; rank 0 has the reason"
    raise NotCommitted(f"step {job.step} ({step_name(job.step)}) {reason}")


def in_place(job: WriteJob) -> bool:
    """Whether the unfinished step is still there."""
    return is_there(job.folder / claim.OWNER_NAME)


def _write_note(job: WriteJob, value: dict[str, Any], *, make: bool) -> None:
    """Overwrite this rank's note, in the same blocks of the disk."""
    path, data = job.folder / _note_name(job.rank), json.dumps(value).encode().ljust(_NOTE_BYTES)
    if not isinstance(path, Path):
        path.write_bytes(data)
        return
    # Opened and closed each time: a network file system shows it to others then.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o644)
    try:
        if os.pwrite(fd, data, 0) != len(data):
            raise OSError(f"{path} was only partly written")
    finally:
        os.close(fd)


def _read_note(job: WriteJob, rank: int) -> dict[str, Any]:
    """A rank's note; empty if there is none or it is being written."""
    try:
        return dict(json.loads((job.folder / _note_name(rank)).read_bytes()))
    except Exception:  # a store's client has its own kinds
        return {}


def _report_name(rank: int) -> str:
    return f".report-r{rank:05d}.json"


def _note_name(rank: int) -> str:
    return f".life-r{rank:05d}"
