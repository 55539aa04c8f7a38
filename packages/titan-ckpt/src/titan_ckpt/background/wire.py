"""Messages between a trainer and its saver process: length words, parts, and the arena's file descriptor."""

import select
import socket
from collections.abc import Callable, Sequence

# How often one end of the socket looks whether the other end's process lives.
_WATCH_S = 1.0


def pack(parts: Sequence[bytes]) -> bytes:
    """Several byte strings as one: their lengths, a word each, before them."""
    return b"".join([len(parts).to_bytes(8, "little"), *(len(p).to_bytes(8, "little") for p in parts), *parts])


def unpack(message: bytes) -> list[bytes]:
    """Undo `pack`."""
    count = int.from_bytes(message[:8], "little")
    lengths = [int.from_bytes(message[8 * i : 8 * i + 8], "little") for i in range(1, count + 1)]
    at, parts = 8 * (count + 1), list[bytes]()
    for length in lengths:
        parts.append(message[at : at + length])
        at += length
    return parts


def send(control: socket.socket, message: bytes, fd: int | None = None) -> None:
    """Send a message, with a file descriptor if one is given."""
    head = len(message).to_bytes(8, "little")
    socket.send_fds(control, [head], [] if fd is None else [fd])
    control.sendall(message)


def receive(control: socket.socket, other_gone: Callable[[], bool]) -> tuple[bytes, int | None] | None:
    """The next message and the descriptor that came with it; None if there will be none.

    Args:
        control: This process's end.
        other_gone: Says whether the process of the other end has ended; forked children of it may hold that end open.
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
    """Wait until there is something to read; False if the other process is gone and left nothing."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        gone = other_gone()  # asked before looking: it may have sent its last and ended in between
        if poller.poll(0 if gone else 1000 * _WATCH_S):
            return True
        if gone:
            return False
