"""Asynchronous saves, the trainer's side: stage into an arena, hand over, go on training.

The saver process maps the same arena (`titan_ckpt._arena`). One save is in flight at a time: the arena holds it.
"""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from titan_ckpt._arena import Arena
from titan_ckpt._commit import Process
from titan_ckpt._errors import CheckpointError
from titan_ckpt._job import Job
from titan_ckpt._saver import arena_starts, receive, send
from titan_ckpt._storage import StorePath, as_path
from titan_ckpt._tree import dump_json


class SaveJob:
    """A save that was begun. With synchronous saves it is done when you get it."""

    def __init__(self, step: int, path: StorePath | None = None, *, skipped: bool = False) -> None:
        self.step = step
        self.skipped = skipped
        """True if nothing is saved, since the last save was still in flight and ``on_busy="skip"``."""
        self._path = path
        self._error: str | None = None
        self._done = threading.Event()
        self._staged = threading.Event()
        if path is not None or skipped:
            self._staged.set()
            self._done.set()

    @property
    def path(self) -> StorePath | None:
        """The step's folder once it is committed; None before, or if it failed or was skipped."""
        return self._path

    @property
    def staged(self) -> bool:
        """Whether the state may change: its bytes are copied."""
        return self._staged.is_set()

    @property
    def done(self) -> bool:
        """Whether the save has ended, committed or failed."""
        return self._done.is_set()

    @property
    def error(self) -> str | None:
        """Why it failed; None while it runs or if it is committed."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> StorePath:
        """Wait until the step is committed and return its folder.

        Raises:
            TimeoutError: If it is not within ``timeout_s`` seconds.
            CheckpointError: If it failed, or was skipped.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"step {self.step} is not committed after {timeout_s} s; it goes on in the background.")
        if self._path is None:
            why = self._error or "it was skipped: the save before it was still in flight"
            raise CheckpointError(f"step {self.step} was not saved: {why}")
        return self._path

    def finish(self, path: StorePath | None, error: str | None) -> None:
        """Called by the machinery when the save has ended."""
        self._path, self._error = path, error
        self._staged.set()
        self._done.set()

    def mark_staged(self) -> None:
        """Called by the machinery when the state's bytes are copied."""
        self._staged.set()


class Saver:
    """One rank's saver process and arena."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._control = ours
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "titan_ckpt._saver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # It may outlive the trainer; a pipe of the launcher must not be held open by it.
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.process = Process.of(self._child.pid)
        self._arena = Arena()
        self._sent = True
        self._reader: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child.poll() is None

    def stage(self, job: Job, views: Sequence[Tensor], ready: Any = None) -> None:
        """Copy the tensors of a job into the arena; ``ready`` as for `Arena.stage`."""
        places, total = arena_starts(job)
        if self._arena.reserve(total):
            self._sent = False
        self._arena.stage(places, [entry for shard in job.shards for entry in shard.entries], views, ready)

    def submit(self, job: Job, result: SaveJob, savers: list[Process], timeout_s: float) -> None:
        """Hand a staged job over; ``result`` is finished from a thread when the saver answers.

        Raises:
            CheckpointError: If the saver process is gone.
        """
        meeting = dump_json({"savers": [asdict(saver) for saver in savers], "timeout_s": timeout_s})
        message = len(meeting).to_bytes(8, "little") + meeting + job.encode()
        try:
            send(self._control, message, None if self._sent else self._arena.fd)
        except OSError as err:
            raise CheckpointError(
                f"the saver process {self.process.pid} is gone ({err}); step {job.step} is not saved."
            ) from err
        self._sent = True
        self._reader = threading.Thread(target=self._await, args=(job, result), daemon=True, name="titan-ckpt")
        self._reader.start()

    def close(self) -> None:
        """Let the process end; it finishes what it was given."""
        self._control.close()
        self._child.wait()
        self._arena.close()

    def _await(self, job: Job, result: SaveJob) -> None:
        answer = receive(self._control)
        if answer is None:
            result.finish(None, f"the saver process {self.process.pid} ended while it wrote step {job.step}")
            return
        told: dict[str, str] = json.loads(answer[0])
        result.finish(as_path(told["path"]) if "path" in told else None, told.get("error"))
