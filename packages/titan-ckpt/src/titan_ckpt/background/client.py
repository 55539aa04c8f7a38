"""Asynchronous saves, the trainer's side: stage into the arena, pass the job to the saver process, continue training.

The arena holds one save, so one save is in flight at a time.
"""

import contextlib
import json
import logging
import os
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

from titan_ckpt.background.arena import Arena, staging_point
from titan_ckpt.background.rendezvous import give_up
from titan_ckpt.background.wire import receive, send
from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import CheckpointError
from titan_ckpt.format.tagged_json import dump_json, join_parts
from titan_ckpt.save.job import SaveLayout, WriteJob, arena_starts
from titan_ckpt.save.prepare import Planned
from titan_ckpt.steps.claim import Process
from titan_ckpt.steps.leftovers import SERVER
from titan_ckpt.storage.paths import StorePath


class SaveJob:
    """A save. A synchronous one is done when `Checkpointer.save` returns it."""

    def __init__(self, step: int, path: StorePath | None = None, *, skipped: bool = False) -> None:
        self.step = step
        self.skipped = skipped
        """Whether nothing is saved, because the previous save was in flight and ``on_busy="skip"``."""
        self.path = path
        """The step's folder once it is committed; None before, and for a failed or skipped save."""
        self.error: str | None = None
        """Why it failed; None if it did not."""
        self._done = threading.Event()
        self._staged = threading.Event()
        if path is not None or skipped:
            self._staged.set()
            self._done.set()

    @property
    def staged(self) -> bool:
        """Whether the state is copied and may change, and a saver process has it, which outlives a killed trainer."""
        return self._staged.is_set()

    @property
    def done(self) -> bool:
        """Whether the save has ended, committed or failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> StorePath:
        """Wait until the step is committed and return its folder.

        Raises:
            TimeoutError: If it is not within ``timeout_s`` seconds.
            CheckpointError: If it failed, or was skipped.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(
                f"step {self.step} is not committed after {timeout_s} s; it continues in the background."
            )
        if self.path is None:
            why = self.error or "it was skipped, because the previous save was still in flight"
            raise CheckpointError(f"step {self.step} was not saved: {why}")
        return self.path

    def finish(self, path: StorePath | None, error: str | None) -> None:
        """Set the result. Called by this package."""
        self.path, self.error = path, error
        self._staged.set()
        self._done.set()

    def mark_staged(self) -> None:
        """Say that the state is `staged`. Called by this package."""
        self._staged.set()


_log = logging.getLogger("titan_ckpt")

# How long the savers of a step wait for each other.
_RENDEZVOUS_S = 3600.0
# How long `BackgroundSaver.close` waits for a process that only deletes old steps.
_ENDING_S = 60.0


def command(fd: int) -> list[str]:
    """The command of a saver. ``-P``: no imports from the working folder."""
    return [sys.executable, "-P", "-m", SERVER, str(fd), str(os.getpid())]


class BackgroundSaver:
    """One rank's saver process and arena.

    Raises:
        CheckpointError: If the process cannot be started.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair()
                undo.callback(ours.close)
                with theirs:
                    # memfd, not a file or pipe: it survives a full disk and does not hold the launcher's pipe open.
                    errors = os.memfd_create("titan-ckpt-saver-errors", os.MFD_CLOEXEC)
                    undo.callback(os.close, errors)
                    self._child = subprocess.Popen(
                        command(theirs.fileno()),
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        start_new_session=True,  # it may outlive the trainer
                    )
            except OSError as err:
                raise CheckpointError(f"the saver process could not be started: {err}") from err
            undo.pop_all()
        self._link = _Link(ours, self._child, errors)
        self.process = Process.of(self._child.pid)
        self._arena = Arena()
        self._arena_sent = True
        self._arena_used = threading.Lock()
        self._layout: SaveLayout | None = None
        """The layout of the arena's targets."""
        self._layout_sent = True
        self._targets: list[Tensor] = []
        self._preparing: threading.Thread | None = None
        self._submitted: queue.SimpleQueue[tuple[WriteJob, SaveJob] | None] = queue.SimpleQueue()
        # One thread for all saves: on a busy machine, a new thread starts late.
        arguments = (self._link, self._submitted)
        threading.Thread(target=_answers, args=arguments, daemon=True, name="titan-ckpt").start()
        # A saver that is dropped without close must leave no thread, process or arena.
        weakref.finalize(self, _drop, self._submitted, self._arena).atexit = False

    @property
    def alive(self) -> bool:
        """Whether the process runs and takes further saves."""
        return not self._link.ending and self._child.poll() is None

    def prepare(self, layout: SaveLayout, devices: Iterable[torch.device]) -> None:
        """Take the memory for jobs of this layout, in a thread; ``devices`` are the CUDA devices of the tensors."""

        def run() -> None:
            with contextlib.suppress(Exception):  # the save tries again and reports the error
                self._adopt(layout)
                self._arena.lock_pages(devices)

        self._await_prepared()
        self._preparing = threading.Thread(target=run, name="titan-ckpt")
        self._preparing.start()

    def take(self, job: WriteJob, planned: Planned, result: SaveJob, savers: list[Process], *, overlap: bool) -> None:
        """Copy the state and submit the job. A failure is set in ``result`` and reported to the other ranks.

        A thread finishes ``result`` when the process answers. With ``overlap``, trainable parameters and optimizer state
        are copied in a thread; everything else is copied when this returns.
        """

        def carry(views: Sequence[Tensor], ready: Sequence[Any], copied: frozenset[int]) -> None:
            try:
                self.stage(job, views, ready, copied)
                self.submit(job, result, savers)
                result.mark_staged()
            except BaseException as err:
                self._fail(job, result, err)
                if not isinstance(err, Exception):
                    raise

        try:
            views = list(planned.views())
            copied = self._stage_changing(job, planned, views) if overlap else frozenset[int]()
            ready = staging_point(views)
            if overlap:
                threading.Thread(target=carry, args=(views, ready, copied), name="titan-ckpt").start()
                return
        except BaseException as err:
            self._fail(job, result, err)
            if not isinstance(err, Exception):
                raise
            return
        carry(views, ready, copied)

    def stage(
        self, job: WriteJob, views: Sequence[Tensor], ready: Sequence[Any] = (), copied: frozenset[int] = frozenset()
    ) -> None:
        """Copy the tensors of a job into the arena, except those already ``copied``; ``ready`` as in `Arena.stage`."""
        with self._arena_used:
            self._await_prepared()
            self._adopt(job.layout)
            left = [i for i in range(len(views)) if i not in copied]
            self._arena.stage([self._targets[i] for i in left], [views[i] for i in left], ready)

    def _stage_changing(self, job: WriteJob, planned: Planned, views: Sequence[Tensor]) -> frozenset[int]:
        """Copy now what may change before the next optimizer step (buffers, extra tensors); their numbers."""
        changing = [i for i, piece in enumerate(planned.pieces) if not _waits(planned, piece.held)]
        if changing:
            self._await_prepared()
            self._adopt(job.layout)
            self._arena.stage_in_order([self._targets[i] for i in changing], [views[i] for i in changing])
        return frozenset(changing)

    def _adopt(self, layout: SaveLayout) -> None:
        """Arrange the arena for this layout."""
        if layout is self._layout:
            return
        places, total = arena_starts(layout)
        self._layout, self._targets = None, []  # views of the old memory keep it alive
        if self._arena.reserve(total):
            self._arena_sent = False
        self._targets = self._arena.targets(places, [e for file in layout.files for e in file.entries])
        self._layout, self._layout_sent = layout, False

    def _await_prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def submit(self, job: WriteJob, result: SaveJob, savers: list[Process], timeout_s: float = _RENDEZVOUS_S) -> None:
        """Send a staged job to the process. A thread finishes ``result`` when it answers.

        Raises:
            CheckpointError: If the saver process is gone.
        """
        rendezvous = dump_json({"savers": [asdict(saver) for saver in savers], "timeout_s": timeout_s})
        parts = [rendezvous, job.encode(), b"" if self._layout_sent else job.layout.encode()]
        try:
            send(self._link.control, join_parts(parts), None if self._arena_sent else self._arena.fd)
        except OSError as err:
            raise CheckpointError(
                f"the saver process {self.process.pid} is gone{self._link.last_words()}; step {job.step} is not saved."
            ) from err
        self._arena_sent = self._layout_sent = True
        self._submitted.put((job, result))

    def _fail(self, job: WriteJob, result: SaveJob, err: BaseException) -> None:
        text = str(err) or type(err).__name__
        if not give_up(job, text):
            self._child.kill()  # the other savers see it end
        result.finish(None, text)

    def close(self, timeout_s: float | None = None) -> None:
        """Shut down. A save that takes longer than ``timeout_s`` finishes in the background."""
        self._await_prepared()
        self._submitted.put(None)
        try:
            self._child.wait(_ENDING_S if timeout_s is None else timeout_s)
        except subprocess.TimeoutExpired:
            _log.warning("the saver process %d is still working; it exits when it is done", self.process.pid)
        if self._arena_used.acquire(blocking=False):  # else a copy is running: its end frees the memory
            self._targets = []
            self._arena.close()
            self._arena_used.release()


class _Link:
    """The connection of a trainer to its saver process."""

    def __init__(self, control: socket.socket, child: "subprocess.Popen[bytes]", errors: int) -> None:
        self.control, self.child = control, child
        self.ending = False
        """Whether the process said that it exits."""
        self._errors = errors

    def last_words(self) -> str:
        """How the process ended, as an addition to a message."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(5)
        code = self.child.returncode
        how = "" if code is None else f" (killed by signal {-code})" if code < 0 else f" (exit status {code})"
        size = os.fstat(self._errors).st_size
        lines = os.pread(self._errors, 2048, max(0, size - 2048)).decode(errors="replace").split("\n")
        words = " | ".join(line.strip() for line in lines[-4:] if line.strip())
        return how + (f", its last output: {words}" if words else "")

    def close(self) -> None:
        """Let the process end, wait for it, and free its resources."""
        with contextlib.suppress(OSError):
            # close() is not enough: forked children (data loaders) hold this end too.
            self.control.shutdown(socket.SHUT_WR)
        self.child.wait()
        self.control.close()
        os.close(self._errors)


def _waits(planned: Planned, held: int) -> bool:
    """Whether only the optimizer's step changes a tensor: a trainable parameter or optimizer state."""
    section, _, tensor = planned.collected.tensors[held]
    return section == "optim" or (section == "model" and tensor.requires_grad)


def _answers(link: _Link, submitted: "queue.SimpleQueue[tuple[WriteJob, SaveJob] | None]") -> None:
    """Finish each submitted save when the saver process answers, until None is submitted."""
    while (sent := submitted.get()) is not None:
        job, result = sent
        answer = receive(link.control, lambda: link.child.poll() is not None)
        if answer is None:
            text = f"the saver process {link.child.pid} ended while it wrote step {job.step}{link.last_words()}"
            give_up(job, text)
            result.finish(None, text)
            continue
        reply: dict[str, Any] = json.loads(answer[0])
        link.ending = "ends" in reply
        result.finish(job.folder.parent / reply["path"] if "path" in reply else None, reply.get("error"))
    link.close()


def _drop(submitted: "queue.SimpleQueue[tuple[WriteJob, SaveJob] | None]", arena: Arena) -> None:
    submitted.put(None)
    arena.close()


def start_savers(comm: ByteComm, saver: BackgroundSaver | None) -> tuple[BackgroundSaver, list[Process]]:
    """Start this rank's saver unless ``saver`` is alive. Collective.

    Returns:
        This rank's saver, and the saver process of every rank.

    Raises:
        CheckpointError: If a rank cannot start its saver.
    """
    error: CheckpointError | None = None
    if saver is not None and not saver.alive:
        saver.close()
        saver = None
    try:
        saver = saver or BackgroundSaver()
    except CheckpointError as err:
        error = err
    replies = comm.all_gather(json.dumps(asdict(saver.process)).encode() if saver is not None else b"")
    if not all(replies):
        comm.agree(error, "starting the saver processes")
    assert saver is not None
    return saver, [Process(**json.loads(reply)) for reply in replies]
