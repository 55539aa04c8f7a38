"""Asynchronous saves, the trainer's side: stage into an arena, hand over, go on training.

The saver process maps the same arena (`titan_ckpt._arena`). One save is in flight at a time: the arena holds it.
"""

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from titan_ckpt._arena import Arena
from titan_ckpt._commit import Process
from titan_ckpt._errors import CheckpointError
from titan_ckpt._job import Job, Layout
from titan_ckpt._saver import arena_starts, pack, receive, send
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
        self._arena_sent = True
        self._layout: Layout | None = None
        """The layout that the arena's targets, and after `submit` the process, are made for."""
        self._layout_sent = True
        self._targets: list[Tensor] = []
        self._preparing: threading.Thread | None = None
        self._submitted: queue.SimpleQueue[tuple[Job, SaveJob] | None] = queue.SimpleQueue()
        # One thread for all saves: starting one waits until it runs, which a busy machine puts off.
        arguments = (self._control, self._submitted, self.process.pid)
        threading.Thread(target=_answers, args=arguments, daemon=True, name="titan-ckpt").start()
        # One that is dropped unclosed must leave neither thread, process nor arena.
        weakref.finalize(self, _drop, self._submitted, self._arena).atexit = False

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child.poll() is None

    def prepare(self, layout: Layout, devices: Iterable[torch.device]) -> None:
        """Take the memory for jobs of this layout, with tensors on these CUDA devices, in a thread."""

        def run() -> None:
            with contextlib.suppress(OSError):  # the save tries again, and says what is wrong
                self._adopt(layout)
                self._arena.lock_pages(devices)

        self._await_prepared()
        self._preparing = threading.Thread(target=run, name="titan-ckpt")
        self._preparing.start()

    def stage(self, job: Job, views: Sequence[Tensor], ready: Any = None) -> None:
        """Copy the tensors of a job into the arena; ``ready`` as for `Arena.stage`."""
        self._await_prepared()
        self._adopt(job.layout)
        self._arena.stage(self._targets, views, ready)

    def _adopt(self, layout: Layout) -> None:
        """Have the arena hold this layout."""
        if layout is self._layout:
            return
        places, total = arena_starts(layout)
        self._targets = []  # views of the old memory keep it alive
        if self._arena.reserve(total):
            self._arena_sent = False
        self._targets = self._arena.targets(places, [e for shard in layout.shards for e in shard.entries])
        self._layout, self._layout_sent = layout, False

    def _await_prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def submit(self, job: Job, result: SaveJob, savers: list[Process], timeout_s: float) -> None:
        """Hand a staged job over; ``result`` is finished from a thread when the saver answers.

        Raises:
            CheckpointError: If the saver process is gone.
        """
        meeting = dump_json({"savers": [asdict(saver) for saver in savers], "timeout_s": timeout_s})
        parts = [meeting, job.encode(), b"" if self._layout_sent else job.layout.encode()]
        try:
            send(self._control, pack(parts), None if self._arena_sent else self._arena.fd)
        except OSError as err:
            raise CheckpointError(
                f"the saver process {self.process.pid} is gone ({err}); step {job.step} is not saved."
            ) from err
        self._arena_sent = self._layout_sent = True
        self._submitted.put((job, result))

    def close(self) -> None:
        """Let the process end; it finishes what it was given."""
        self._await_prepared()
        self._control.close()
        self._child.wait()
        self._submitted.put(None)
        self._targets = []
        self._arena.close()


def _answers(control: socket.socket, submitted: "queue.SimpleQueue[tuple[Job, SaveJob] | None]", pid: int) -> None:
    """Finish each submitted save as the saver process answers, until None is submitted."""
    with control:
        while (sent := submitted.get()) is not None:
            job, result = sent
            answer = receive(control)
            if answer is None:
                result.finish(None, f"the saver process {pid} ended while it wrote step {job.step}")
                continue
            told: dict[str, str] = json.loads(answer[0])
            result.finish(as_path(told["path"]) if "path" in told else None, told.get("error"))


def _drop(submitted: "queue.SimpleQueue[tuple[Job, SaveJob] | None]", arena: Arena) -> None:
    submitted.put(None)
    arena.close()
