"""The one object a training loop talks to."""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from titan_ckpt import _commit
from titan_ckpt._arena import staging_point
from titan_ckpt._async import SaveJob, Saver
from titan_ckpt._errors import CheckpointError, DamageError
from titan_ckpt._job import Job
from titan_ckpt._load import Verify
from titan_ckpt._manifest import Manifest
from titan_ckpt._ranks import Ranks
from titan_ckpt._restore import restore_step
from titan_ckpt._retention import Retention
from titan_ckpt._save import PlanCache, begin_job, plan_layout, plan_step, save_now
from titan_ckpt._saver import report_failure
from titan_ckpt._state import TrainState
from titan_ckpt._storage import StorePath, as_path

_log = logging.getLogger("titan_ckpt")

# How long a new Checkpointer waits for a save that a killed trainer's saver is still finishing.
_INHERITED_SAVE_S = 120.0
# How long savers wait for each other within a step.
_MEETING_S = 3600.0


class Checkpointer:
    """Saves and restores the state of a training loop below one folder.

    Without torch.distributed it serves one process. With it, every rank constructs one, and ``save``, ``restore``,
    ``wait`` and ``close`` are collective: every rank calls them, in the same order. All ranks see one storage.

    Args:
        root: The folder of the steps; made if missing. A path, or a URL that fsspec knows (``s3://bucket/run``), with
            the extra ``titan-ckpt[fsspec]``.
        keep_last: Keep this many newest steps; None keeps all. 1 is allowed: a step is deleted only after a newer one
            is committed, and an unfinished save is never counted.
        keep_every: Also keep steps divisible by this number.
        keep_best: Also keep the best step by this metric, of those saved with it.
        best_is: Whether "min" or "max" of the metric is best.
        async_: Save in the background: ``save`` returns when the state's bytes are copied, and a saver process beside
            each rank brings them to disk, also if the trainer is killed in the meantime. Failures are raised by the
            next call.
        on_busy: With ``async_``, what a save does while the last one is in flight: "wait" for it, or "skip".
        overlap: With ``async_``, copy in a thread while training goes on. Weights must not change before the copy is
            made: put the optimizer's step inside ``with ck.guard():``.
        compress: "auto" compresses optimizer state (byte-shuffle and zstd, in the saver process if there is one)
            wherever a probe gains a tenth: float32 state takes 17 % less, bfloat16 35 %. Worth it where a writer gets
            less than about 1 GB/s. Weights stay plain safetensors.
        group: The ranks that save together, over a backend with CPU tensors; None for all.

    Raises:
        ValueError: If a retention rule would keep nothing, or a group is given without torch.distributed.
        CheckpointError: If the folder cannot be made.
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
    ) -> None:
        if on_busy not in ("wait", "skip"):
            raise ValueError(f"on_busy={on_busy!r} is neither 'wait' nor 'skip'.")
        if overlap and not async_:
            raise ValueError(
                "overlap=True copies in the background, which only asynchronous saves do. Set async_=True."
            )
        if compress not in ("none", "auto"):
            raise ValueError(f"compress={compress!r} is neither 'none' nor 'auto'.")
        self.root = as_path(root)
        self._compress = compress == "auto"
        self.retention = Retention(keep_last, keep_every, keep_best, best_is)
        self._async, self._on_busy, self._overlap = async_, on_busy, overlap
        self._ranks = Ranks(group)
        self._cache = PlanCache()
        self._saver: Saver | None = None
        self._flight: SaveJob | None = None
        self._passed_over: list[tuple[int, DamageError]] = []
        self._closed = False
        error: Exception | None = None
        if self._ranks.rank == 0:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                _await_inherited(self.root)
                for path in _commit.sweep(self.root):
                    _log.info("removed %s, left by a save or deletion that did not finish", path)
            except OSError as err:
                error = CheckpointError(f"{self.root} cannot be used as a checkpoint folder: {err}")
        self._ranks.agree(error, f"opening {self.root}")

    def save(self, step: int, state: TrainState, *, metrics: Mapping[str, float] | None = None) -> SaveJob:
        """Save ``state`` as ``step``. Collective.

        When this returns, the step is on disk and committed; with ``async_``, its bytes are copied (with ``overlap``,
        being copied) and will be. A step that exists already is replaced: the new one is committed first, the old one
        deleted after.

        Args:
            step: Number of the step, from 0.
            state: What to save; every rank passes its own.
            metrics: Numbers to judge the step by, for ``keep_best``; rank 0's are taken.

        Raises:
            TypeError: If the state holds something that is neither plain data nor a tensor; the message has its path.
            ValueError: If names clash, or the ranks' parts do not make up whole tensors.
            CheckpointError: If a rank cannot write, or the background save before this one failed (raised once; this
                step is not saved then). Earlier steps are intact.
        """
        self._check_open()
        if self._async and self._skips(step):
            return SaveJob(step, skipped=True)
        self.wait()
        planned = plan_step(step, state, self._ranks, self._cache, metrics)
        savers = self._meet() if self._async else [_commit.Process.of(os.getpid())]
        job = begin_job(
            self.root,
            step,
            planned,
            self._ranks,
            self._cache,
            retention=self.retention,
            compress=self._compress,
            owner=savers[0],
        )
        if not self._async:
            return SaveJob(step, save_now(job, planned, self._ranks))
        self._flight = SaveJob(step)
        views = list(planned.views())
        arguments = (job, views, staging_point(views), self._flight, savers)
        if self._overlap:
            threading.Thread(target=self._hand_over, args=arguments, name="titan-ckpt").start()
        else:
            self._hand_over(*arguments)
        return self._flight

    def prepare(self, state: TrainState) -> None:
        """Get ready for asynchronous saves of ``state`` while training goes on, so that the first holds it no longer
        than the others. Collective.

        Starts the saver processes and, in a thread, takes and page-locks the staging memory. Call it once the
        optimizer has its state, after the first step; a save that comes earlier than the memory waits for it. Does
        nothing with synchronous saves.

        Args:
            state: What will be saved; nothing of it is kept.

        Raises:
            TypeError, ValueError: As `save` does.
        """
        self._check_open()
        if not self._async:
            return
        self.wait()
        planned = plan_step(0, state, self._ranks, self._cache)
        self._meet()
        assert self._saver is not None
        devices = {view.device for view in planned.views() if view.is_cuda}
        self._saver.prepare(plan_layout(planned, self._ranks, self._cache, self._compress), devices)

    @contextlib.contextmanager
    def guard(self) -> Generator[None]:
        """Wait until the state may change: put the optimizer's step inside, if ``overlap`` is set."""
        while self._flight is not None and not self._flight.staged:
            time.sleep(0.0005)
        yield

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no save is in flight. Collective.

        Raises:
            CheckpointError: If the save in flight failed on any rank. Raised once.
            TimeoutError: If it takes longer than ``timeout_s`` seconds.
        """
        flight, error = self._flight, None
        if not self._async:
            return
        if flight is not None:
            try:
                flight.wait(timeout_s)
            except CheckpointError as err:
                error = err
            self._flight = None
        self._ranks.agree(error, "the save in the background")

    def restore(
        self,
        state: TrainState,
        step: int | Literal["latest"] = "latest",
        *,
        verify: Verify = "touched",
        strict: bool = True,
        fallback: bool = False,
    ) -> int:
        """Fill ``state`` in place from a step saved by any number of ranks in any layout. Collective.

        Nothing is touched before every rank has matched all names and checked every block it reads.

        Args:
            state: What to fill; parts left out of it are not loaded.
            step: A step's number, or "latest".
            verify: "touched" checks the digest of each 4 MiB block that is read, "all" of every block of the step,
                "none" only manifest, index, state files and sizes.
            strict: Refuse names or dtypes that differ. False loads what matches and converts dtypes.
            fallback: If any rank finds the step damaged, all log what is and take the next older one together, down to
                the oldest. `passed_over` has the reasons.

        Returns:
            The step restored, the same on every rank; 0 if ``step`` is "latest" and there is none.

        Raises:
            DamageError: If the step is not what was written. Lists file, tensors, block and byte, and is raised by
                every rank if any finds it. With ``fallback``, only if no older step is intact.
            ValueError: If the step does not exist, or does not fit the state.
        """
        self._check_open()
        if verify not in ("touched", "all", "none"):
            raise ValueError(f"verify={verify!r} is none of 'touched', 'all', 'none'.")
        self.wait()
        self._passed_over.clear()
        told = None
        if self._ranks.rank == 0:
            found = _commit.step_folders(self.root)
            told = json.dumps([[number, str(path)] for number, path in found]).encode()
        present: list[tuple[int, str]] = json.loads(self._ranks.broadcast(told))
        tried = [(number, path) for number, path in present if step == "latest" or number <= step]
        if step == "latest" and not tried:
            return 0
        if step != "latest" and (not tried or tried[-1][0] != step):
            raise ValueError(
                f"there is no step {step} below {self.root}; there are {[number for number, _ in present]}."
            )
        for number, path in reversed(tried):
            try:
                return restore_step(as_path(path), state, self._ranks, verify, strict)
            except DamageError as err:  # of every rank, if of any: all take the next one
                if not fallback or number == tried[0][0]:
                    raise
                # A fresh one: this one's traceback would keep the attempt's buffers and maps alive.
                self._passed_over.append((number, DamageError(err.step, err.damages, err.seen_by)))
                _log.warning("step %d is not used, an older one is tried: %s", number, err)
        raise AssertionError("unreachable: the oldest step returns or raises")

    def latest(self) -> int | None:
        """The newest valid step, or None. Skips a damaged one with a warning that says what is wrong."""
        for step, path in reversed(_commit.step_folders(self.root)):
            if _valid(path) is not None:
                return step
        return None

    def steps(self) -> list[int]:
        """Every valid step, oldest first: manifest intact, every file present in full size."""
        return [step for step, path in _commit.step_folders(self.root) if _valid(path) is not None]

    def path(self, step: int) -> StorePath:
        """The folder of a step.

        Raises:
            ValueError: If there is no such step.
        """
        folders = dict(_commit.step_folders(self.root))
        if step not in folders:
            raise ValueError(f"there is no step {step} below {self.root}; there are {sorted(folders)}.")
        return folders[step]

    @property
    def passed_over(self) -> tuple[tuple[int, DamageError], ...]:
        """Steps that the last ``restore(fallback=True)`` did not use, newest first, and what is wrong with each.

        The same on every rank. Empty if the first step tried was intact.
        """
        return tuple(self._passed_over)

    @property
    def last_error(self) -> str | None:
        """Why the save in flight has failed, if it has; the next call raises it."""
        return self._flight.error if self._flight is not None else None

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight and end the saver process. Collective. May be called again.

        Raises:
            CheckpointError: If the save in flight failed.
        """
        if self._closed:
            return
        try:
            self.wait(timeout_s)
        finally:
            self._closed = True
            if self._saver is not None:
                self._saver.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc: object) -> None:
        # After an error other ranks may never come; what was handed to the savers is finished by them.
        if exc[0] is None:
            self.close()

    def _skips(self, step: int) -> bool:
        """Whether this save is left out: it is if any rank's last one is in flight."""
        if self._on_busy == "wait":
            return False
        busy = self._flight is not None and not self._flight.done
        skips = any(reply == b"1" for reply in self._ranks.all_gather(b"1" if busy else b"0"))
        if skips:
            _log.warning("step %d is not saved: the save before it is still in flight", step)
        return skips

    def _meet(self) -> list[_commit.Process]:
        """Start this rank's saver if it does not run; return every rank's. Collective."""
        if self._saver is not None and not self._saver.alive:
            self._saver.close()
            self._saver = None
        if self._saver is None:
            self._saver = Saver()
        told = self._ranks.all_gather(json.dumps(asdict(self._saver.process)).encode())
        return [_commit.Process(**json.loads(reply)) for reply in told]

    def _hand_over(
        self, job: Job, views: list[Tensor], ready: Any, result: SaveJob, savers: list[_commit.Process]
    ) -> None:
        """Copy the state's bytes and give the job to the saver."""
        assert self._saver is not None
        try:
            self._saver.stage(job, views, ready)
            result.mark_staged()
            self._saver.submit(job, result, savers, _MEETING_S)
        except Exception as err:
            report_failure(job, str(err))  # the other savers must not wait for this rank's part
            result.finish(None, str(err))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the Checkpointer of {self.root} is closed. Make a new one.")


def _valid(path: StorePath) -> Manifest | None:
    try:
        return Manifest.open(path)
    except (DamageError, ValueError) as err:
        _log.warning("skipped %s: %s", path, err)
        return None


def _await_inherited(root: StorePath) -> None:
    """Let savers of a trainer that ended finish: their step is the one to resume from."""
    deadline = time.monotonic() + _INHERITED_SAVE_S
    while time.monotonic() < deadline:
        owners = [_commit.owner_of(path) for path in _commit.unfinished(root)]
        if not any(owner and owner.local and owner.pid != os.getpid() and owner.alive for owner in owners):
            return
        time.sleep(0.05)
