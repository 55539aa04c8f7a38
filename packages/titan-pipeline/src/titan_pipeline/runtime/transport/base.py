"""What the executor asks of a transport, and the mailbox that transports share."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from titan_pipeline.runtime.transport.messages import Key, Payload, PeerFailure


class StatusBoard(Protocol):
    """Texts that every rank can read at any time, even while main threads are busy or blocked."""

    def get(self, key: str) -> str | None:
        """The text, or None."""
        ...

    def set(self, key: str, text: str) -> None:
        """Write or overwrite a text."""
        ...


class Transport(Protocol):
    """What the executor asks of a transport. Messages of one directed pair arrive in the order they were sent."""

    rank: int
    num_ranks: int

    @property
    def board(self) -> StatusBoard | None:
        """For the watchdog; None does without one."""
        ...

    def begin(self, expected: Mapping[int, Sequence[Key]], sends: Mapping[int, int]) -> None:
        """A step starts: the keys this rank will receive from each source, in order, and how many it sends to each."""
        ...

    def send(self, target: int, key: Key, payload: Payload) -> None:
        """Send without waiting for the receiver."""
        ...

    def receive(self, source: int, key: Key) -> Payload | PeerFailure:
        """Wait for one message, or for the news that it will not come."""
        ...

    def failed(self) -> PeerFailure | None:
        """A failure this rank has heard of. Asked before every action, so that a transport can post receives meanwhile."""
        ...

    def announce(self, failure: PeerFailure) -> None:
        """Tell everyone who still expects a message from this rank that none will come."""
        ...

    def close_step(
        self, failure: PeerFailure | None, values: Sequence[float]
    ) -> tuple[PeerFailure | None, list[list[float]]]:
        """All ranks meet: the first failure of any rank, and every rank's values (all of the same length). After
        `give_up`, at once: what it was given, and no values.
        """
        ...

    def give_up(self, failure: PeerFailure) -> None:
        """A rank hangs: every receive and `close_step`, now or later, ends with this failure. Called in a thread."""
        ...


class Receiver:
    """The messages that have arrived for one rank, whoever delivers them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived: dict[tuple[int, Key], Payload] = {}
        self.failure: PeerFailure | None = None

    def put(self, source: int, key: Key, payload: Payload) -> None:
        """Called by whoever delivers."""
        with self.changed:
            self.arrived[source, key] = payload
            self.changed.notify_all()

    def fail(self, failure: PeerFailure) -> None:
        """The first failure stays, unless a rank hangs: then nothing else can be waited for."""
        with self.changed:
            self.failure = failure if failure.hung else self.failure or failure
            self.changed.notify_all()

    def take(self, source: int, key: Key) -> Payload | PeerFailure:
        """Wait for a message or a failure."""
        at = (source, key)
        with self.changed:
            while at not in self.arrived:
                if self.failure is not None:
                    return self.failure
                self.changed.wait()
            return self.arrived.pop(at)

    def look(self, source: int, key: Key, other: Callable[[], bool]) -> Payload | PeerFailure | None:
        """Wait for a message, as `take`, and leave it there; None if ``other()`` comes true first."""
        at = (source, key)
        with self.changed:
            self.changed.wait_for(lambda: at in self.arrived or self.failure is not None or other())
            return self.arrived.get(at, self.failure)

    def wake(self) -> None:
        """Whoever waits looks again."""
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, done: threading.Event) -> PeerFailure | None:
        """Wait for an event whose setter calls `wake`, or for the news that a rank hangs."""
        with self.changed:
            while not done.is_set():
                hung = self.hung()
                if hung is not None:
                    return hung
                self.changed.wait()
        return None

    def clear(self) -> None:
        """Forget everything, but for a rank that hangs."""
        with self.changed:
            self.arrived.clear()
            if self.failure is not None and not self.failure.hung:
                self.failure = None

    def hung(self) -> PeerFailure | None:
        """The failure of a rank that hangs."""
        failure = self.failure
        return failure if failure is not None and failure.hung else None
