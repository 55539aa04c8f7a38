"""Which step a restore takes: the requested one or, with ``fallback``, an older one if that is damaged.

Rank 0 lists the steps, and all ranks use its list: a network file system may show each rank another one. If a run that
saves to the same root deletes the step that is being read, the steps are listed again.
"""

import contextlib
import logging
from typing import Literal

from titan_ckpt.background.inherited import await_inherited
from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import CheckpointError, DamageError
from titan_ckpt.load.copies import Verify
from titan_ckpt.load.restore import restore_step
from titan_ckpt.state.train_state import TrainState
from titan_ckpt.steps import listing
from titan_ckpt.storage.paths import StorePath

_log = logging.getLogger("titan_ckpt")

# How often the steps are listed if other processes delete them.
_LISTINGS = 20


def restore_newest(
    root: StorePath,
    state: TrainState,
    step: int | Literal["latest"],
    comm: ByteComm,
    passed_over: list[tuple[int, DamageError]],
    *,
    verify: Verify,
    strict: bool,
    fallback: bool,
) -> int:
    """As `Checkpointer.restore`. ``passed_over`` gets the damaged steps that were not used, newest first. Collective."""
    passed_over.clear()
    for attempt in range(1, _LISTINGS + 1):
        present = _listed(root, comm)
        if step != "latest":  # it and the older ones
            numbers = [number for number, _ in present]
            if step not in numbers:
                raise ValueError(f"{root} has no step {step}; it has {numbers}.")
            present = present[: numbers.index(step) + 1]
        if not present:
            return 0
        passed_over.clear()
        for number, name in reversed(present):
            try:
                return restore_step(root / name, state, comm, verify, strict)
            except (CheckpointError, OSError) as err:  # raised on every rank: all continue alike
                if attempt < _LISTINGS and _gone(root / name, comm):
                    break
                if not isinstance(err, DamageError) or not fallback or number == present[0][0]:
                    raise
                # A new error: the traceback of this one would keep buffers and maps alive.
                passed_over.append((number, DamageError(err.step, err.damages, err.seen_by)))
                _log.warning("step %d is not used, an older one is tried: %s", number, err)
    raise AssertionError("unreachable: the last listing returns or raises")


def _listed(root: StorePath, comm: ByteComm) -> list[tuple[int, str]]:
    """Number and folder name of every step, oldest first, as rank 0 sees them."""

    def find() -> list[tuple[int, str]]:
        await_inherited(root)
        return [(number, path.name) for number, path in listing.step_folders(root)]

    return comm.from_rank0(
        find, f"listing {root}", lambda err: CheckpointError(f"the steps below {root} cannot be listed: {err}")
    )


def _gone(path: StorePath, comm: ByteComm) -> bool:
    """Whether a step was deleted, as rank 0 sees it."""
    gone = False
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            gone = listing.is_gone(path)
    return comm.broadcast(b"1" if gone else b"") == b"1"
