"""What a rank sends another over a socket: at once where the kernel takes it, else by a thread.

A rank must not wait for a receiver that computes. So what the kernel's buffer does not take is left to a thread, which also
gets whatever is sent after it, so that the order stays. The thread is started by the first message that needs it.
"""

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_MOST_SHAPES = 4096
"""Kinds of message that a channel remembers; those after them are described each time."""
_MOST_PIECES = 1024
"""Pieces of memory that the kernel takes in one call (IOV_MAX of Linux and macOS)."""
_PATIENCE_S = 5.0
"""For a rank that takes nothing any more, when this one ends."""


class Outbox:
    """Frames on their way to one rank.

    Args:
        to: The socket, not blocking.
    """

    def __init__(self, to: socket.socket) -> None:
        self._socket = to
        self._known: dict[Any, int] = {}
        self._changed = threading.Condition()
        self._waiting: deque[tuple[memoryview, Any]] = deque()
        """Pieces that the kernel has not taken, each with what keeps its memory."""
        self._thread: threading.Thread | None = None
        self._ended = False

    def described(self, shapes: Any, describe: Callable[[], bytes]) -> tuple[int, bytes]:
        """The number of these shapes, and their description, which is empty if the other rank knows the number."""
        number = self._known.get(shapes)
        if number is not None:
            return number, b""
        text = describe()
        if len(self._known) == _MOST_SHAPES:
            return -1, text
        self._known[shapes] = len(self._known)
        return self._known[shapes], text

    def put(self, parts: Sequence[Any], keep: Any) -> None:
        """Send these pieces of memory; ``keep`` is held until all have left.

        Raises:
            OSError: The other rank is gone.
        """
        sent = 0 if self._waiting else _write(self._socket, parts)
        rest: list[tuple[memoryview, Any]] = []
        for part in parts:
            if sent < len(part):
                rest.append((memoryview(part)[sent:], keep))
            sent = max(0, sent - len(part))
        if rest:
            with self._changed:
                self._waiting.extend(rest)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="pipeline-sends", daemon=True)
                    self._thread.start()
                self._changed.notify()

    def close(self) -> None:
        """Send what is left, as long as the other rank takes it, then end the thread and close the socket."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)
        with suppress(OSError):  # the other rank may have gone first; wakes a thread that waits for one that hangs
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        """Send what waits, as fast as it is taken."""
        ready = select.poll()
        ready.register(self._socket, select.POLLOUT)
        while True:
            with self._changed:
                while not self._ended and not self._waiting:
                    self._changed.wait()
                if not self._waiting:
                    return
                piece, keep = self._waiting[0]
            ready.poll()
            try:
                sent = _write(self._socket, [piece])
            except OSError:  # a dead peer is found where something is expected of it
                with self._changed:
                    self._waiting.clear()
                return
            with self._changed:
                if sent < len(piece):
                    self._waiting[0] = (piece[sent:], keep)
                else:
                    self._waiting.popleft()
            del piece, keep


def _write(to: socket.socket, parts: Sequence[Any]) -> int:
    """Bytes that the kernel took."""
    try:
        return to.sendmsg(parts[:_MOST_PIECES])
    except BlockingIOError:
        return 0
