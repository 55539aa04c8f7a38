"""Messages between ranks of one machine over sockets: one wake-up a message, and no thread of ours.

Problem: with gloo a message wakes gloo's own thread, then the thread that listens, then the rank that waits; torch's
schedules, which wait in gloo themselves, save the second but cannot be interrupted. Where stages are small, this is most of
what a step costs beside its computation.

Idea: each pair of ranks has a socket, and a rank that waits does so in ``poll``, over all its sockets at once and one end
that `give_up` writes to. So it is woken by what it waits for, by news of a failure from anyone, by the death of a peer, and
by the watchdog, and by nothing else. A message is one system call of its sender: what it says (its key, and a number for its
shapes, which are sent the first time only) goes before the tensors, whose memory is handed to the kernel as it is; the
receiver reads them to where they stay. Between actions a rank takes what has arrived, without waiting, so that its peers can
go on sending. What does not fit the kernel's buffer (some 200 KiB on Linux) a thread sends on (`Outbox`).

The ranks meet by a report of each to rank 0 and its answer: 2(p - 1) messages, where an all-gather around a ring has p(p - 1).

Failure: as `GlooTransport`. The news goes down every channel that still expects something from this rank, receivers read up
to it, and the channels are clean again.
"""

import ctypes
import json
import select
import socket
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import accumulate
from typing import Any

import torch

from titan_pipeline.runtime.transport.base import StatusBoard
from titan_pipeline.runtime.transport.messages import (
    Key,
    Payload,
    PeerFailure,
    PipelineAborted,
    Specs,
    decode_specs,
    encode_specs,
    specs_of,
    with_structure,
)
from titan_pipeline.runtime.transport.outbox import Outbox
from titan_pipeline.runtime.transport.tree import as_bytes

_PREFIX = struct.Struct("<7q")
"""Kind of frame, key, number of the shapes, bytes of their text, bytes of the body."""
_DATA, _FAILURE, _REPORT = 1, 2, 3
_ALIGNED = 64
"""Bytes: tensors begin at multiples of it, so that each may be viewed as its data type."""


class SocketTransport:
    """One rank's end of sockets to all others. Made by `host_transport`.

    Args:
        rank: Of the pipeline.
        sockets: To each other rank, connected.
        board: For the watchdog.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], board: StatusBoard | None) -> None:
        self.rank, self.num_ranks, self.board = rank, len(sockets) + 1, board
        self.around_transfer: Callable[[int], AbstractContextManager[object]] | None = None
        """See `GlooTransport`; here the rank itself reads, where it waits or between two actions."""
        self._failure: PeerFailure | None = None
        self._arrived: dict[tuple[int, Key], Payload] = {}
        self._expected: dict[int, list[Key]] = {}
        """By source, keys still to come, the next one last."""
        self._left: dict[int, int] = {}
        self._reports: dict[int, bytes] = {}
        self._outboxes = {target: Outbox(one) for target, one in sockets.items()}
        self._readers = {source: _Reader(one) for source, one in sockets.items()}
        self._waking, self._wake = socket.socketpair()
        for one in (*sockets.values(), self._waking, self._wake):
            one.setblocking(False)
        self._sources = {one.fileno(): source for source, one in sockets.items()}
        self._awaited = select.poll()
        """Sources that this rank expects messages from, and the end that wakes it."""
        self._awaited.register(self._waking, select.POLLIN)
        weakref.finalize(self, _close, [*self._outboxes.values()], [self._waking, self._wake])

    def begin(self, expected: Mapping[int, Sequence[Key]], sends: Mapping[int, int]) -> None:
        """See `Transport.begin`."""
        self._arrived.clear()
        if self._hung() is None:
            self._failure = None
        self._left = dict(sends)
        self._expected = {source: list(reversed(keys)) for source, keys in expected.items() if keys}
        for source in self._expected:
            self._awaited.register(self._readers[source].socket, select.POLLIN)

    def send(self, target: int, key: Key, payload: Payload) -> None:
        """Hand the tensors to the kernel. They must not change until the step closes: some may leave later."""
        specs, structure = specs_of(payload)
        parts: list[Any] = [b"", b""]
        starts, at, kept = _starts(specs), 0, list[torch.Tensor]()
        for tensor, start in zip(payload, starts, strict=True):
            if tensor is not None and tensor.numel():
                plain = as_bytes(tensor.cpu())
                kept.append(plain)
                parts += [bytes(start - at), _memory(plain)] if start > at else [_memory(plain)]
                at = start + plain.numel()
        outbox = self._outboxes[target]
        # Last of what may fail: the other rank learns a number by this message.
        number, text = outbox.described((tuple(specs), structure), lambda: encode_specs(specs, structure))
        parts[:2] = _PREFIX.pack(_DATA, *key, number, len(text), at), text
        self._left[target] -= 1
        try:
            outbox.put(parts, kept)
        except OSError as err:
            raise PipelineAborted(PeerFailure(target, -1, "", f"it takes no messages any more: {err}")) from err

    def receive(self, source: int, key: Key) -> Payload | PeerFailure:
        """See `Transport.receive`."""
        at = (source, key)
        while at not in self._arrived:
            if self._failure is not None:
                return self._failure
            if source not in self._expected:
                return PeerFailure(source, -1, "", f"message {key} was not announced for this step")
            self._take(None)
        return self._arrived.pop(at)

    def failed(self) -> PeerFailure | None:
        """A failure this rank has heard of; takes what has arrived."""
        if self._expected:
            self._take(0)
        return self._failure

    def announce(self, failure: PeerFailure) -> None:
        """See `Transport.announce`."""
        text = _encode(failure)
        for target, left in self._left.items():
            if left > 0:
                self._left[target] = 0
                self._post(target, _FAILURE, text)

    def close_step(
        self, failure: PeerFailure | None, values: Sequence[float]
    ) -> tuple[PeerFailure | None, list[list[float]]]:
        """Read all channels up to their end, then meet on rank 0.

        Where a rank has died nobody can meet it any more: each rank returns the failure it knows, and the transport is of
        no further use.
        """
        while self._expected:
            self._take(None)
            hung = self._hung()
            if hung is not None:
                return hung, []
        report = _encode(failure) + b"\n" + struct.pack(f"<{len(values)}d", *values)
        first, rows = self._gather(report) if self.rank == 0 else self._reported(report)
        if rows is None:
            return failure or self._failure or first or PeerFailure(self.rank, -1, "", "the ranks could not meet"), []
        if first is not None:
            self._arrived.clear()
        return first, rows

    def give_up(self, failure: PeerFailure) -> None:
        """See `Transport.give_up`."""
        self._failure = failure
        self._wake.send(b"\0")

    def _gather(self, report: bytes) -> tuple[PeerFailure | None, list[list[float]] | None]:
        """On rank 0: everybody's report, and the same answer to all."""
        waiting = select.poll()
        waiting.register(self._waking, select.POLLIN)
        for source in self._readers:
            if source not in self._reports:
                waiting.register(self._readers[source].socket, select.POLLIN)
        lost: PeerFailure | None = None
        while len(self._reports) < self.num_ranks - 1 and lost is None:
            for source in self._ready(waiting, None):
                lost = self._read(source) or lost
                if source in self._reports:
                    waiting.unregister(self._readers[source].socket)
            lost = self._hung() or lost
        if lost is not None:
            answer = _encode(self._failure or lost)
        else:
            texts = [report, *(self._reports.pop(source) for source in range(1, self.num_ranks))]
            heads, rows = zip(*(text.split(b"\n", 1) for text in texts), strict=True)
            first = next((head for head in heads if head), b"")
            answer = first + b"\n" + b"".join(rows)
        for target in self._readers:
            self._post(target, _REPORT, answer)
        return self._answered(answer)

    def _reported(self, report: bytes) -> tuple[PeerFailure | None, list[list[float]] | None]:
        """On other ranks: tell rank 0, and wait for its answer."""
        self._post(0, _REPORT, report)
        waiting = select.poll()
        waiting.register(self._waking, select.POLLIN)
        waiting.register(self._readers[0].socket, select.POLLIN)
        while 0 not in self._reports:
            lost = self._hung()
            for source in self._ready(waiting, None) if lost is None else ():
                lost = self._read(source) or self._hung()
            if lost is not None:
                return lost, None
        return self._answered(self._reports.pop(0))

    def _answered(self, answer: bytes) -> tuple[PeerFailure | None, list[list[float]] | None]:
        head, met, body = answer.partition(b"\n")
        first = _decode(head)
        if not met:
            return first, None
        values = struct.unpack(f"<{len(body) // 8}d", body)
        width = len(values) // self.num_ranks
        return first, [list(values[r * width : (r + 1) * width]) for r in range(self.num_ranks)]

    def _take(self, timeout: float | None) -> None:
        """Read what has arrived of this step; with None, wait for something."""
        for source in self._ready(self._awaited, timeout):
            lost = self._read(source)
            if lost is not None and self._hung() is None:
                self._failure = self._failure or lost

    def _ready(self, poll: select.poll, timeout: float | None) -> list[int]:
        """Sources that have something to read; whoever wakes this rank is none of them."""
        return [self._sources[one] for one, _ in poll.poll(timeout) if one in self._sources]

    def _read(self, source: int) -> PeerFailure | None:
        """Read one frame, or the part of it that is here; what went wrong, if the source is lost."""
        try:
            frame = self._readers[source].read(self.around_transfer)
        except (OSError, ValueError) as err:
            self._end(source)
            return PeerFailure(source, -1, "", f"its messages stopped: {err}")
        if frame is None:
            return None
        kind, key, payload = frame
        if kind == _REPORT:
            self._reports[source] = payload
        elif kind == _FAILURE:
            self._end(source)
            return _decode(payload)
        else:
            keys = self._expected.get(source, [])
            wanted = keys.pop() if keys else None
            if not keys:
                self._end(source)
            if key != wanted:
                self._end(source)
                return PeerFailure(source, -1, "", f"its messages stopped: expected message {wanted}, got {key}")
            self._arrived[source, key] = payload
        return None

    def _end(self, source: int) -> None:
        """Nothing more of this step comes from there."""
        if self._expected.pop(source, None) is not None:
            self._awaited.unregister(self._readers[source].socket)

    def _post(self, target: int, kind: int, text: bytes) -> None:
        try:
            self._outboxes[target].put([_PREFIX.pack(kind, 0, 0, 0, -1, 0, len(text)), text], None)
        except OSError:
            return  # it may be the dead one, which is found where the ranks meet

    def _hung(self) -> PeerFailure | None:
        return self._failure if self._failure is not None and self._failure.hung else None


class _Reader:
    """Frames of one socket, each read in as many pieces as it comes in."""

    def __init__(self, one: socket.socket) -> None:
        self.socket = one
        self._shapes: list[tuple[Specs, bytes]] = []
        self._prefix = bytearray(_PREFIX.size)
        self._target = memoryview(self._prefix)
        self._fields: tuple[int, ...] | None = None
        self._text = b""
        self._body = torch.empty(0, dtype=torch.uint8)
        self._timing = ExitStack()

    def read(self, around: Callable[[int], AbstractContextManager[object]] | None) -> tuple[int, Key, Any] | None:
        """The next frame; None while a part of it is on its way.

        Raises:
            OSError: The other end is closed.
        """
        while True:
            while len(self._target):
                try:
                    got = self.socket.recv_into(self._target)
                except BlockingIOError:
                    return None
                if not got:
                    raise ConnectionError("the other process has ended")
                self._target = self._target[got:]
            if self._fields is None:
                self._fields = _PREFIX.unpack(self._prefix)
                self._body = torch.empty(self._fields[5] + self._fields[6], dtype=torch.uint8)
                self._target = _memory(self._body)
                if around is not None and self._fields[0] == _DATA:
                    self._timing.enter_context(around(self._fields[6]))
                continue
            self._timing.close()
            fields, self._fields, self._target = self._fields, None, memoryview(self._prefix)
            kind, *key, number, length, _ = fields
            if kind != _DATA:
                return kind, (0, 0, 0), bytes(_memory(self._body))
            return kind, (key[0], key[1], key[2]), self._payload(number, length)

    def _payload(self, number: int, length: int) -> Payload:
        whole = self._body
        if length:
            specs, structure = decode_specs(bytes(_memory(whole)[:length]))
            if number == len(self._shapes):
                self._shapes.append((specs, structure))
            whole = whole[length:].clone()  # where tensors begin at multiples again
        else:
            specs, structure = self._shapes[number]
        payload = tuple(
            None if spec is None
            else torch.empty(spec[1], dtype=spec[0]) if not spec[1].numel()
            else whole[start : start + spec[0].itemsize * spec[1].numel()].view(spec[0]).view(spec[1])
            for spec, start in zip(specs, _starts(specs), strict=True)
        )  # fmt: skip
        return with_structure(payload, structure)


def _starts(specs: Specs) -> list[int]:
    """Where each tensor begins in a body."""
    sizes = (0 if spec is None else spec[0].itemsize * spec[1].numel() for spec in specs)
    return list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))[:-1]


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor on the CPU, for as long as it lives."""
    size = tensor.numel()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() if size else 0)).cast("B")


def _encode(failure: PeerFailure | None) -> bytes:
    """One line; empty for none."""
    if failure is None:
        return b""
    return json.dumps([failure.rank, failure.position, failure.action, failure.error, failure.hung]).encode()


def _decode(text: bytes) -> PeerFailure | None:
    return PeerFailure(*json.loads(text)) if text else None


def _close(outboxes: Sequence[Outbox], sockets: Sequence[socket.socket]) -> None:
    for one in (*outboxes, *sockets):
        one.close()
