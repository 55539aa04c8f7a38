"""Which process makes a save, so that a later one can tell whether it still runs."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some machine, told apart from a later one that gets the same number.

    Process numbers mean something only among the processes that share them: containers of one machine, which may well
    share the host's name too, count their own.
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
        return cls(socket.gethostname(), pid, _started(pid), _boot(), _namespace())

    @classmethod
    def decode(cls, told: dict[str, Any]) -> "Process":
        """Undo ``dataclasses.asdict``; other keys are passed over.

        Raises:
            KeyError: If a field is missing.
        """
        return cls(told["host"], told["pid"], told["started"], told["boot"], told["namespace"])

    @property
    def local(self) -> bool:
        """Whether it is of this machine, boot and namespace, so that `alive` can tell."""
        return (self.host, self.boot, self.namespace) == (socket.gethostname(), _boot(), _namespace())

    @property
    def alive(self) -> bool:
        """Whether it runs; True of one that is not `local`, since nothing proves that it ended."""
        return not self.local or (self.started is not None and _started(self.pid) == self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _namespace() -> int | None:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a local process started, in the kernel's ticks; None if it is not there. Tells reused ids apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
