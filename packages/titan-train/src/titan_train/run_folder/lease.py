"""One run at a time writes to a run's folder.

The lease is a small file that names its owner: host, process, attempt. It appears by an atomic link before the first
write to the folder and goes when the owner ends. A second run reads it and is refused.

An owner that died leaves its lease behind, which the next run takes over. On the owner's own host the process table
shows that the process is gone, or that its number belongs to a later process. From another host only time shows it: the
owner touches the file every 10 s, so a lease that was not touched for two minutes has no owner. That time is the file
system's own, of a file written there now: the clocks of two hosts may differ by more.

The other machines of a run have leases of their own, so that one command at a time is machine N.

Time can deceive: an owner that was stopped, or cut off from the file system, may live on. So an owner reads its lease
whenever it touches it and before every attempt, and a command stops if it names another one: who came last is in the right.
"""

import contextlib
import errno
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_ckpt import Process

from titan_train.child_processes import before_this_boot
from titan_train.files import parse_json, read_text, write_atomic
from titan_train.run_folder.place import check_run_folder

_log = logging.getLogger(__name__)
LEASE = "lease.json"
TAKEN_OVER = 75
"""Exit code of a supervisor on Ray whose folder another one has taken over, its ranks with it."""
_TOUCH_S = 10.0
_DEAD_S = 120.0
_RETRY_S = 1.0
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class _Owner:
    """Who holds a lease."""

    process: Process
    since: float
    """Seconds since the epoch."""
    attempt: int = 0
    chain: str = ""
    """Owners of one chain follow each other: something makes sure that only one of them lives."""

    @property
    def who(self) -> str:
        """The process, in words."""
        return f"process {self.process.pid} on host {self.process.host}"


class LeaseLostError(RuntimeError):
    """Another run has taken the folder over: nothing may be written to it any more."""


class Lease:
    """The right to write to a run's folder. Use it as a context manager, or call `release`."""

    def __init__(
        self,
        run_dir: Path,
        *,
        chain: str = "",
        machine: int = 0,
        waits: bool = False,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take the lease; the folder is made if it is missing.

        Args:
            run_dir: The run's folder.
            chain: The lease of an owner with the same one is taken over at once, on any host: the caller makes sure that
                this owner is gone. Empty: no such owner.
            machine: Be this machine of the run; 0 supervises, and has the folder's lease. The others wait for the end of an owner
                on another host: with a job that was put back into a queue, machine 0 comes back at once.
            waits: Wait so, too, as machine 0 of a run that something starts again at once.
            on_lost: Called once, by any thread, with a message for the user when another run has taken the folder over.

        Raises:
            ValueError: Another run holds it; the message names that run. Or `check_run_folder` refuses the folder.
            OSError: The folder cannot be written.
        """
        self._file = run_dir / (f"machine-{machine}.{LEASE}" if machine else LEASE)
        self._machine = machine
        self._on_lost = on_lost
        self._lost = ""
        self._owner = _Owner(Process.of(os.getpid()), time.time(), chain=chain)
        run_dir.mkdir(parents=True, exist_ok=True)
        check_run_folder(run_dir)
        until = time.monotonic() + (_DEAD_S + _TOUCH_S if machine or waits else 0.0)
        waiting = False
        while (owner := self._take()) is not None:
            if owner.process.local or time.monotonic() >= until:
                raise ValueError(_refusal(run_dir, owner, machine))
            if not waiting:
                what = f"machine {machine} was" if machine else f"{run_dir} was in use by"
                print(f"waiting  {what} {owner.who}: two minutes show whether it lives", flush=True)
            waiting = True
            time.sleep(_RETRY_S)
        self._released = threading.Event()
        self._lock = threading.Lock()  # between a touch and the release
        threading.Thread(target=self._keep_touching, name="lease", daemon=True).start()

    def attempt(self, number: int) -> None:
        """Note which attempt runs. Best effort: a full disk does not end the run.

        Raises:
            LeaseLostError: Another run has taken the folder over.
        """
        self._owner = replace(self._owner, attempt=number)
        self._renew(write=True)
        self.check()

    def check(self) -> None:
        """Make sure that the lease was still this process's at its last touch.

        Raises:
            LeaseLostError: Another run has taken the folder over; the message names that run.
        """
        if self._lost:
            raise LeaseLostError(self._lost)

    def release(self) -> None:
        """Give the lease back. Safe to call twice."""
        with self._lock:
            if not self._released.is_set():
                self._released.set()
                with contextlib.suppress(OSError):
                    if _same(_read(self._file), self._owner):
                        self._file.unlink()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self) -> _Owner | None:
        """Take the lease; if its owner lives, that owner instead."""
        with _one_at_a_time(self._file.parent):
            while not self._link():
                owner = _read(self._file)
                follows = owner is not None and self._owner.chain and owner.chain == self._owner.chain
                if owner is not None and not follows and _alive(owner, self._file, _now):
                    return owner
                self._file.unlink(missing_ok=True)
        return None

    def _link(self) -> bool:
        """Whether the lease is now this process's: linking fails if the file is there."""
        content = self._content()
        unique = _beside(self._file)
        unique.write_text(content, encoding="utf-8")
        try:
            self._file.hardlink_to(unique)
        except FileExistsError:
            return False
        except OSError as err:
            if err.errno not in _NO_LINKS:
                raise
            return _create(self._file, content)
        finally:
            unique.unlink(missing_ok=True)
        return True

    def _content(self) -> str:
        owner = asdict(self._owner)
        return json.dumps(owner.pop("process") | owner)

    def _keep_touching(self) -> None:
        while not self._released.wait(_TOUCH_S):
            self._renew()

    def _renew(self, *, write: bool = False) -> None:
        """Touch the lease, or write it again; a damaged one is written, another owner's is left as it is."""
        with self._lock, contextlib.suppress(OSError):
            if self._released.is_set() or self._lost:
                return
            with _one_at_a_time(self._file.parent):
                owner = _read(self._file)
                if owner is None or (write and _same(owner, self._owner)):
                    write_atomic(self._file, self._content())
                elif _same(owner, self._owner):
                    os.utime(self._file)
                else:
                    self._lost = _taken_over(self._file.parent, owner, self._machine)
        if self._lost:
            self._on_lost(self._lost)


def lease_of_program(run_dir: Path) -> Lease | None:
    """The lease of a run that no command started; None if this process has it already.

    A program is not ended when another run takes the folder over; its log says so.

    Raises:
        ValueError: As `Lease`.
        OSError: As `Lease`.
    """
    owner = _read(run_dir / LEASE)
    if owner is not None and owner.process == Process.of(os.getpid()):
        return None
    return Lease(run_dir, waits=True, on_lost=_log.error)


def is_held(run_dir: Path) -> bool:
    """Whether another process holds the run's lease and may live."""
    file = run_dir / LEASE
    owner = _read(file)
    if owner is None or owner.process == Process.of(os.getpid()):
        return False
    try:
        return _alive(owner, file, _now)
    except OSError:  # no room to ask the folder's clock
        return True


def run_status(run_dir: Path, attempts: Sequence[Mapping[str, Any]]) -> str:
    """``finished``, ``stopped``, ``failed``, ``running``, ``killed`` or ``unknown``. Only looks: nothing is written.

    Args:
        run_dir: The run's folder.
        attempts: Of its `run.json`. One that was killed could not say so and is "running" there.
    """
    status = str(attempts[-1].get("status", "unknown")) if attempts else "unknown"
    if status != "running":
        return status
    owner = _read(run_dir / LEASE)
    alive = owner is not None and _alive(owner, run_dir / LEASE, now=lambda _: time.time())
    return "running" if alive else "killed"


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
        since = float(values["since"])
        time.localtime(since)  # raises if it is no time
        return _Owner(Process.decode(values), since, int(values["attempt"]), str(values["chain"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _same(one: _Owner | None, other: _Owner | None) -> bool:
    """Whether two readings are of one owner, in any of its attempts."""
    if one is None or other is None:
        return one is other
    return replace(one, attempt=0) == replace(other, attempt=0)


def _alive(owner: _Owner, file: Path, now: Callable[[Path], float]) -> bool:
    """Whether an owner lives; ``now`` reads the clock by which the folder's files are dated."""
    if owner.process.local:
        return owner.process.alive
    try:
        touched = file.stat().st_mtime
    except OSError:
        return False
    here = now(file.parent)
    rebooted = owner.process.host == platform.node() and before_this_boot(touched, here)
    return not rebooted and here - touched < _DEAD_S


def _now(folder: Path) -> float:
    """Seconds since the epoch by the clock that times the folder's files, which may be a server's."""
    probe = _beside(folder / LEASE)
    try:
        probe.touch()
        os.utime(probe)
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _beside(file: Path) -> Path:
    """A name that no other process on any host uses: hosts may share theirs, and containers their process numbers."""
    return file.with_name(f".{file.name}.{uuid.uuid4().hex}")


def _create(file: Path, content: str) -> bool:
    """`Lease._link` where the file system has no links, as those of object stores. False if the file is there."""
    try:
        with file.open("x", encoding="utf-8") as created:
            created.write(content)
    except FileExistsError:
        return False
    return True


def _refusal(run_dir: Path, owner: _Owner, machine: int) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    way_out = f"stop it with `kill {owner.process.pid}`" if owner.process.local else "stop it there"
    if machine:
        return (
            f"machine {machine} of {run_dir} is taken: {owner.who} has been it since {since} and takes part in what machine 0 "
            f"starts. Leave it, {way_out}, or give each machine a --launch.node-rank of its own."
        )
    return (
        f"{run_dir} is in use: {owner.who} has run it since {since} (attempt {owner.attempt}). Wait for it, {way_out}, or choose "
        "another --run.name."
    )


def _taken_over(run_dir: Path, owner: _Owner, machine: int) -> str:
    by = f"taken over by {owner.who}, which believed this"
    if machine:
        return f"The place of machine {machine} in {run_dir} was {by} command dead. This one ends its ranks."
    return f"{run_dir} was {by} run dead. This run stops writing; the other resumes from the last finished checkpoint."
