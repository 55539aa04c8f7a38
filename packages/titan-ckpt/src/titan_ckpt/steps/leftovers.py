"""What crashed saves and deletions left behind, and savers that outlive their trainer.

Only proven leftovers are deleted (`titan_ckpt.steps.commit`).
"""

import contextlib
import logging
import os
import time
from pathlib import Path

from titan_ckpt.errors import DamageError
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.steps.claim import drop_dead_claim, owner_alive, owner_of
from titan_ckpt.steps.commit import TRASH, discard
from titan_ckpt.steps.listing import all_revisions, folders_below, is_unfinished, newest_revisions, unfinished
from titan_ckpt.storage.paths import StorePath, is_folder, renames

_log = logging.getLogger("titan_ckpt")

SERVER = "titan_ckpt.background.server"
"""The module that a saver process runs."""


def sweep(root: StorePath) -> list[StorePath]:
    """Delete leftovers and return them.

    An unfinished save is kept while its writer may be alive. A writer on another machine counts as alive for a day.

    Raises:
        OSError: If the storage does not answer.
    """
    removed: list[StorePath] = []
    for path in find_leftovers(root):
        with contextlib.suppress(OSError):  # another user's, say
            discard(path)
            removed.append(path)
    drop_dead_claim(root)
    return removed


def find_leftovers(root: StorePath) -> list[StorePath]:
    """What `sweep` would delete: unfinished saves of dead processes, half deleted steps, and replaced revisions."""
    return [path for path in folders_below(root) if is_leftover(path)] + _superseded(root)


def is_leftover(path: StorePath) -> bool:
    """Whether a folder is left from a crashed save or deletion. Replaced revisions are not looked for."""
    if renames(path) and TRASH.fullmatch(path.name):
        return is_folder(path)
    # In a store, its writer may have committed it and removed its own name between the two looks: a third one shows that.
    return is_unfinished(path) and not owner_alive(path) and (renames(path) or is_unfinished(path))


def _superseded(root: StorePath) -> list[StorePath]:
    """Revisions of steps that have a newer, valid revision."""
    found = all_revisions(root)
    replaced: list[StorePath] = []
    for last in newest_revisions(found):
        older = [other.path for other in found if other.step == last.step and other.path != last.path]
        with contextlib.suppress(DamageError, ValueError):
            if older and Manifest.open(last.path):
                replaced += older
    return replaced


def await_inherited(root: StorePath, limit_s: float) -> None:
    """Wait for savers whose trainer is gone or is this process: their step is the one to resume from."""
    deadline = time.monotonic() + limit_s
    while _is_written(root):
        if time.monotonic() >= deadline:
            _log.warning(
                "%s: the saver of a killed trainer still writes after %g s; its step is not waited for", root, limit_s
            )
            return
        time.sleep(0.05)


def _is_written(root: StorePath) -> bool:
    owners = [owner_of(path) for path in unfinished(root)]
    return any(owner and owner.local and owner.alive and _inherited(owner.pid) for owner in owners)


def _inherited(pid: int) -> bool:
    """Whether a local process is a saver whose trainer is gone or is this process."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False  # it has just ended
    if len(arguments) < 6 or arguments[3] != SERVER.encode():
        return False  # a trainer that saves by itself
    return parent == os.getpid() or str(parent).encode() != arguments[5]
