"""Orders from the launcher to a training rank: one named pipe per rank, on the machine of the rank.

A pipe needs no port and closes when the launcher is gone, however it went: then a rank saves and stops by itself. A thread
of the rank reads it, so a rank that is stuck inside a collective still answers.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from titan_train.launch.rank.heartbeat import Heartbeat, Phase

_ORPHAN_GRACE_S = 60.0  # and two steps, until a rank whose launcher is gone saves
_LOOK_S = 0.5


class Order(Enum):
    """One letter down the pipe."""

    STOP = b"s"
    """Save, then end with success."""
    SAVE = b"u"
    """Save, then go on."""
    DUMP = b"d"
    """Write down where you are: Python stacks and the flight recorder."""


def orders_file(board: Path, rank: int) -> Path:
    """The named pipe a rank reads orders from, in the folder that its node's agent made."""
    return board / f"rank-{rank}.orders"


class OrderSender:
    """The launcher's end of one rank's pipe."""

    def __init__(self, path: Path) -> None:
        """Make the pipe at ``path``."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # For reading too: so opening does not wait for the rank, and writing never raises SIGPIPE.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def send(self, order: Order) -> None:
        """Send; a rank that never reads loses it once the pipe is full."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._descriptor, order.value)

    def close(self) -> None:
        """Close; the rank takes it as the launcher's end."""
        os.close(self._descriptor)


def obey(path: Path, dump: Callable[[], None], ready: threading.Event, heartbeat: Heartbeat) -> None:
    """In the rank: act on what comes through ``path`` from now on, in a thread.

    Args:
        path: The pipe that the launcher made.
        dump: Writes down where this rank is.
        ready: Set once the trainer takes signals as requests; until then a request to stop or save waits, since the
            signal would kill.
        heartbeat: Of this rank. Once the launcher is gone, a save or a validation may take as long as it needs.
    """
    descriptor = os.open(path, os.O_RDONLY)
    threading.Thread(target=_listen, args=(descriptor, dump, ready, heartbeat), name="orders", daemon=True).start()


def _listen(descriptor: int, dump: Callable[[], None], ready: threading.Event, heartbeat: Heartbeat) -> None:
    while letters := os.read(descriptor, 64):
        for letter in letters:
            order = Order(bytes([letter]))
            if order is Order.DUMP:
                dump()
            else:
                _request(signal.SIGTERM if order is Order.STOP else signal.SIGUSR1, ready)
    # The launcher is gone: save and stop; where that cannot be (a peer is gone too), end.
    _request(signal.SIGTERM, ready)
    end = time.monotonic() + _grace_s(heartbeat)
    while time.monotonic() < end:
        if _is_busy(heartbeat):  # the first step after a validation is the one that sees the request
            end = time.monotonic() + _grace_s(heartbeat)
        time.sleep(_LOOK_S)
    os._exit(1)


def _grace_s(heartbeat: Heartbeat) -> float:
    beat = heartbeat.last()
    return _ORPHAN_GRACE_S + 2 * (beat.step_s if beat is not None else 0.0)


def _is_busy(heartbeat: Heartbeat) -> bool:
    """Whether the rank is at what ends by itself: its collectives have a time-out."""
    beat = heartbeat.last()
    return beat is not None and beat.phase in (Phase.SAVE, Phase.VALIDATE)


def _request(number: signal.Signals, ready: threading.Event) -> None:
    def wait_and_send() -> None:
        ready.wait()
        os.kill(os.getpid(), number)

    threading.Thread(target=wait_and_send, name="request", daemon=True).start()
