"""`Checkpointer`: the object that a training loop uses."""

import contextlib
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from titan_ckpt.background.client import BackgroundSaver, SaveJob, start_savers
from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import CheckpointError, DamageError, NoSuchStepError
from titan_ckpt.load.copies import Verify
from titan_ckpt.load.restore import restore_newest
from titan_ckpt.save.prepare import SavePreparer, save_now
from titan_ckpt.state.train_state import TrainState
from titan_ckpt.steps import leftovers, listing
from titan_ckpt.steps.claim import Process, release_root, take_root
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.paths import StorePath, as_path, shared_between_processes

_log = logging.getLogger("titan_ckpt")


class Checkpointer:
    """Saves and restores the state of a training loop below one folder, the root.

    Without torch.distributed it serves one process. With torch.distributed every rank constructs one, and ``save``,
    ``prepare``, ``restore``, ``wait`` and ``close`` are collective: every rank calls them, in the same order. All ranks must
    see the same storage.

    The constructor and reads change nothing on disk. The first save deletes what crashed saves left behind.

    Args:
        root: A path, or a URL of a store that fsspec knows (``s3://bucket/run``, needs ``titan-ckpt[fsspec]``). The first
            save creates it.
        keep_last: Keep this many of the newest steps. 1 is safe: a step is deleted after a newer one is committed. None keeps
            all steps; with ``keep_every`` or ``keep_best``, the newest one.
        keep_every: Also keep steps divisible by this number.
        keep_best: Also keep the best step by this metric, among those saved with it.
        best_is: Whether "min" or "max" of the metric is best.
        async_: Save in the background. ``save`` returns when the state is copied. A saver process per rank writes it to
            disk, even if the trainer is killed. The next call raises the error of a failed save.
        on_busy: With ``async_``: "wait" for the previous save, or "skip" the new one.
        overlap: With ``async_``: copy in a thread while training continues. Weights must not change during the copy: put
            the optimizer's step inside ``with ck.guard():``. The step survives killed trainers once `SaveJob.staged` is
            true on every rank, as it is after ``guard()``.
        compress: "auto" compresses optimizer state that shrinks by at least a tenth: float32 state by 17 %, bfloat16 by
            35 %. It pays if a writer gets less than about 1 GB/s. Weights stay plain safetensors.
        group: The ranks that save together, with a backend for CPU tensors; None for all ranks.
        ranks_per_node: Consecutive ranks on each node. Messages between nodes then go through the first rank of each
            node. None: every rank exchanges with every other.
        inherited_wait_s: How long (seconds) a restore, `latest` and the first save wait for the saver of a killed trainer
            that still writes a step. Rank 0 waits, the others in a collective: less than the group's timeout.

    Raises:
        ValueError: If an option is invalid, a group is given without torch.distributed, or other processes must write to
            a root in this process's memory.
        TypeError: If ``keep_last`` or ``keep_every`` is not a whole number.
    """

    def __init__(
        self,
        root: StorePath | os.PathLike[str] | str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: str | None = None,
        best_is: Literal["min", "max"] = "min",
        async_: bool = False,
        on_busy: Literal["wait", "skip"] = "wait",
        overlap: bool = False,
        compress: Literal["none", "auto"] = "none",
        group: dist.ProcessGroup | None = None,
        ranks_per_node: int | None = None,
        inherited_wait_s: float = 120.0,
    ) -> None:
        if on_busy not in ("wait", "skip"):
            raise ValueError(f"on_busy={on_busy!r} is neither 'wait' nor 'skip'.")
        if overlap and not async_:
            raise ValueError("overlap=True needs asynchronous saves. Set async_=True.")
        if compress not in ("none", "auto"):
            raise ValueError(f"compress={compress!r} is neither 'none' nor 'auto'.")
        path = as_path(root)
        # The saver process may have another working folder.
        self.root: StorePath = path.absolute() if isinstance(path, Path) else path
        self.retention = Retention(
            None if keep_last is None else _whole(keep_last, "keep_last"),
            None if keep_every is None else _whole(keep_every, "keep_every"),
            keep_best,
            best_is,
        )
        self._async, self._on_busy, self._overlap = async_, on_busy, overlap
        self._inherited_wait_s = inherited_wait_s
        self._comm = ByteComm(group, ranks_per_node)
        self._preparer = SavePreparer(self._comm, compress=compress == "auto")
        self._saver: BackgroundSaver | None = None
        self._flight: SaveJob | None = None
        self._passed_over: list[tuple[int, DamageError]] = []
        self._distrusted: set[int] = set()
        self._claim: weakref.finalize[Any, Any] | None = None
        self._opened = self._closed = False
        self._pid = os.getpid()
        if (async_ or self._comm.size > 1) and not shared_between_processes(self.root):
            raise ValueError(
                f"{self.root} can be reached by this process only, but saver processes or other ranks must write there. "
                "Use a folder or a store that all of them can reach, or async_=False in a single process."
            )

    def save(self, step: int, state: TrainState, *, metrics: Mapping[str, float] | None = None) -> SaveJob:
        """Save ``state`` as ``step``. Collective.

        When this returns, the step is committed. With ``async_``, its bytes are copied (with ``overlap``, are being
        copied), and it will be committed. An existing step of that number is replaced: it is deleted after the new
        one is committed.

        Args:
            step: Number of the step, from 0, equal on every rank.
            state: What to save. Every rank passes its own.
            metrics: Numbers for ``keep_best``. Rank 0's are saved.

        Raises:
            TypeError: If ``step`` is not a whole number, or a value in the state is neither plain data nor a tensor. The
                message gives its path.
            ValueError: If names clash, the ranks' parts do not cover whole tensors, or another living process saves to
                this root.
            CheckpointError: If a rank cannot write, or the previous asynchronous save failed. That is raised once, and
                this step is not saved. Earlier steps are intact.
        """
        self._check_open(to_write=True)
        step = _whole(step, "step")
        if self._async and self._skips(step):
            return SaveJob(step, skipped=True)
        self.wait()
        planned = self._preparer.plan(step, state, metrics)
        self._open()
        owners = [Process.of(os.getpid())]
        if self._async:
            self._saver, owners = start_savers(self._comm, self._saver)
        doubted = sorted(self._distrusted)
        job = self._preparer.begin(self.root, planned, retention=self.retention, owner=owners[0], distrusted=doubted)
        self._distrusted.discard(step)
        if self._saver is None:
            return SaveJob(step, save_now(job, planned, self._comm))
        self._flight = SaveJob(step)
        self._saver.take(job, planned, self._flight, owners, overlap=self._overlap)
        return self._flight

    def prepare(self, state: TrainState) -> None:
        """Prepare asynchronous saves of ``state``: the first then stalls training no longer than the others. Collective.

        It starts the saver processes and, in a thread, takes and page-locks the staging memory. Call it after the first
        optimizer step, when the optimizer has its state. A save before the memory is ready waits for it. Does nothing
        for synchronous saves. Raises as `save`.
        """
        self._check_open(to_write=True)
        if not self._async:
            return
        self.wait()
        planned = self._preparer.plan(0, state)
        self._open()
        self._saver, _ = start_savers(self._comm, self._saver)
        devices = {view.device for view in planned.views() if view.is_cuda}
        self._saver.prepare(planned.layout, devices)

    @contextlib.contextmanager
    def guard(self) -> Generator[None]:
        """Wait until the state is copied and a saver process has it. With ``overlap``, put the optimizer's step inside.

        Trainable parameters and optimizer state are copied in the background. Everything else (buffers, frozen
        parameters, tensors in ``extra``) is copied before `save` returns, and needs no guard.
        """
        while self._flight is not None and not self._flight.staged:
            time.sleep(0.0005)
        yield

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no save is in flight. Collective.

        Args:
            timeout_s: Limit in seconds, equal on every rank; None for no limit.

        Raises:
            CheckpointError: If the save in flight failed on any rank. Raised once.
            TimeoutError: On every rank, if it takes longer on any rank. The save stays in flight.
        """
        if not self._async:
            return
        flight, error, late = self._flight, None, ""
        if flight is not None:
            try:
                flight.wait(timeout_s)
            except TimeoutError as err:
                late = str(err)
            except CheckpointError as err:
                error = err
        if timeout_s is not None:
            replies = [reply.decode() for reply in self._comm.all_gather(late.encode())]
            if any(replies):
                raise TimeoutError(late or next(f"rank {rank}: {text}" for rank, text in enumerate(replies) if text))
        self._flight = None
        self._comm.agree(error, "the save in the background")

    def restore(
        self,
        state: TrainState,
        step: int | Literal["latest"] = "latest",
        *,
        verify: Verify = "touched",
        strict: bool = True,
        cast: bool = False,
        fallback: bool = False,
    ) -> int:
        """Fill ``state`` in place from a step of any number of ranks and any layout. Collective.

        The state does not change before every rank has matched all names and checked every block that it reads.

        Args:
            state: What to fill. Parts that are left out are not loaded.
            step: A step's number, or "latest"; equal on every rank.
            verify: "touched" checks the 4 MiB blocks that are read, "all" every block of the step, "none" only manifest,
                index, state files and sizes.
            strict: Refuse names and dtypes that differ. False loads what matches and converts dtypes.
            cast: Convert dtypes that differ, also with ``strict``: for weights that are used, not trained on.
            fallback: If any rank finds damage, all ranks log it and take the next older step. `passed_over` has the
                reasons.

        Returns:
            The restored step, equal on every rank; 0 if ``step`` is "latest" and there is no step.

        Raises:
            DamageError: On every rank, if any rank finds damage. It lists file, tensors, block and byte. With
                ``fallback`` it is a `NoIntactStepError`: every older step is damaged too.
            NoSuchStepError: On every rank, if the step does not exist.
            ValueError: If the step does not fit the state. On every rank, if the ranks ask for different steps.
        """
        self._check_open()
        step = step if step == "latest" else _whole(step, "step")
        if verify not in ("touched", "all", "none"):
            raise ValueError(f"verify={verify!r} is none of 'touched', 'all', 'none'.")
        self.wait()
        try:
            return restore_newest(
                self.root, state, step, self._comm, self._passed_over, verify=verify, strict=strict, cast=cast,
                fallback=fallback, inherited_wait_s=self._inherited_wait_s,
            )  # fmt: skip
        finally:
            self._distrusted |= {number for number, _ in self._passed_over}  # until they are saved again

    def latest(self) -> int | None:
        """The newest valid step, or None. Damaged steps are skipped with a warning.

        Waits for the saver of a killed trainer, if it still writes a step.
        """
        leftovers.await_inherited(self.root, self._inherited_wait_s)
        newest = listing.open_steps(self.root, _warn, most=1)
        return newest[-1].step if newest else None

    def steps(self) -> list[int]:
        """The valid steps in the order of their commits, oldest first. Contents of tensor files are not checked."""
        return [manifest.step for manifest in listing.open_steps(self.root, _warn)]

    def path(self, step: int) -> StorePath:
        """The folder of a step. Raises NoSuchStepError if there is none."""
        folder = listing.step_folder(self.root, step)
        if folder is None:
            raise NoSuchStepError(
                f"{self.root} has no step {step}; it has {sorted(dict(listing.step_folders(self.root)))}."
            )
        return folder

    @property
    def passed_over(self) -> tuple[tuple[int, DamageError], ...]:
        """The damaged steps that the last ``restore(fallback=True)`` did not use, newest first. Equal on every rank."""
        return tuple(self._passed_over)

    @property
    def last_error(self) -> str | None:
        """The error of the save in flight, if it failed. The next call raises it."""
        return self._flight.error if self._flight is not None else None

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight and end the saver process. Collective. May be called again.

        Args:
            timeout_s: Limit in seconds, equal on every rank; None for no limit.

        Raises:
            CheckpointError: If the save in flight failed.
            TimeoutError: If it takes longer. The Checkpointer is closed, and the saver process finishes the save.
        """
        if self._closed:
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self.wait(timeout_s)
        finally:
            self._closed = True
            if self._claim is not None:
                self._claim()
            if self._saver is not None:
                self._saver.close(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc: object) -> None:
        # After an error the other ranks may never come. The savers finish what they have.
        if exc[0] is None:
            self.close()

    def _skips(self, step: int) -> bool:
        """Whether to skip this save: the previous one is in flight on some rank."""
        if self._on_busy == "wait":
            return False
        busy = self._flight is not None and not self._flight.done
        skips = any(reply == b"1" for reply in self._comm.all_gather(b"1" if busy else b"0"))
        if skips:
            _log.warning("step %d is skipped: the previous save is still in flight", step)
        return skips

    def _open(self) -> None:
        """Before the first save: claim the root and delete leftovers. Collective."""
        if self._opened:
            return

        def open_root() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            leftovers.await_inherited(self.root, self._inherited_wait_s)
            owner = Process.of(os.getpid())
            take_root(self.root, owner)
            self._claim = weakref.finalize(self, _release, self.root, owner)
            for path in leftovers.sweep(self.root):
                _log.info("deleted %s: an unfinished save or deletion", path)

        self._comm.from_rank0(
            open_root,
            f"opening {self.root}",
            lambda err: CheckpointError(f"{self.root} cannot be used as the checkpoint folder: {err}"),
        )
        self._opened = True

    def _check_open(self, *, to_write: bool = False) -> None:
        if self._closed:
            raise ValueError(f"the Checkpointer of {self.root} is closed. Make a new one.")
        if to_write and self._pid != os.getpid():
            raise ValueError(
                f"the Checkpointer of {self.root} was made in process {self._pid}, and process {os.getpid()} is a fork of it: "
                "both would save there. Make a new Checkpointer in this process, with its own folder."
            )


def _warn(path: StorePath, err: Exception) -> None:
    _log.warning("skipped %s: %s", path, err)


def _release(root: StorePath, owner: Process) -> None:
    if owner.pid != os.getpid():  # a forked child
        return
    if isinstance(root, Path) or threading.current_thread() is threading.main_thread():
        release_root(root, owner)
    else:  # collected in a thread of the store's client, which cannot wait for itself
        threading.Thread(target=release_root, args=(root, owner), name="titan-ckpt-release").start()


def _whole(value: Any, name: str) -> int:
    """A whole number of any type (numpy's, a tensor's) as an int. Raises TypeError for anything else."""
    try:
        return operator.index(value)
    except TypeError as err:
        raise TypeError(f"{name}={value!r} is not a whole number but {type(value).__name__}. Give an int.") from err
