"""The one object a training loop talks to."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from titan_ckpt import _commit
from titan_ckpt._errors import CheckpointError, DamageError
from titan_ckpt._format import parse_step_name
from titan_ckpt._load import Verify
from titan_ckpt._manifest import Manifest
from titan_ckpt._ranks import Ranks
from titan_ckpt._restore import restore_step
from titan_ckpt._retention import Retention
from titan_ckpt._save import PlanCache, save_step
from titan_ckpt._state import TrainState
from titan_ckpt._version import VERSION

_log = logging.getLogger("titan_ckpt")


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A save that was begun."""

    step: int
    path: Path
    """The step's folder."""

    @property
    def done(self) -> bool:
        """Whether the step is committed."""
        return True

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the step is committed and return its folder."""
        return self.path


class Checkpointer:
    """Saves and restores the state of a training loop below one folder.

    Without torch.distributed it serves one process. With it, every rank constructs one, and ``save``, ``restore`` and
    ``close`` are collective: every rank calls them, in the same order. All ranks see one file system.

    Args:
        root: The folder of the steps; made if missing.
        keep_last: Keep this many newest steps; None keeps all. 1 is allowed: a step is deleted only after a newer one
            is committed, and an unfinished save is never counted.
        keep_every: Also keep steps divisible by this number.
        keep_best: Also keep the best step by this metric, of those saved with it.
        best_is: Whether "min" or "max" of the metric is best.
        group: The ranks that save together, over a backend with CPU tensors; None for all.

    Raises:
        ValueError: If a retention rule would keep nothing, or a group is given without torch.distributed.
        CheckpointError: If the folder cannot be made.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: str | None = None,
        best_is: Literal["min", "max"] = "min",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.root = Path(root)
        self.retention = Retention(keep_last, keep_every, keep_best, best_is)
        self._ranks = Ranks(group)
        self._cache = PlanCache()
        self._closed = False
        error: Exception | None = None
        if self._ranks.rank == 0:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                for path in _commit.sweep(self.root):
                    _log.info("removed %s, left by a save or deletion that did not finish", path)
            except OSError as err:
                error = CheckpointError(f"{self.root} cannot be used as a checkpoint folder: {err}")
        self._ranks.agree(error, f"opening {self.root}")

    def save(self, step: int, state: TrainState, *, metrics: Mapping[str, float] | None = None) -> SaveJob:
        """Save ``state`` as ``step``; when this returns, the step is on disk and committed. Collective.

        A step that exists already is replaced: the new one is committed first, the old one deleted after.

        Args:
            step: Number of the step, from 0.
            state: What to save; every rank passes its own.
            metrics: Numbers to judge the step by, for ``keep_best``; rank 0's are taken.

        Raises:
            TypeError: If the state holds something that is neither plain data nor a tensor; the message has its path.
            ValueError: If names clash, or the ranks' parts do not make up whole tensors.
            CheckpointError: If a rank cannot write. Earlier steps are intact.
        """
        self._check_open()
        path = save_step(self.root, step, state, self._ranks, self._cache, dict(metrics or {}), VERSION)
        if self._ranks.rank == 0:
            self._purge(step, path)
        return SaveJob(step, path)

    def restore(
        self,
        state: TrainState,
        step: int | Literal["latest"] = "latest",
        *,
        verify: Verify = "touched",
        strict: bool = True,
    ) -> int:
        """Fill ``state`` in place from a step saved by any number of ranks in any layout. Collective.

        Nothing is touched before every rank has matched all names and checked every block it reads.

        Args:
            state: What to fill; parts left out of it are not loaded.
            step: A step's number, or "latest".
            verify: "touched" checks the digest of each 4 MiB block that is read, "all" of every block of the step,
                "none" only manifest, index, state files and sizes.
            strict: Refuse names or dtypes that differ. False loads what matches and converts dtypes.

        Returns:
            The step restored; 0 if ``step`` is "latest" and there is none.

        Raises:
            DamageError: If the step is not what was written. Lists file, tensors, block and byte.
            ValueError: If the step does not exist, or does not fit the state.
        """
        self._check_open()
        if verify not in ("touched", "all", "none"):
            raise ValueError(f"verify={verify!r} is none of 'touched', 'all', 'none'.")
        told = None
        if self._ranks.rank == 0:
            found = _commit.step_folders(self.root)
            chosen = found[-1:] if step == "latest" else [entry for entry in found if entry[0] == step]
            told = json.dumps([[str(path) for _, path in chosen], [number for number, _ in found]]).encode()
        paths, present = json.loads(self._ranks.broadcast(told))
        if paths:
            return restore_step(Path(paths[0]), state, self._ranks, verify, strict)
        if step == "latest":
            return 0
        raise ValueError(f"there is no step {step} below {self.root}; there are {present}.")

    def latest(self) -> int | None:
        """The newest valid step, or None. Skips a damaged one with a warning that says what is wrong."""
        for step, path in reversed(_commit.step_folders(self.root)):
            if _valid(path) is not None:
                return step
        return None

    def steps(self) -> list[int]:
        """Every valid step, oldest first: manifest intact, every file present in full size."""
        return [step for step, path in _commit.step_folders(self.root) if _valid(path) is not None]

    def path(self, step: int) -> Path:
        """The folder of a step.

        Raises:
            ValueError: If there is no such step.
        """
        folders = dict(_commit.step_folders(self.root))
        if step not in folders:
            raise ValueError(f"there is no step {step} below {self.root}; there are {sorted(folders)}.")
        return folders[step]

    def close(self) -> None:
        """Finish. A closed checkpointer refuses to save or restore. May be called again."""
        self._closed = True

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _purge(self, step: int, path: Path) -> None:
        """Delete what retention no longer keeps, and older revisions of ``step``. The new step is committed already."""
        try:
            older = [p for p in self.root.iterdir() if p != path and _is_step(p, step)]
            valid = {n: m.metrics for n, p in _commit.step_folders(self.root) if (m := _valid(p)) is not None}
            surplus = [self.path(number) for number in self.retention.surplus(valid) if number != step]
            for gone in older + surplus:
                _commit.discard(gone)
        except OSError as err:  # the save itself succeeded; a full folder is not worth the run
            _log.warning("%s: old steps could not be deleted: %s", self.root, err)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the Checkpointer of {self.root} is closed. Make a new one.")


def _valid(path: Path) -> Manifest | None:
    try:
        return Manifest.open(path)
    except (DamageError, ValueError) as err:
        _log.warning("skipped %s: %s", path, err)
        return None


def _is_step(path: Path, step: int) -> bool:
    parsed = parse_step_name(path.name)
    return parsed is not None and parsed[0] == step
