"""Streams, events and memory of simulated devices.

A stream's clock says, for every stream of its rank, up to which of its operations all is done before this stream's next one.
Events and syncs carry clocks on; a use of memory is safe where the clocks order it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Entry(Protocol):
    """Something queued on a stream that may have to wait; kernels run when they are launched."""

    def run(self) -> bool:
        """Do what can be done; whether it is over."""
        ...

    def describe(self) -> str:
        """What it waits for."""
        ...

    def needs(self) -> set[int]:
        """Ranks that must act before it can end."""
        ...


@dataclass(eq=False)
class Mark:
    """One recording of an event."""

    stream: "Stream"
    clock: dict[Any, int]
    done: bool = False
    time: float = 0.0

    def run(self) -> bool:
        self.done, self.time = True, time.perf_counter()
        return True

    def describe(self) -> str:
        return self.stream.describe()

    def needs(self) -> set[int]:
        return self.stream.needs()


@dataclass(eq=False)
class Wait:
    """The stream waits for an event."""

    mark: Mark

    def run(self) -> bool:
        return self.mark.done

    def describe(self) -> str:
        return self.mark.describe()

    def needs(self) -> set[int]:
        return self.mark.needs()


class Stream:
    """A stream of one rank's device."""

    device_type = 1

    def __init__(self, machine: Any, rank: int, index: int, name: str) -> None:
        self.machine, self.rank, self.name = machine, rank, name
        self.device, self.device_index = torch.device("cuda", index), index
        self.queue: deque[Entry] = deque()
        self.clock: dict[Any, int] = {}
        self.stream_id = self.cuda_stream = id(self)

    def tick(self) -> int:
        """The number of the next operation, ordered behind all that the host knows to be done."""
        merge_clock(self.clock, self.machine.known[self.rank])
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def push(self, entry: Entry) -> None:
        """Queue an entry."""
        self.tick()
        self.queue.append(entry)
        self.machine.busy[self] = None

    def describe(self) -> str:
        return self.queue[0].describe() if self.queue else "for nothing"

    def needs(self) -> set[int]:
        return self.queue[0].needs() if self.queue else set()

    def mark(self) -> Mark:
        """Record now."""
        with self.machine.hosts.lock:
            mark = Mark(self, {})
            self.push(mark)
            mark.clock = dict(self.clock)
            self.machine.hosts.look()
            return mark

    def wait_mark(self, mark: Mark) -> None:
        """Everything after this waits for the mark."""
        with self.machine.hosts.lock:
            self.push(Wait(mark))
            merge_clock(self.clock, mark.clock)
            self.machine.hosts.look()

    def drain(self, what: str) -> None:
        """The host waits until everything queued here is done."""
        last = self.queue[-1] if self.queue else None
        if last is not None:
            self.machine.hosts.block(
                lambda: f"in {what} for {self.describe()}", lambda: last not in self.queue, self.needs
            )

    # what programs call

    def synchronize(self) -> None:
        self.machine.sync(self, f"synchronize of {self.name}")

    def query(self) -> bool:
        with self.machine.hosts.lock:
            self.machine.hosts.look()
            return not self.queue

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        if event.recorded is not None:
            self.wait_mark(event.recorded)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_mark(stream.mark())

    def __repr__(self) -> str:
        return self.name


class Event:
    """`torch.cuda.Event` and `torch.Event`."""

    current: Any = staticmethod(lambda: None)
    """Gives the calling thread's stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = (stream or Event.current()).mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Event.current()).wait_event(self)

    def query(self) -> bool:
        if self.recorded is None:
            return True
        machine = self.recorded.stream.machine
        with machine.hosts.lock:
            machine.hosts.look()
            if self.recorded.done:
                machine.learn(self.recorded.stream.rank, self.recorded.clock)
            return self.recorded.done

    def synchronize(self) -> None:
        mark = self.recorded
        if mark is not None:
            hosts = mark.stream.machine.hosts
            hosts.block(lambda: f"in event.synchronize for {mark.describe()}", lambda: mark.done, mark.needs)
            self.query()

    def elapsed_time(self, later: "Event") -> float:
        self.synchronize()
        later.synchronize()
        assert self.recorded is not None
        assert later.recorded is not None
        return (later.recorded.time - self.recorded.time) * 1e3


@dataclass(eq=False)
class Memory:
    """One allocation on a device, and who used it: the last write, and reads since."""

    ref: StorageWeakRef
    stream: Stream
    nbytes: int
    index: int
    write: tuple[Stream, int, str] | None = None
    reads: dict[Stream, tuple[int, str]] = field(default_factory=dict[Stream, tuple[int, str]])
    foreign: dict[Stream, tuple[int, str]] = field(default_factory=dict[Stream, tuple[int, str]])
    """Last use on each stream but the one it was allocated on."""
    recorded: set[Stream] = field(default_factory=set[Stream])
    """Streams of `record_stream`."""


class Allocations:
    """The device memory of one rank."""

    def __init__(self, findings: list[str], known: dict[Any, int]) -> None:
        self._known = known
        """What the host knows to be done."""
        self._by_storage: dict[int, Memory] = {}
        self._findings = findings

    def of(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor; None if it is in host memory."""
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def add(self, tensor: Tensor, stream: Stream) -> None:
        """The tensor's storage was allocated on ``stream``."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._by_storage:
            ref = StorageWeakRef(storage)
            self._by_storage[storage._cdata] = Memory(ref, stream, storage.nbytes(), stream.device_index)

    def use(self, memory: Memory, stream: Stream, number: int, name: str, *, write: bool) -> None:
        """An operation touches the memory; it must be ordered with the others that do."""
        last = memory.write
        if last is not None and stream.clock.get(last[0], 0) < last[1] and last[0] is not stream:
            self._note(f"{name} on {stream} and {last[2]} on {last[0]}, which writes the same memory, are not ordered")
        if write:
            for other, (at, what) in memory.reads.items():
                if other is not stream and stream.clock.get(other, 0) < at:
                    self._note(f"{name} on {stream} writes what {what} on {other} may still read")
            memory.write = (stream, number, name)
            memory.reads.clear()
        else:
            memory.reads[stream] = (number, name)
        if stream is not memory.stream:
            memory.foreign[stream] = (number, name)

    def sweep(self) -> None:
        """Look at what was freed: its own stream may hand it out again at once."""
        for key, memory in list(self._by_storage.items()):
            if not memory.ref.expired():
                continue
            for stream, (number, name) in memory.foreign.items():
                ordered = max(memory.stream.clock.get(stream, 0), self._known.get(stream, 0))
                if stream not in memory.recorded and ordered < number:
                    self._note(
                        f"{memory.nbytes} bytes of {memory.stream} were freed while {name} on {stream} may still use them: "
                        "they are handed out again. Wait for that stream, or call record_stream"
                    )
            del self._by_storage[key]

    def _note(self, text: str) -> None:
        if text not in self._findings:
            self._findings.append(text)


def merge_clock(clock: dict[Any, int], other: dict[Any, int]) -> None:
    """Whatever is done before ``other`` is done before ``clock``."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
