"""Ranks as threads of one process.

Tests of all schedules take seconds this way, and a laptop can debug an eight-rank pipeline with breakpoints.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan_pipeline.runtime.transport.base import Receiver
from titan_pipeline.runtime.transport.messages import Key, Payload, PeerFailure
from titan_pipeline.runtime.transport.tree import TensorTree


class MemoryBoard:
    """A `StatusBoard` for ranks of one process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        """See `StatusBoard`."""
        return self._texts.get(key)

    def set(self, key: str, text: str) -> None:
        """See `StatusBoard`."""
        self._texts[key] = text


class ThreadHub:
    """The shared medium of ranks that are threads of one process."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.receivers = [Receiver() for _ in range(num_ranks)]
        self.board = MemoryBoard()
        self._barrier = threading.Barrier(num_ranks)
        self._reports: list[tuple[PeerFailure | None, list[float]]] = [(None, [])] * num_ranks

    def transport(self, rank: int) -> "ThreadTransport":
        """The end of one rank."""
        return ThreadTransport(self, rank)

    def meet(
        self, rank: int, failure: PeerFailure | None, values: Sequence[float]
    ) -> list[tuple[PeerFailure | None, list[float]]]:
        """Every rank's report, once all have given theirs.

        Raises:
            threading.BrokenBarrierError: Some rank has given up.
        """
        self._reports[rank] = (failure, list(values))
        self._barrier.wait()
        reports = list(self._reports)
        self._barrier.wait()
        return reports

    def give_up(self) -> None:
        """Nobody waits for the others any more."""
        self._barrier.abort()

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
        self.board = hub.board
        self._hub = hub
        self._receiver = hub.receivers[rank]

    def begin(self, expected: Mapping[int, Sequence[Key]], sends: Mapping[int, int]) -> None:
        """Nothing to prepare: messages are matched by key."""

    def send(self, target: int, key: Key, payload: Payload) -> None:
        """Hand the tensors over; what processes could not send is refused here too."""
        if isinstance(payload, TensorTree):
            _ = payload.structure
        self._hub.receivers[target].put(self.rank, key, payload)

    def receive(self, source: int, key: Key) -> Payload | PeerFailure:
        """Wait for the tensors, or for bad news."""
        return self._receiver.take(source, key)

    def failed(self) -> PeerFailure | None:
        """A failure this rank has heard of."""
        return self._receiver.failure

    def announce(self, failure: PeerFailure) -> None:
        """Tell every rank at once."""
        for receiver in self._hub.receivers:
            receiver.fail(failure)

    def close_step(
        self, failure: PeerFailure | None, values: Sequence[float]
    ) -> tuple[PeerFailure | None, list[list[float]]]:
        """Meet the others; messages of a failed step are dropped."""
        try:
            reports = self._hub.meet(self.rank, failure, values)
            first = next((f for f, _ in reports if f is not None), None)
            if first is not None:
                self._receiver.clear()
                self._hub.meet(self.rank, None, ())
        except threading.BrokenBarrierError:
            return self._receiver.failure or failure, []
        return first, [v for _, v in reports]

    def give_up(self, failure: PeerFailure) -> None:
        """See `Transport.give_up`."""
        self._receiver.fail(failure)
        self._hub.give_up()
