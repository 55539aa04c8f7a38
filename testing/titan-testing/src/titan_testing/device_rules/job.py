"""A job of several ranks on simulated devices: one thread a rank, and what was found."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from titan_testing.contexts import FakeContexts
from titan_testing.device_rules.collectives import Collectives, FunctionalAllToAll
from titan_testing.device_rules.cuda import DeviceMode, KernelMode, cuda_functions
from titan_testing.device_rules.hosts import _JOIN, _START, Hang, Hosts
from titan_testing.device_rules.nccl import Group
from titan_testing.device_rules.streams import Allocations, Memory, Stream, merge_clock

T = TypeVar("T", Tensor, nn.Module)
_ONE_JOB = threading.Lock()
_running: "Machine | None" = None


@dataclass
class Outcome:
    """What became of a job."""

    results: list[Any]
    """By rank; None where a rank raised."""
    errors: dict[int, BaseException] = field(default_factory=dict[int, BaseException])
    hang: Hang | None = None
    findings: list[str] = field(default_factory=list[str])
    """Rules that were broken without a hang: memory, order, contexts."""
    world_meetings: int = 0
    """How often all ranks waited for each other to make a group."""

    def check(self) -> "Outcome":
        """Raise what was found."""
        first = next((e for e in self.errors.values() if not isinstance(e, Hang)), self.hang)
        if first is not None:
            raise first
        if self.findings:
            raise AssertionError("\n".join(self.findings))
        return self


class Machine:
    """The devices of all ranks."""

    def __init__(self, n: int) -> None:
        self.hosts = Hosts(self._progress)
        self.findings: list[str] = []
        self.streams: list[Stream] = []
        self.busy: dict[Stream, None] = {}
        self.moved = False
        self.known: list[dict[Any, int]] = [{} for _ in range(n)]
        """By rank: what its host knows to be done."""
        self.syncs = [0] * n
        """By rank: how often its host waited for a stream or a device."""
        self._memory = [Allocations(self.findings, known) for known in self.known]
        self._contexts = [FakeContexts() for _ in range(n)]
        self._defaults: dict[tuple[int, int], Stream] = {}
        self.world = Group(self, tuple(range(n)), "cpu:gloo,cuda:nccl")
        self.dist = Collectives(self, self.world)
        self.hosts.wrap = self._within_modes

    def _within_modes(self, body: Callable[[], None]) -> None:
        with DeviceMode(self), KernelMode(self):
            body()

    def rank(self) -> int:
        host = self.hosts.here()
        assert host is not None, "only a rank's thread uses devices and groups here"
        return host.rank

    def contexts(self) -> FakeContexts:
        return self._contexts[self.rank()]

    def index(self, device: Any) -> int | None:
        """The index of a CUDA device; None for another device."""
        if isinstance(device, int):
            return device
        device = torch.device(device)
        if device.type != "cuda":
            return None
        return self.contexts().current() if device.index is None else device.index

    def new_stream(self, rank: int, index: int, name: str) -> Stream:
        stream = Stream(self, rank, index, name)
        self.streams.append(stream)
        return stream

    def current(self, index: int | None = None) -> Stream:
        """The calling thread's current stream of a device."""
        host = self.hosts.here()
        assert host is not None
        index = self.contexts().current() if index is None else index
        if index not in host.current:
            key = (host.rank, index)
            with self.hosts.lock:
                if key not in self._defaults:
                    self._defaults[key] = self.new_stream(*key, f"the compute stream of rank {host.rank}")
            return self._defaults[key]
        return host.current[index]

    def start_thread(self, thread: threading.Thread) -> None:
        host = self.hosts.here()
        if host is None:
            _START(thread)
        else:
            self.hosts.start(thread, host.rank)

    # memory and kernels

    def memory_of(self, x: Tensor) -> Memory | None:
        return self._memory[self.rank()].of(x) if x.layout is torch.strided and not x.is_meta else None

    def holds(self, x: Tensor) -> bool:
        return self.memory_of(x) is not None

    def allocate(self, x: Tensor, index: int) -> None:
        self._memory[self.rank()].add(x, self.current(index))

    def touch(self, x: Tensor, stream: Stream, name: str, *, write: bool) -> None:
        memory = self.memory_of(x)
        if memory is not None:
            self._memory[stream.rank].use(memory, stream, stream.clock[stream], name, write=write)

    def kernel(self, name: str, held: list[Tensor], written: list[Tensor]) -> None:
        """A kernel on the current stream; values are real, so the host waits where the stream does."""
        memory = self.memory_of((held or written)[0])
        assert memory is not None
        stream = self.current(memory.index)
        stream.drain(f"{name}, on a stream that waits")
        with self.hosts.lock:
            self._memory[stream.rank].sweep()
            stream.tick()
            for x in held:
                self.touch(x, stream, name, write=any(x is w for w in written))
            for x in written:
                self.touch(x, stream, name, write=True)

    def sync(self, stream: Stream, what: str) -> None:
        """The host waits for one stream."""
        stream.drain(what)
        with self.hosts.lock:
            self.syncs[stream.rank] += 1
            self.learn(stream.rank, stream.clock)

    def learn(self, rank: int, clock: dict[Any, int]) -> None:
        """A rank's host knows all of this to be done; what was freed before was freed without knowing."""
        self._memory[rank].sweep()
        merge_clock(self.known[rank], clock)

    def sync_device(self, index: int) -> None:
        """The host waits for all streams of a device."""
        for stream in [s for s in self.streams if s.rank == self.rank() and s.device_index == index]:
            self.sync(stream, "a device sync")

    def quietly(self, body: Callable[[], Any]) -> Any:
        """Run something of the instrument's own: nothing is intercepted."""
        host = self.hosts.here()
        if host is not None:
            host.raw = True
        try:
            with torch.no_grad():
                return body()
        finally:
            if host is not None:
                host.raw = False

    def _progress(self) -> bool:
        return bool(self.busy) and self.quietly(self._advance)

    def _advance(self) -> bool:
        self.moved, any_moved = True, False
        while self.moved:
            self.moved = False
            for stream in list(self.busy):
                while stream.queue and stream.queue[0].run():
                    stream.queue.popleft()
                    self.moved = True
                if not stream.queue:
                    self.busy.pop(stream, None)
            any_moved |= self.moved
        return any_moved

    def last_findings(self) -> None:
        """Contexts on other ranks' devices."""
        for rank, contexts in enumerate(self._contexts):
            for index in sorted(contexts.opened - {rank}):
                self.findings.append(
                    f"rank {rank} opened a context on device {index}: about 0.5 GB of that device's memory"
                )

    def patches(self) -> list[tuple[Any, str, Any]]:
        inner: Any = dist.distributed_c10d
        c10d = [(dist, name, value) for name, value in self.dist.functions().items()]
        return [
            *c10d,
            (dist, "group", SimpleNamespace(WORLD=self.world)),
            (inner, "_get_default_store", lambda: self.dist.store),
            (functional, "wait_tensor", lambda x: x),
            (functional, "all_to_all_single", lambda x, o, i, g: FunctionalAllToAll.apply(x, o, i, g)),
            (functional, "all_to_all_single_autograd", lambda x, o, i, g: FunctionalAllToAll.apply(x, o, i, g)),
            *cuda_functions(self),
        ]


def on_device(x: T) -> T:
    """A tensor, or a module with its parameters and buffers, on the calling rank's device."""
    if isinstance(x, Tensor):
        return x.to("cuda")
    with torch.no_grad():
        for held in (*x.parameters(), *x.buffers()):
            held.data = held.data.to("cuda")
    return x


def host_syncs() -> int:
    """How often the calling rank's host has waited for a stream so far, whether it had to or not; once a stream of a device."""
    assert _running is not None, "only within run_on_devices"
    return _running.syncs[_running.rank()]


def run_on_devices(fn: Callable[..., Any], n: int, *args: Any) -> Outcome:
    """Run ``fn(*args)`` on ``n`` ranks, each a thread with a device of its own, by NCCL's and CUDA's rules.

    Args:
        fn: Any function; it learns its rank from ``torch.distributed``.
        n: Ranks; rank ``r`` has device ``r``.
        args: The same for all ranks.

    Returns:
        What became of it; nothing is raised for what the program did.
    """
    global _running
    with _ONE_JOB:
        machine = _running = Machine(n)
        outcome = Outcome([None] * n, findings=machine.findings)

        def body(rank: int) -> None:
            torch.cuda.set_device(rank)
            try:
                outcome.results[rank] = fn(*args)
            except BaseException as err:
                outcome.errors[rank] = err

        saved: list[tuple[Any, str, Any]] = []
        try:
            for owner, name, value in machine.patches():
                saved.append((owner, name, owner.__dict__.get(name, saved)))  # the list stands for nothing
                setattr(owner, name, value)
            threads = [
                threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(n)
            ]
            with machine.hosts.lock:
                machine.hosts.mains.update(threads)
                machine.hosts.threads.update({thread: rank for rank, thread in enumerate(threads)})
            for rank, thread in enumerate(threads):
                machine.hosts.start(thread, rank)
            for thread in threads:
                _JOIN(thread)
            outcome.hang = machine.hosts.hang
        finally:
            machine.hosts.close()
            _running = None
            for owner, name, value in reversed(saved):
                delattr(owner, name) if value is saved else setattr(owner, name, value)
        outcome.world_meetings = machine.dist.world_meetings
        machine.last_findings()
        return outcome
