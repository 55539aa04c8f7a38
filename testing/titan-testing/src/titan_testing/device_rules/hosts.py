"""The host threads of all ranks: whose thread waits for what, and the moment in which none can go on."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_WAIT, _JOIN, _START = threading.Condition.wait, threading.Thread.join, threading.Thread.start
_SLEEP = time.sleep
_MOST_TIMEOUTS = 400
"""Limits of waits that may pass one after the other while nothing else happens."""
_LONGEST_END_S = 5.0
_OURS = ("/device_rules/", "/torch/", "/threading.py", "/contextlib.py")


class Hang(RuntimeError):
    """No rank can go on. ``cycle`` holds the ranks that wait for each other, ``waits`` each rank's reasons."""

    def __init__(self, cycle: tuple[int, ...], waits: dict[int, list[str]]) -> None:
        first = " → ".join(map(str, (*cycle, *cycle[:1])))
        shown = [*cycle, *(r for r in sorted(waits) if r not in cycle)]
        lines = [f"  rank {rank} {reason}" for rank in shown for reason in waits.get(rank, ())]
        super().__init__(
            "\n".join([f"ranks wait for each other in a circle: {first}" if cycle else "no rank goes on", *lines])
        )
        self.cycle = cycle
        self.waits = waits


@dataclass(eq=False)
class Waiting:
    """One thread that waits."""

    rank: int
    what: Callable[[], str]
    ready: Callable[[], bool]
    needs: Callable[[], set[int]]
    """Ranks that must do something first."""
    timed: bool
    gate: Any
    place: str
    fired: bool = False
    """Its limit has passed, or the job hangs."""
    opens: bool = True
    """Whether `Hosts.look` opens the gate; else someone else does, and this only ends a wait."""

    def end(self) -> None:
        """Open the gate once more or not; a second time does nothing."""
        if self.gate.locked():
            self.gate.release()


@dataclass
class Host:
    """A thread's rank."""

    rank: int
    current: dict[int, Any] = field(default_factory=dict[int, Any])
    """Current stream by device."""
    raw: bool = False
    """Inside the instrument itself: nothing is intercepted."""


class Hosts:
    """All threads of all ranks. ``progress`` lets the devices do what they can."""

    def __init__(self, progress: Callable[[], bool]) -> None:
        self.lock = threading.RLock()
        self.hang: Hang | None = None
        self.threads: dict[threading.Thread, int] = {}
        self._waits: dict[threading.Thread, Waiting] = {}
        self._here = threading.local()
        self._progress = progress
        self._timeouts: Counter[threading.Thread] = Counter()
        self.mains: set[threading.Thread] = set()
        """The ranks' own threads; when they have ended, the others may wait for ever."""
        self.wrap: Callable[[Callable[[], None]], None] = lambda body: body()
        """Runs the body of a thread of a rank."""

    def here(self) -> Host | None:
        """The calling thread's host; None where it is none of the job's, or the instrument's own."""
        host: Host | None = getattr(self._here, "host", None)
        return None if host is None or host.raw else host

    def look(self) -> None:
        """Something happened: let devices go on, and wake whoever can. Holds the lock."""
        if self._progress():
            self._timeouts.clear()
        for waiting in list(self._waits.values()):
            if waiting.opens and waiting.gate.locked() and waiting.ready():
                self._timeouts.clear()
                waiting.end()

    def block(
        self,
        what: Callable[[], str],
        ready: Callable[[], bool],
        needs: Callable[[], set[int]],
        *,
        timed: bool = False,
    ) -> None:
        """Wait until ``ready()``, which is asked with the lock held. Raises `Hang` when nobody can go on."""
        host = self.here()
        assert host is not None, "only ranks wait"
        with self.lock:
            self.look()
            self._stop()
            if ready():
                return
            gate = threading.Lock()
            gate.acquire()
            waiting = Waiting(host.rank, what, ready, needs, timed, gate, _place())
            self._waits[threading.current_thread()] = waiting
            self._judge()
        gate.acquire()
        with self.lock:
            del self._waits[threading.current_thread()]
            self._stop()

    def start(self, thread: threading.Thread, rank: int) -> None:
        """Start a thread of a rank."""
        body = thread.run

        def run() -> None:
            self._here.host = Host(rank)
            try:
                self.wrap(body)
            except Hang:  # a rank's own thread has noted it
                pass
            finally:
                with self.lock:
                    del self.threads[thread]
                    self.look()
                    self._judge()

        thread.run = run
        with self.lock:
            self.threads[thread] = rank
        host = self.here()
        if host is not None:
            host.raw = True
        try:
            _START(thread)
        finally:
            if host is not None:
                host.raw = False

    def close(self) -> None:
        """The ranks' own threads have ended: end the others, wherever they wait."""
        with self.lock:
            self.hang = self.hang or Hang((), {})
            self._judge()
            left = list(self.threads)
        for thread in left:
            _JOIN(thread, _LONGEST_END_S)

    def wait(self, condition: Any, timeout: float | None = None) -> bool:
        """`threading.Condition.wait`."""
        host = self.here()
        if host is None:
            return _WAIT(condition, timeout)
        self._stop()
        gate = threading.Lock()
        gate.acquire()
        condition._waiters.append(gate)

        def ready() -> bool:
            try:
                return gate not in condition._waiters
            except RuntimeError:  # changed meanwhile
                return True

        def needs() -> set[int]:
            others = [w for w in self._waits.values() if w.rank == host.rank and w is not waiting and w.opens]
            return set[int]().union(*(w.needs() for w in others))

        waiting = Waiting(
            host.rank,
            lambda: "for another of its threads",
            ready,
            needs,
            timeout is not None,
            gate,
            _place(),
            opens=False,
        )
        state = condition._release_save()
        with self.lock:
            self._waits[threading.current_thread()] = waiting
            self._judge()
        gate.acquire()
        with self.lock:
            del self._waits[threading.current_thread()]
        condition._acquire_restore(state)
        if not ready():
            condition._waiters.remove(gate)
        self._stop()
        return not waiting.fired

    def join(self, thread: threading.Thread, timeout: float | None = None) -> None:
        """`threading.Thread.join`."""
        if self.here() is None or thread not in self.threads:
            return _JOIN(thread, timeout)
        rank = self.threads.get(thread, -1)

        def needs() -> set[int]:
            waiting = self._waits.get(thread)
            return set() if waiting is None else waiting.needs()

        name = f"for its thread {thread.name!r}" + ("" if rank >= 0 else " of another rank")
        return self.block(lambda: name, lambda: thread not in self.threads, needs, timed=timeout is not None)

    def sleep(self, seconds: float) -> None:
        """`time.sleep`: whoever polls waits, too, as long as nothing else happens."""
        host = self.here()
        if host is None:
            return _SLEEP(seconds)
        gate = threading.Lock()
        gate.acquire()
        waiting = Waiting(
            host.rank, lambda: "and looks again and again", lambda: False, set[int], True, gate, _place(), opens=False
        )
        with self.lock:
            self._waits[threading.current_thread()] = waiting
            self._judge()
        gate.acquire(timeout=seconds)
        with self.lock:
            del self._waits[threading.current_thread()]
        return self._stop()

    def _stop(self) -> None:
        if self.hang is not None:
            raise Hang(self.hang.cycle, self.hang.waits)

    def _judge(self) -> None:
        """Whether anyone can go on; if not, the limits of waits pass, and then the job hangs. Holds the lock."""
        if self.hang is not None:
            for waiting in self._waits.values():
                waiting.end()
            return
        waits = [self._waits.get(thread) for thread in self.threads]
        if self.mains.isdisjoint(self.threads) or any(
            w is None or w.fired or not w.gate.locked() or w.ready() for w in waits
        ):
            return
        stuck = [w for w in waits if w is not None]
        timed = [thread for thread in self.threads if self._waits[thread].timed]
        if timed and self._timeouts.total() < _MOST_TIMEOUTS:
            first = min(timed, key=self._timeouts.__getitem__)
            self._timeouts[first] += 1
            self._waits[first].fired = True
            self._waits[first].end()
            return
        edges: dict[int, set[int]] = {}
        reasons: dict[int, list[str]] = {}
        for waiting in stuck:
            if waiting.opens or not any(w.opens for w in stuck if w.rank == waiting.rank):
                edges.setdefault(waiting.rank, set()).update(waiting.needs())
                reasons.setdefault(waiting.rank, []).append(f"waits {waiting.what()} ({waiting.place})")
        self.hang = Hang(_cycle(edges), reasons)
        for waiting in stuck:
            waiting.end()


def _cycle(edges: dict[int, set[int]]) -> tuple[int, ...]:
    """Ranks that wait for each other, from the lowest; the shortest circle. Empty if there is none."""
    best: tuple[int, ...] = ()
    for start in sorted(edges):
        paths: list[tuple[int, ...]] = [(start,)]
        seen = {start}
        while paths:
            path = paths.pop(0)
            for rank in sorted(edges.get(path[-1], ())):
                if rank == start and (not best or len(path) < len(best)):
                    best = path
                elif rank not in seen:
                    seen.add(rank)
                    paths.append((*path, rank))
    return best


def _place() -> str:
    """Where in the program under test the caller stands: the innermost lines that are not the instrument's or torch's."""
    frame: Any = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if not any(part in name for part in _OURS):
            found.append(f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)
