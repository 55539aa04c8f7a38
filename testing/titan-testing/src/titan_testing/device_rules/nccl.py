"""Groups of ranks: communicators whose operations are queued on streams, and gloo's, which the host waits for."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titan_testing.device_rules.streams import Mark, Stream

Pair = tuple[int, int]
"""Global ranks: from, to."""


@dataclass(eq=False)
class Message:
    """One end of a transfer."""

    tensor: Tensor
    pair: Pair
    sends: bool
    met: bool = False

    def __str__(self) -> str:
        way = f"send to rank {self.pair[1]}" if self.sends else f"receive from rank {self.pair[0]}"
        return f"{way} of {self.tensor.numel() * self.tensor.element_size()} bytes"


@dataclass(eq=False)
class Meeting:
    """One collective: what each rank came with."""

    kind: str
    size: int
    calls: dict[int, Any] = field(default_factory=dict[int, Any])
    done: bool = False

    def come(self, rank: int, call: Any) -> None:
        self.calls[rank] = call
        if len(self.calls) == self.size:
            compute(self.kind, [self.calls[rank] for rank in sorted(self.calls)])
            self.done = True


class Group:
    """Ranks, and what is between them. The same object on every rank, as far as programs see `torch`'s."""

    _device_types = ()

    def __init__(self, machine: Any, ranks: tuple[int, ...], backend: str) -> None:
        self.machine, self.ranks, self.backend = machine, ranks, backend
        self.group_name = f"group {list(ranks)}"
        self.came: set[int] = set()
        """Ranks that have used the communicator."""
        self._ends: dict[Pair, set[int]] = {}
        self._waiting: dict[tuple[Pair, bool], deque[Message]] = {}
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._streams: dict[int, Stream] = {}
        self._mail: dict[tuple[int, int, int], deque[Tensor]] = {}

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.machine.rank())

    def __str__(self) -> str:
        return f"{self.backend} {self.group_name}"

    # on streams

    def queue(self, kind: str, call: Any, messages: list[Message], touched: list[tuple[Tensor, bool]]) -> "Work":
        """Queue a collective or a batch of messages behind the current stream; blocks the host at first uses only."""
        machine, rank = self.machine, self.machine.rank()
        self._connect(rank, [message.pair for message in messages])
        with machine.hosts.lock:
            if rank not in self._streams:
                self._streams[rank] = machine.new_stream(rank, rank, f"the {self.group_name} stream of rank {rank}")
            stream = self._streams[rank]
            stream.wait_mark(machine.current().mark())
            operation = Operation(self, rank, kind, call, messages, self._meeting(rank, kind) if not messages else None)
            stream.push(operation)
            for tensor, written in touched:
                machine.touch(tensor, stream, kind, write=written)
            end = stream.mark()
            return Work(machine, end, [tensor for tensor, _ in touched])

    def _connect(self, rank: int, pairs: list[Pair]) -> None:
        hosts = self.machine.hosts
        with hosts.lock:
            self.came.add(rank)
            for pair in pairs:
                self._ends.setdefault(pair, set()).add(rank)
            hosts.look()
        hosts.block(
            lambda: f"at the first use of {self} for ranks {sorted(set(self.ranks) - self.came)}",
            lambda: len(self.came) == len(self.ranks),
            lambda: set(self.ranks) - self.came,
        )
        missing = [pair for pair in pairs if len(self._ends[pair]) < 2 and pair[0] != pair[1]]
        hosts.block(
            lambda: f"for the peer at the first message of {[f'{a} to {b}' for a, b in missing]} on {self}",
            lambda: all(len(self._ends[pair]) == 2 for pair in missing),
            lambda: {r for pair in missing for r in set(pair) - self._ends[pair]},
        )

    def post(self, message: Message) -> None:
        """One end of a message is at the head of its stream."""
        ends = self._waiting.setdefault((message.pair, not message.sends), deque())
        if not ends:
            self._waiting.setdefault((message.pair, message.sends), deque()).append(message)
            return
        other = ends.popleft()
        source, target = (message, other) if message.sends else (other, message)
        if source.tensor.numel() != target.tensor.numel() or source.tensor.dtype != target.tensor.dtype:
            self.machine.findings.append(f"a {source} meets a {target} on {self}: NCCL would hang or mix data")
        else:
            target.tensor.copy_(source.tensor.view_as(target.tensor))
        message.met = other.met = True

    def _meeting(self, rank: int, kind: str, place: str = "device") -> Meeting:
        number = self._counts.get((place, rank), 0)
        self._counts[place, rank] = number + 1
        meeting = self._meetings.setdefault((place, number), Meeting(kind, len(self.ranks)))
        if meeting.kind != kind:
            raise RuntimeError(f"rank {rank} calls {kind} on {self}, where others call {meeting.kind}")
        return meeting

    # on the host

    def meet(self, kind: str, call: Any) -> None:
        """A collective of gloo: the host waits for all ranks."""
        hosts, rank = self.machine.hosts, self.machine.rank()
        with hosts.lock:
            meeting = self._meeting(rank, kind, "host")
            self.machine.quietly(lambda: meeting.come(rank, call))
            hosts.look()
        hosts.block(
            lambda: f"in {kind} on {self} for ranks {sorted(set(self.ranks) - set(meeting.calls))}",
            lambda: meeting.done,
            lambda: set(self.ranks) - set(meeting.calls),
        )

    def mail(self, tensor: Tensor, target: int, tag: int) -> None:
        """A message of gloo, which its sender need not wait for."""
        hosts = self.machine.hosts
        with hosts.lock:
            copy = self.machine.quietly(tensor.detach().clone)
            self._mail.setdefault((self.machine.rank(), target, tag), deque()).append(copy)
            hosts.look()

    def fetch(self, tensor: Tensor, source: int, tag: int) -> None:
        """Receive one."""
        box = self._mail.setdefault((source, self.machine.rank(), tag), deque())
        hosts = self.machine.hosts
        hosts.block(lambda: f"for a message of rank {source} on {self}", lambda: bool(box), lambda: {source})
        with hosts.lock:
            got = box.popleft()
            self.machine.quietly(lambda: tensor.copy_(got.view_as(tensor)))


@dataclass(eq=False)
class Operation:
    """What is queued on a communicator's stream."""

    group: Group
    rank: int
    kind: str
    call: Any
    messages: list[Message]
    meeting: Meeting | None
    begun: bool = False

    def run(self) -> bool:
        if not self.begun:
            self.begun = self.group.machine.moved = True
            if self.meeting is not None:
                self.meeting.come(self.rank, self.call)
            for message in self.messages:
                self.group.post(message)
        return self.meeting.done if self.meeting is not None else all(message.met for message in self.messages)

    def describe(self) -> str:
        if self.meeting is not None:
            return f"{self.kind} on {self.group}, to which ranks {sorted(self.needs())} have not come"
        left = [str(message) for message in self.messages if not message.met]
        return f"the {' and the '.join(left)}, which the other side has not posted"

    def needs(self) -> set[int]:
        if self.meeting is not None:
            return set(self.group.ranks) - set(self.meeting.calls)
        return {r for message in self.messages if not message.met for r in message.pair if r != self.rank}


class Work:
    """What torch's ``Work`` is to programs; it holds the tensors until it is waited for, as torch 2.8 and later do."""

    def __init__(
        self, machine: Any, end: Mark | None, held: list[Tensor], later: Callable[[], None] | None = None
    ) -> None:
        self._machine, self._end, self._held, self._later = machine, end, held, later

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits; for gloo the host does."""
        if self._end is not None:
            self._machine.current().wait_mark(self._end)
            self._held.clear()
        if self._later is not None:
            later, self._later = self._later, None
            later()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        if self._end is None:
            return self._later is None
        with self._machine.hosts.lock:
            self._machine.hosts.look()
            if self._end.done:
                self._machine.learn(self._end.stream.rank, self._end.clock)
            return self._end.done


def compute(kind: str, calls: list[Any]) -> None:
    """A collective's values; each call is the rank's ``(output, input, options)``."""
    if kind != "barrier":
        outputs, inputs, options = zip(*calls, strict=True)
        _VALUES[kind](outputs, inputs, options)


def _all_reduce(outputs: Any, inputs: Any, options: Any) -> None:
    stacked = torch.stack([x.detach() for x in inputs])
    total = stacked.amax(0) if options[0] == "max" else stacked.amin(0) if options[0] == "min" else stacked.sum(0)
    for output in outputs:
        output.copy_(total)


def _broadcast(outputs: Any, inputs: Any, options: Any) -> None:
    for output in outputs:
        output.copy_(inputs[options[0]])


def _all_gather(outputs: Any, inputs: Any, options: Any) -> None:
    for output in outputs:
        for part, x in zip(output, inputs, strict=True):
            part.copy_(x)


def _all_gather_into_tensor(outputs: Any, inputs: Any, options: Any) -> None:
    for output in outputs:
        output.copy_(torch.cat([x.flatten() for x in inputs]).view_as(output))


def _reduce_scatter(outputs: Any, inputs: Any, options: Any) -> None:
    parts = torch.stack([x.flatten() for x in inputs]).sum(0).chunk(len(inputs))
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part.view_as(output))


def _all_to_all(outputs: Any, inputs: Any, options: Any) -> None:
    pieces = [_split(x, sent, len(inputs)) for x, (_, sent) in zip(inputs, options, strict=True)]
    for rank, (output, (received, _)) in enumerate(zip(outputs, options, strict=True)):
        for target, source in zip(_split(output, received, len(inputs)), pieces, strict=True):
            target.copy_(source[rank])


def _split(x: Tensor, sizes: list[int] | None, parts: int) -> list[Tensor]:
    return list(x.split(sizes if sizes else x.shape[0] // parts))


_VALUES: dict[str, Callable[[Any, Any, Any], None]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}
