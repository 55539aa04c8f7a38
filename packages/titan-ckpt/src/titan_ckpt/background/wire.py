"""Messages between a trainer and its saver process. A message may carry the arena's file descriptor."""

import select
import socket
from collections.abc import Callable

# How often a process checks that the other one is alive.
_WATCH_S = 1.0


def send(control: socket.socket, message: bytes, fd: int | None = None) -> None:
    """Send a message, with a file descriptor if one is given."""
    head = len(message).to_bytes(8, "little")
    socket.send_fds(control, [head], [] if fd is None else [fd])
    control.sendall(message)


def receive(control: socket.socket, other_gone: Callable[[], bool]) -> tuple[bytes, int | None] | None:
    """The next message and its descriptor; None if no more will come.

    ``other_gone`` says whether the other process has ended. Its forked children may still hold its end open.
    """
    fds: list[int] = []

    def take(nbytes: int) -> bytes | None:
        parts: list[bytes] = []
        while nbytes:
            if not _readable(control, other_gone):
                return None
            part, more, _, _ = socket.recv_fds(control, min(nbytes, 1 << 20), 1)
            if not part:
                return None
            fds.extend(more)
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)

    try:
        head = take(8)
        message = take(int.from_bytes(head, "little")) if head is not None else None
    except (OSError, ValueError):  # of a closed socket
        return None
    return None if message is None else (message, fds[0] if fds else None)


def _readable(control: socket.socket, other_gone: Callable[[], bool]) -> bool:
    """Wait until there is something to read; False if the other process is gone and sent nothing more."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        gone = other_gone()  # before the poll: it may send its last message and end in between
        if poller.poll(0 if gone else 1000 * _WATCH_S):
            return True
        if gone:
            return False
