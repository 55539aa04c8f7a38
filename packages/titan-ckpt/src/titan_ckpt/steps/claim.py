"""Files that name the process that saves below a root or writes a step, and whether that process is alive.

Two trainers that save to one root delete each other's steps, each by its own retention. The claim protects people who
start a run twice. It is not a lock: it does not see a trainer on another machine or in another container, and if two
trainers take over the claim of a dead one at the same instant, both may succeed. A file lock (``flock``) would be held by
the forked data loaders of a killed trainer, and object stores have none.

The Checkpointers of one process share a claim. The file counts them, and the last one removes it. So it does not matter
how each of them spells the path (a link, a relative path, a mount).
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

from titan_ckpt.storage.files import read_regular
from titan_ckpt.storage.paths import ABSENT, StorePath, renames

_log = logging.getLogger("titan_ckpt")

LOCK_NAME = ".lock"
"""The claim of a root."""

OWNER_NAME = ".owner.json"
"""Names the process that writes an unfinished save. Removed by the commit."""

# Whether a process on another machine is alive is unknown. Its unfinished saves are kept for a day.
_FOREIGN_AGE_S = 86_400
# A new folder has no owner file for a moment, which is shorter than this.
_NAMELESS_AGE_S = 60

# The errors of reading a file that is malformed.
_MALFORMED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)

# One thread counts at a time. Re-entrant: a Checkpointer may be collected, and release its share, while another one counts.
# At worst a share is left over, and the claim stays until the process ends.
_counting = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: globals().update(_counting=threading.RLock()))


@dataclass(frozen=True, slots=True)
class Process:
    """A process, distinct from a later one with the same id: to name the owner of a file, and to know whether it lives.

    A process id is valid in one process namespace only. Containers of one machine have their own namespaces and may share
    a host name. ``dataclasses.asdict`` gives what JSON can hold, `decode` reads it.
    """

    host: str
    pid: int
    started: str | None
    """Start time in kernel ticks; None if it was not running."""
    boot: str | None = None
    """The kernel's random id of this boot of the machine."""
    namespace: int | None = None
    """The kernel's number of the process namespace of ``pid``."""

    @classmethod
    def of(cls, pid: int) -> "Process":
        """A process of this machine and namespace."""
        return cls(socket.gethostname(), pid, _started(pid), boot_id(), _namespace())

    @classmethod
    def decode(cls, value: dict[str, Any]) -> "Process":
        """Undo ``dataclasses.asdict``. Other keys are ignored.

        Raises:
            KeyError: A key is missing.
            TypeError: It is not an object.
            ValueError: ``pid`` is not an integer.
        """
        pid = value["pid"]
        if type(pid) is not int:
            raise ValueError(f"{pid!r} is not a process id, which is an integer.")
        return cls(str(value["host"]), pid, value["started"], value["boot"], value["namespace"])

    @property
    def local(self) -> bool:
        """Whether it is on this machine, boot and namespace, so that `alive` is known."""
        return (self.host, self.boot, self.namespace) == (socket.gethostname(), boot_id(), _namespace())

    @property
    def alive(self) -> bool:
        """Whether it runs. True if it is not `local`: nothing proves that it ended."""
        return not self.local or (self.started is not None and _started(self.pid) == self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def boot_id() -> str | None:
    """The kernel's random id of this boot; the host name if the kernel has none."""
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
    """Start time of a local process in kernel ticks; None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def take_root(root: StorePath, owner: Process) -> None:
    """Claim a root before the first save. Readers do not need a claim.

    A claim of a dead process is taken over. So is a claim of another machine or process namespace, with a warning. A claim of
    the same process is shared: it stays until `release_root` was called as often as this.

    Raises:
        ValueError: If the claim belongs to another process that is alive on this machine and in this process namespace.
        OSError: If the claim cannot be written.
    """
    with _counting:
        held, holders = _read_lock(root)
        _refuse_rival(root, held, owner)
        if held is not None and not held.local:
            _log.warning(
                "%s is claimed by %s on another machine or in another container. If that process is alive, each deletes the "
                "other's steps",
                root,
                held,
            )
        _write_lock(root, owner, holders + 1 if held == owner else 1, held)
        _refuse_rival(root, _read_lock(root)[0], owner)  # another may have claimed it at the same time


def release_root(root: StorePath, owner: Process) -> None:
    """Release one share of this process's claim; the last release removes it.

    A claim that cannot be removed is taken over later.
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
    """Name the process that writes an unfinished save."""
    (folder / OWNER_NAME).write_bytes(json.dumps({**asdict(owner), "began": time.time()}).encode())


def owner_of(folder: StorePath) -> Process | None:
    """The process that writes an unfinished save; None if it is not named (yet)."""
    try:
        return _owner(folder)[0]
    except (OSError, *_MALFORMED):
        return None


def disown(folder: StorePath) -> None:
    """Remove the owner file of a committed step. A failure is ignored: the step is committed."""
    with contextlib.suppress(OSError):
        (folder / OWNER_NAME).unlink(missing_ok=True)


def owner_alive(folder: StorePath) -> bool:
    """Whether the process that writes a save may be alive: True unless proven otherwise."""
    try:
        owner, began = _owner(folder)
    except (*ABSENT, *_MALFORMED):
        # On a file system the file appears in a moment, or never. In a store it is the first object to be written, so this
        # save is half deleted.
        return renames(folder) and _age_s(folder, 0.0) < _NAMELESS_AGE_S
    except OSError:
        return True
    return owner.alive and (owner.local or _age_s(folder, began) < _FOREIGN_AGE_S)


def _owner(folder: StorePath) -> tuple[Process, float]:
    """The process that writes a save, and when it began."""
    value = json.loads(read_regular(folder / OWNER_NAME))
    return Process.decode(value), float(value["began"])


def _age_s(folder: StorePath, began: float) -> float:
    """Seconds since a save was last written to; in a store, since it began."""
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
    """Write a claim atomically: over ``held``, but not over a claim that was made in between."""
    claim = json.dumps({**asdict(owner), "holders": holders}).encode()
    if not isinstance(root, Path):
        (root / LOCK_NAME).write_bytes(claim)
        return
    lock, part = root / LOCK_NAME, root / f"{LOCK_NAME}.{secrets.token_hex(4)}"
    part.write_bytes(claim)
    try:
        os.link(part, lock)
    except OSError:  # a claim exists, or the file system has no links
        if _read_lock(root)[0] == held:
            part.replace(lock)
    finally:
        part.unlink(missing_ok=True)


def _read_lock(root: StorePath) -> tuple[Process | None, int]:
    """The process that claimed a root, and its number of Checkpointers; None without a readable claim."""
    try:
        value = json.loads(read_regular(root / LOCK_NAME))
        return Process.decode(value), int(value.get("holders", 1))
    except (*ABSENT, *_MALFORMED):
        return None, 0
