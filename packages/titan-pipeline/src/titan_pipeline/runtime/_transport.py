"""How messages move. This file has the protocol and the in-process version.

`ThreadTransport` runs every rank as a thread of one process: tests of all schedules take seconds, and a laptop can
debug an eight-rank pipeline with breakpoints. `titan_pipeline.runtime._process_group` has the one over
``torch.distributed``.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from titan_pipeline.runtime._messages import Failure, Key, Payload


class Transport(Protocol):
    """What the executor asks of a transport. Messages of one directed pair arrive in the order they were sent."""

    rank: int
    num_ranks: int

    def begin(self, expected: Mapping[int, Sequence[Key]], sends: Mapping[int, int]) -> None:
        """A step starts: the keys this rank will receive from each source, in order, and how many it sends to each."""
        ...

    def send(self, target: int, key: Key, payload: Payload) -> None:
        """Send without waiting for the receiver."""
        ...

    def receive(self, source: int, key: Key) -> Payload | Failure:
        """Wait for one message, or for the news that it will not come."""
        ...

    def failed(self) -> Failure | None:
        """A failure this rank has heard of; cheap enough to ask before every action."""
        ...

    def announce(self, failure: Failure) -> None:
        """Tell everyone who still expects a message from this rank that none will come."""
        ...

    def close_step(self, failure: Failure | None, values: Sequence[float]) -> tuple[Failure | None, list[list[float]]]:
        """All ranks meet: the first failure of any rank, and every rank's values (all of the same length)."""
        ...


class Receiver:
    """The messages that have arrived for one rank, whoever delivers them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived: dict[tuple[int, Key], Payload] = {}
        self.failure: Failure | None = None

    def put(self, source: int, key: Key, payload: Payload) -> None:
        """Called by whoever delivers."""
        with self.changed:
            self.arrived[source, key] = payload
            self.changed.notify_all()

    def fail(self, failure: Failure) -> None:
        """The first failure stays."""
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()

    def take(self, source: int, key: Key) -> Payload | Failure:
        """Wait for a message or a failure."""
        at = (source, key)
        with self.changed:
            while at not in self.arrived:
                if self.failure is not None:
                    return self.failure
                self.changed.wait()
            return self.arrived.pop(at)

    def clear(self) -> None:
        """Forget everything."""
        with self.changed:
            self.arrived.clear()
            self.failure = None


class ThreadHub:
    """The shared medium of ranks that are threads of one process."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.receivers = [Receiver() for _ in range(num_ranks)]
        self._barrier = threading.Barrier(num_ranks)
        self._reports: list[tuple[Failure | None, list[float]]] = [(None, [])] * num_ranks

    def transport(self, rank: int) -> "ThreadTransport":
        """The end of one rank."""
        return ThreadTransport(self, rank)

    def meet(
        self, rank: int, failure: Failure | None, values: Sequence[float]
    ) -> list[tuple[Failure | None, list[float]]]:
        """Every rank's report, once all have given theirs."""
        self._reports[rank] = (failure, list(values))
        self._barrier.wait()
        reports = list(self._reports)
        self._barrier.wait()
        return reports

    def run(self, work: Callable[["ThreadTransport"], Any]) -> list[Any]:
        """Run ``work(transport)`` on every rank, one thread each, and return the results in rank order.

        Raises:
            BaseException: The first rank's exception, once all threads have ended.
        """
        results: list[Any] = [None] * self.num_ranks
        errors: list[BaseException | None] = [None] * self.num_ranks

        def body(rank: int) -> None:
            try:
                results[rank] = work(self.transport(rank))
            except BaseException as err:
                errors[rank] = err

        threads = [threading.Thread(target=body, args=(r,), name=f"pipeline-rank-{r}") for r in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for err in errors:
            if err is not None:
                raise err
        return results


class ThreadTransport:
    """One rank's end of a `ThreadHub`: tensors change hands without a copy."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self._hub = hub
        self._receiver = hub.receivers[rank]

    def begin(self, expected: Mapping[int, Sequence[Key]], sends: Mapping[int, int]) -> None:
        """Nothing to prepare: messages are matched by key."""

    def send(self, target: int, key: Key, payload: Payload) -> None:
        """Hand the tensors over."""
        self._hub.receivers[target].put(self.rank, key, payload)

    def receive(self, source: int, key: Key) -> Payload | Failure:
        """Wait for the tensors, or for bad news."""
        return self._receiver.take(source, key)

    def failed(self) -> Failure | None:
        """A failure this rank has heard of."""
        return self._receiver.failure

    def announce(self, failure: Failure) -> None:
        """Tell every rank at once."""
        for receiver in self._hub.receivers:
            receiver.fail(failure)

    def close_step(self, failure: Failure | None, values: Sequence[float]) -> tuple[Failure | None, list[list[float]]]:
        """Meet the others; messages of a failed step are dropped."""
        reports = self._hub.meet(self.rank, failure, values)
        first = next((f for f, _ in reports if f is not None), None)
        if first is not None:
            self._receiver.clear()
            self._hub.meet(self.rank, None, ())
        return first, [v for _, v in reports]
