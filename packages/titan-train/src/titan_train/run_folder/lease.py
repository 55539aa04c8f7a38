"""One run at a time writes to a run's folder.

The lease is a small file that names its owner: host, process, attempt. It appears by an atomic link before the first
write to the folder and goes when the owner ends. A second run reads it and is refused.

An owner that died leaves its lease behind, which the next run takes over. On the owner's own host the process table
tells: the process is gone, or its number belongs to a process that started at another time. From another host only time
tells: the owner touches the file every 10 s, so a lease that nobody touched for two minutes has no owner.
"""

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan_train.files import parse_json, read_text, write_atomic

_TOUCH_S = 10.0
_DEAD_S = 120.0
_FILE = "lease.json"


@dataclass(frozen=True, slots=True)
class _Owner:
    """Who holds a lease."""

    host: str
    pid: int
    place: str
    """Where the process number is valid."""
    started: str
    """When the process started, so that a reused process number is told from its former owner."""
    since: float
    """Seconds since the epoch."""
    attempt: int = 0
    chain: str = ""
    """Owners of one chain follow each other: something makes sure that only one of them lives."""


class Lease:
    """The right to write to a run's folder. Use it as a context manager, or call `release`."""

    def __init__(self, run_dir: Path, *, chain: str = "") -> None:
        """Take the lease; the folder is made if it is missing.

        Args:
            run_dir: The run's folder.
            chain: The lease of an owner with the same one is taken over at once, on any host: the caller makes sure that
                this owner is gone. Empty: no such owner.

        Raises:
            ValueError: Another run holds it; the message names that run.
            OSError: The folder cannot be written.
        """
        self._file = run_dir / _FILE
        self._owner = _Owner(platform.node(), os.getpid(), _place(), _start_of(os.getpid()), time.time(), chain=chain)
        run_dir.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(run_dir):
            while not self._link():
                owner = _read(self._file)
                follows = owner is not None and chain and owner.chain == chain
                if owner is not None and not follows and _alive(owner, self._file):
                    raise ValueError(_refusal(run_dir, owner))
                self._file.unlink(missing_ok=True)
        self._released = threading.Event()
        threading.Thread(target=self._keep_touching, name="lease", daemon=True).start()

    def attempt(self, number: int) -> None:
        """Note which attempt runs. Best effort: a full disk does not end the run."""
        self._owner = replace(self._owner, attempt=number)
        with contextlib.suppress(OSError):
            write_atomic(self._file, json.dumps(asdict(self._owner)))

    def release(self) -> None:
        """Give the lease back. Safe to call twice."""
        if not self._released.is_set():
            self._released.set()
            with contextlib.suppress(OSError):
                if _same(_read(self._file), self._owner):
                    self._file.unlink()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _link(self) -> bool:
        """Whether the lease is now this process's: linking fails if the file is there."""
        unique = self._file.with_name(f".{_FILE}.{self._owner.host}.{self._owner.pid}")
        unique.write_text(json.dumps(asdict(self._owner)), encoding="utf-8")
        try:
            self._file.hardlink_to(unique)
        except FileExistsError:
            return False
        finally:
            unique.unlink(missing_ok=True)
        return True

    def _keep_touching(self) -> None:
        while not self._released.wait(_TOUCH_S):
            with contextlib.suppress(OSError):
                os.utime(self._file)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Generator[None]:
    """Two runs that find a dead owner's lease take it over one after the other."""
    import fcntl  # not on Windows

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network file system may have no locks: the link decides there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(file: Path) -> _Owner | None:
    """The owner; None if the file is gone or damaged."""
    try:
        values = parse_json(read_text(file))
        return _Owner(
            host=str(values["host"]),
            pid=int(values["pid"]),
            place=str(values["place"]),
            started=str(values["started"]),
            since=float(values["since"]),
            attempt=int(values["attempt"]),
            chain=str(values.get("chain", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same(one: _Owner | None, other: _Owner | None) -> bool:
    """Whether two readings are of one owner, whatever its attempt."""
    if one is None or other is None:
        return one is other
    return replace(one, attempt=0) == replace(other, attempt=0)


def _alive(owner: _Owner, file: Path) -> bool:
    if owner.place == _place():
        return _start_of(owner.pid) == owner.started
    try:
        touched = file.stat().st_mtime
    except OSError:
        return False
    rebooted = owner.host == platform.node() and touched < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return not rebooted and time.time() - touched < _DEAD_S


def _place() -> str:
    """Where process numbers mean what they mean here: this boot of this kernel, and this process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if there is no such process, or only its exit code is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _refusal(run_dir: Path, owner: _Owner) -> str:
    here = owner.host == platform.node()
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    way_out = f"stop it with `kill {owner.pid}`" if here else "stop it there"
    return (
        f"{run_dir} is in use: process {owner.pid} on host {owner.host} has run it since {since} (attempt {owner.attempt}). "
        f"Wait for it, {way_out}, or choose another --run.name."
    )
