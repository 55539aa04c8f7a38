"""Which process saves below a folder, or makes a save: files that name it, and whether it still runs.

Two trainers that save to one folder delete each other's steps, each as its own retention says. The claim is for people
who start a run twice, not a lock: it cannot see a trainer on another machine, and where two take over the claim of a
dead one in the same instant, both may get it. A file lock would be kept by forked data loaders of a killed trainer.

Several Checkpointers of one process share a claim. It counts them, and goes with the last. The count is in the file, so
it does not matter how each of them spells the folder (a link, a relative path, a mount).
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some machine, distinct from a later one that gets the same number.

    Process numbers mean something only in one process namespace: containers of one machine count their own, and may
    share the host's name.
    """

    host: str
    pid: int
    started: str | None
    """In the kernel's ticks."""
    boot: str | None = None
    """The kernel's random id of this boot of the machine."""
    namespace: int | None = None
    """The kernel's number of the process namespace that ``pid`` counts in."""

    @classmethod
    def of(cls, pid: int) -> "Process":
        """A process of this machine and namespace."""
        return cls(socket.gethostname(), pid, _started(pid), boot_id(), _namespace())

    @classmethod
    def decode(cls, value: dict[str, Any]) -> "Process":
        """Undo ``dataclasses.asdict``; other keys are ignored.

        Raises:
            KeyError: If a field is missing.
        """
        return cls(*(value[name] for name in ("host", "pid", "started", "boot", "namespace")))

    @property
    def local(self) -> bool:
        """Whether it is of this machine, boot and namespace, so that `alive` can tell."""
        return (self.host, self.boot, self.namespace) == (socket.gethostname(), boot_id(), _namespace())

    @property
    def alive(self) -> bool:
        """Whether it runs; True of one that is not `local`, since nothing proves that it ended."""
        return not self.local or (self.started is not None and _started(self.pid) == self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def boot_id() -> str | None:
    """The kernel's random id of this boot of the machine; the host's name where the kernel does not give one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _namespace() -> int | None:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a local process started, in the kernel's ticks; None if it is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


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
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def disown(folder: StorePath) -> None:
    """Take the owner's name off a step. It is committed: that it stays is no reason to call the save failed."""
    with contextlib.suppress(OSError):
        (folder / OWNER_NAME).unlink(missing_ok=True)


def owner_alive(folder: StorePath) -> bool:
    """Whether the process that makes a save may be alive; True unless it is proven not to be."""
    try:
        owner, began = _owner(folder)
    except (*ABSENT, ValueError, KeyError, TypeError, RecursionError):
        # On a file system it is named in a moment, or never. Of objects, the name is the first to be written and, but
        # for a commit, goes with the rest: this is half deleted.
        return renames(folder) and _age_s(folder, 0.0) < _NAMELESS_AGE_S
    except OSError:
        return True
    return owner.alive and (owner.local or _age_s(folder, began) < _FOREIGN_AGE_S)


def _owner(folder: StorePath) -> tuple[Process, float]:
    """Who makes a save, and since when."""
    value = json.loads((folder / OWNER_NAME).read_bytes())
    return Process.decode(value), value["began"]


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
        value = json.loads((root / LOCK_NAME).read_bytes())
        return Process.decode(value), int(value.get("holders", 1))
    except (*ABSENT, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, 0
