"""The claim of the one trainer that saves below a folder: a file that says who it is.

Two trainers that save to one folder delete each other's steps, each as its own retention says. The claim is for people
who start a run twice, not a lock: it cannot see a trainer on another machine, and where two take over the claim of a
dead one in the same instant, both may get it.
"""

import contextlib
import json
import logging
import os
import secrets
from dataclasses import asdict
from pathlib import Path

from titan_ckpt._process import Process
from titan_ckpt._storage import ABSENT, StorePath

_log = logging.getLogger("titan_ckpt")

LOCK_NAME = ".lock"
"""Lies below the folder of the steps."""


def take_root(root: StorePath, owner: Process) -> None:
    """Claim the folder of the steps for the trainer that is about to save there. Readers need not.

    A claim of a dead process is taken over; so is, with a warning, one of another machine, which cannot be asked. May be
    called again.

    Raises:
        ValueError: If another process of this machine has claimed it and lives.
        OSError: If the claim cannot be written.
    """
    held = _lock_owner(root)
    if held == owner:
        return
    _refuse_rival(root, held, owner)
    if held is not None and not held.local:
        _log.warning("%s was saved to by %s; if that still runs, each will delete the other's steps", root, held)
    claim = json.dumps(asdict(owner)).encode()
    if isinstance(root, Path):
        _write_lock(root, claim, held)
    else:
        (root / LOCK_NAME).write_bytes(claim)
    _refuse_rival(root, _lock_owner(root), owner)  # one that claimed it in the same moment


def release_root(root: StorePath, owner: Process) -> None:
    """Give up a claim of `take_root`; does nothing if it is another's. What cannot be removed is taken over later."""
    with contextlib.suppress(OSError):
        if _lock_owner(root) == owner:
            (root / LOCK_NAME).unlink(missing_ok=True)


def drop_dead_claim(root: StorePath) -> None:
    """Remove a claim whose process is proven dead."""
    with contextlib.suppress(OSError):
        if (owner := _lock_owner(root)) is not None and not owner.alive:
            (root / LOCK_NAME).unlink(missing_ok=True)


def _refuse_rival(root: StorePath, held: Process | None, owner: Process) -> None:
    if held is not None and held != owner and held.local and held.alive:
        raise ValueError(
            f"{root} is being saved to by {held}, so {owner} cannot save there: each would delete the other's steps. "
            "Close that one's Checkpointer or end it, or give this run a folder of its own."
        )


def _write_lock(root: Path, claim: bytes, held: Process | None) -> None:
    """Write a claim whole, over ``held`` but not over one that came in between."""
    lock, part = root / LOCK_NAME, root / f"{LOCK_NAME}.{secrets.token_hex(4)}"
    part.write_bytes(claim)
    try:
        os.link(part, lock)
    except OSError:  # there is one, or the file system has no links
        if _lock_owner(root) == held:
            part.replace(lock)
    finally:
        part.unlink(missing_ok=True)


def _lock_owner(root: StorePath) -> Process | None:
    """Who claimed the folder; None if nobody did, or the claim is no claim."""
    try:
        return Process.decode(json.loads((root / LOCK_NAME).read_bytes()))
    except (*ABSENT, ValueError, KeyError, TypeError):
        return None
