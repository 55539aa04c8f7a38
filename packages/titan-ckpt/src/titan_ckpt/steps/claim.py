"""The claim of the one trainer that saves below a folder, and of the process that makes a save: files that say who it is.

Two trainers that save to one folder delete each other's steps, each as its own retention says. The claim is for people
who start a run twice, not a lock: it cannot see a trainer on another machine, and where two take over the claim of a
dead one in the same instant, both may get it.

Several Checkpointers of one process share a claim. It counts them, and goes with the last. The count is in the file, so
it does not matter how each of them spells the folder (a link, a relative path, a mount).
"""

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from dataclasses import asdict
from pathlib import Path

from titan_ckpt.steps.process import Process
from titan_ckpt.storage.paths import ABSENT, StorePath, renames

_log = logging.getLogger("titan_ckpt")

LOCK_NAME = ".lock"
"""Lies below the folder of the steps."""

OWNER_NAME = ".owner.json"
"""Says who makes an unfinished save; gone once it is committed or given up."""

# Unfinished saves of another machine cannot be asked whether they are alive; they are left for a day.
_FOREIGN_AGE_S = 86_400
# Longer than a folder stays without a named owner while it is made.
_NAMELESS_AGE_S = 60

# One thread of a process counts at a time. Re-entrant: a Checkpointer may be collected, and give up its share, while
# another one counts. At worst a share is then left over, and the claim stays until the process ends.
_counting = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: globals().update(_counting=threading.RLock()))


def take_root(root: StorePath, owner: Process) -> None:
    """Claim the folder of the steps for the trainer that is about to save there. Readers need not.

    A claim of a dead process is taken over; so is, with a warning, one of another machine, which cannot be asked. A claim
    of the same process is shared: it stays until `release_root` was called as often as this.

    Raises:
        ValueError: If another process of this machine has claimed it and lives.
        OSError: If the claim cannot be written.
    """
    with _counting:
        held, holders = _read_lock(root)
        _refuse_rival(root, held, owner)
        if held is not None and not held.local:
            _log.warning(
                "%s is claimed by %s, which cannot be checked from here; if it still runs, each deletes the other's steps",
                root,
                held,
            )
        _write_lock(root, owner, holders + 1 if held == owner else 1, held)
        _refuse_rival(root, _read_lock(root)[0], owner)  # one that claimed it in the same moment


def release_root(root: StorePath, owner: Process) -> None:
    """Give up one share of a claim of `take_root`; does nothing if it is another's.

    The claim goes with the last share. What cannot be removed is taken over later.
    """
    with _counting, contextlib.suppress(OSError):
        held, holders = _read_lock(root)
        if held != owner:
            return
        if holders > 1:
            _write_lock(root, owner, holders - 1, held)
        else:
            (root / LOCK_NAME).unlink(missing_ok=True)


def drop_dead_claim(root: StorePath) -> None:
    """Remove a claim whose process is proven dead."""
    with contextlib.suppress(OSError):
        if (owner := _read_lock(root)[0]) is not None and not owner.alive:
            (root / LOCK_NAME).unlink(missing_ok=True)


def name_owner(folder: StorePath, owner: Process) -> None:
    """Say who makes an unfinished save.

    Raises:
        OSError: If that cannot be written.
    """
    (folder / OWNER_NAME).write_bytes(json.dumps({**asdict(owner), "began": time.time()}).encode())


def owner_of(folder: StorePath) -> Process | None:
    """Who makes an unfinished save; None in the moment before it is named."""
    try:
        return _owner(folder)[0]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def disown(folder: StorePath) -> None:
    """Take the owner's name off a step. It is committed: that it stays is no reason to call the save failed."""
    with contextlib.suppress(OSError):
        (folder / OWNER_NAME).unlink(missing_ok=True)


def owner_alive(folder: StorePath) -> bool:
    """Whether the process that makes a save may be alive; True unless it is proven not to be."""
    try:
        owner, began = _owner(folder)
    except (*ABSENT, ValueError, KeyError, TypeError):
        # On a file system it is named in a moment, or never. Of objects, the name is the first to be written and, but
        # for a commit, goes with the rest: this is half deleted.
        return renames(folder) and _age_s(folder, 0.0) < _NAMELESS_AGE_S
    except OSError:
        return True
    return owner.alive and (owner.local or _age_s(folder, began) < _FOREIGN_AGE_S)


def _owner(folder: StorePath) -> tuple[Process, float]:
    """Who makes a save, and since when."""
    told = json.loads((folder / OWNER_NAME).read_bytes())
    return Process.decode(told), told["began"]


def _age_s(folder: StorePath, began: float) -> float:
    """How long a save was not written to; of objects, how long ago it began."""
    try:
        return time.time() - (folder.stat().st_mtime if isinstance(folder, Path) else began)
    except FileNotFoundError:
        return 0.0


def _refuse_rival(root: StorePath, held: Process | None, owner: Process) -> None:
    if held is not None and held != owner and held.local and held.alive:
        raise ValueError(
            f"{root} is being saved to by {held}, so {owner} cannot save there: each would delete the other's steps. "
            "Close that one's Checkpointer or end it, or give this run a folder of its own."
        )


def _write_lock(root: StorePath, owner: Process, holders: int, held: Process | None) -> None:
    """Write a claim whole, over ``held`` but not over one that came in between."""
    claim = json.dumps({**asdict(owner), "holders": holders}).encode()
    if not isinstance(root, Path):
        (root / LOCK_NAME).write_bytes(claim)
        return
    lock, part = root / LOCK_NAME, root / f"{LOCK_NAME}.{secrets.token_hex(4)}"
    part.write_bytes(claim)
    try:
        os.link(part, lock)
    except OSError:  # there is one, or the file system has no links
        if _read_lock(root)[0] == held:
            part.replace(lock)
    finally:
        part.unlink(missing_ok=True)


def _read_lock(root: StorePath) -> tuple[Process | None, int]:
    """Who claimed the folder, and its number of Checkpointers there; None if nobody did, or the claim is no claim."""
    try:
        told = json.loads((root / LOCK_NAME).read_bytes())
        return Process.decode(told), int(told.get("holders", 1))
    except (*ABSENT, ValueError, KeyError, TypeError, AttributeError):
        return None, 0
