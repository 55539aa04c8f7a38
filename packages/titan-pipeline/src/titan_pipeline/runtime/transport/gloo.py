"""Messages over a torch.distributed process group with gloo.

One thread per source rank receives in the agreed order, so data is on its way while the rank computes, and the main
thread never sits in a receive that nothing can interrupt. A failing rank sends the news down every channel that still
expects a message from it: receivers drain each channel up to that point, so the channels are clean again and the next
step needs no new group. A rank that died takes its connections down, which its peers see as a failed receive.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_pipeline.runtime.transport.base import Receiver
from titan_pipeline.runtime.transport.messages import (
    HEADER_LENGTH,
    TEXT_LENGTH,
    Key,
    Payload,
    PeerFailure,
    PipelineAborted,
    Specs,
    announces_failure,
    decode_failure,
    decode_header,
    encode_failure,
    encode_header,
    failure_header,
    on_wire,
    rest_of,
    specs_of,
    with_structure,
)
from titan_pipeline.runtime.transport.packed import PACKED, MessageLayout, layout_of

_PATIENCE_S = 0.5
"""Between looks whether a rank hangs, while messages are still on their way."""


_ON_THE_WAY = 16
"""Sends that may be under way before a thread sees them off: without one, they are kept until the step closes."""


_LONGEST = timedelta(days=1)
"""How long a message may take. Not the group's time-out: the last rank waits while all others compile, one after another. The
watchdog tells that from a hang."""


_MEETING = 1
"""Tag of what ranks exchange where they meet."""


_HEADER = 8 * HEADER_LENGTH
"""Bytes."""


class StoreBoard:
    """A `StatusBoard` on the store that the process group was made with.

    Args:
        ranks: Of the pipeline, in the whole job: pipelines have boards of their own.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        StoreBoard.made += 1
        inner: Any = dist.distributed_c10d
        self._store: Any = inner.PrefixStore(
            f"titan_pipeline/{StoreBoard.made}/{ranks[0]}-{ranks[-1]}", inner._get_default_store()
        )

    made = 0
    """How many there are: every rank makes its transports in one order."""

    def get(self, key: str) -> str | None:
        """See `StatusBoard`."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def set(self, key: str, text: str) -> None:
        """See `StatusBoard`."""
        self._store.set(key, text)


class GlooTransport:
    """One rank's end of a gloo process group.

    Tensors on an accelerator travel through host memory.

    Args:
        group: The pipeline's group; None for the default group. Its backend must serve CPU tensors.

    Raises:
        ValueError: If the group has no CPU backend.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        if self._group is None:
            raise ValueError("torch.distributed is not initialised. Call init_process_group('gloo') first.")
        backend = dist.get_backend(self._group)
        if "gloo" not in backend:
            raise ValueError(f"the group's backend is {backend!r}, which moves no CPU tensors. Make one with gloo.")
        self.rank = dist.get_rank(self._group)
        self.num_ranks = dist.get_world_size(self._group)
        self.board = StoreBoard(dist.get_process_group_ranks(self._group))
        self.around_transfer: Callable[[int], AbstractContextManager[object]] | None = None
        """Gives a block to receive the tensors of one message in, of so many bytes: from when their sender offers them until
        they are here, in a listening thread. Set it on all ranks: tensors are then sent apart from their headers.
        `DeviceTransport` uses it only for what goes through host memory."""
        self._layouts: dict[tuple[str, int, Key], MessageLayout | None] = {}
        """How the last message with a key was laid out, sent to or received from a rank."""
        self._receiver = Receiver()
        self._threads: list[threading.Thread] = []
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._waiter: threading.Thread | None = None
        self._left: dict[int, int] = {}

    def begin(self, expected: Mapping[int, Sequence[Key]], sends: Mapping[int, int]) -> None:
        """Start one receiving thread per source."""
        self._receiver.clear()
        self._left = dict(sends)
        self._threads = [
            threading.Thread(target=self._listen, args=(source, tuple(keys)), name=f"from-{source}", daemon=True)
            for source, keys in expected.items()
            if keys
        ]
        for thread in self._threads:
            thread.start()

    def send(self, target: int, key: Key, payload: Payload) -> None:
        """Send header and tensors; they are kept until they have left."""
        self._let_go()
        specs, structure = specs_of(payload)
        known = self._layouts.get(("to", target, key))
        alike = known is not None and (known.specs, known.structure) == (specs, structure)
        if known is not None and alike and self.around_transfer is None:
            headers, tensors = [known.pack(payload)], None
        else:
            headers, tensors = encode_header(key, specs, structure), self._prepared(target, payload)
        self._left[target] -= 1
        try:
            for header in headers:
                self._post(header, target)
            if tensors is not None:
                self._send_tensors(target, tensors)
                self._laid_out("to", target, key, specs, structure)
        except RuntimeError as err:
            raise PipelineAborted(PeerFailure(target, -1, "", f"it takes no messages any more: {err}")) from err

    def receive(self, source: int, key: Key) -> Payload | PeerFailure:
        """Wait for the tensors, or for bad news."""
        return self._receiver.take(source, key)

    def failed(self) -> PeerFailure | None:
        """A failure this rank has heard of."""
        return self._receiver.failure

    def announce(self, failure: PeerFailure) -> None:
        """Send the news down every channel that still expects something from this rank."""
        for target, left in self._left.items():
            if left > 0:
                self._left[target] = 0
                with suppress(RuntimeError):  # it may be the dead one
                    self._post(failure_header(), target)
                    self._post(encode_failure(failure), target)

    def close_step(
        self, failure: PeerFailure | None, values: Sequence[float]
    ) -> tuple[PeerFailure | None, list[list[float]]]:
        """Drain all channels, then gather every rank's report.

        Where a rank has died nobody can meet it any more: each rank returns the failure it knows, and the group is of
        no further use.
        """
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_PATIENCE_S)
                hung = self._receiver.hung()
                if hung is not None:
                    return hung, []
        self._threads = []
        try:
            self._drain()
            return self._in_thread(lambda: self._meet(failure, values))
        except RuntimeError as err:
            lost = (
                failure or self._receiver.failure or PeerFailure(self.rank, -1, "", f"the ranks could not meet: {err}")
            )
            return lost, []
        finally:
            self._sent = deque()

    def give_up(self, failure: PeerFailure) -> None:
        """See `Transport.give_up`."""
        self._receiver.fail(failure)

    def _in_thread(
        self, meet: Callable[[], tuple[PeerFailure | None, list[list[float]]]]
    ) -> tuple[PeerFailure | None, list[list[float]]]:
        """Meet in a thread, which nothing can interrupt, so that this one stops when a rank hangs."""
        done = threading.Event()
        met: list[tuple[PeerFailure | None, list[list[float]]]] = []
        errors: list[RuntimeError] = []

        def body() -> None:
            try:
                met.append(meet())
            except RuntimeError as err:
                errors.append(err)
            done.set()
            self._receiver.wake()

        threading.Thread(target=body, name="meeting", daemon=True).start()
        hung = self._receiver.wait_for(done)
        if hung is not None:
            return hung, []
        if errors:
            raise errors[0]
        return met[0]

    def _meet(
        self, failure: PeerFailure | None, values: Sequence[float]
    ) -> tuple[PeerFailure | None, list[list[float]]]:
        self._see_off(0)
        report = torch.tensor([1.0 if failure else 0.0, *values], dtype=torch.float64)
        reports = self._gather(report)
        first: PeerFailure | None = None
        if any(r[0] for r in reports):
            texts = map(decode_failure, self._gather(encode_failure(failure)))
            first = next(f for f in texts if f is not None)
            self._receiver.clear()
        return first, [r[1:].tolist() for r in reports]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order, by messages: a collective has the group's time-out."""
        parts = [torch.empty_like(mine) if rank != self.rank else mine for rank in range(self.num_ranks)]
        works: list[Any] = []
        for rank, part in enumerate(parts):
            if rank != self.rank:
                works.append(dist.isend(mine, group=self._group, group_dst=rank, tag=_MEETING))
                works.append(dist.irecv(part, group=self._group, group_src=rank, tag=_MEETING))
        for work in works:
            work.wait(_LONGEST)
        return parts

    def _laid_out(self, way: str, rank: int, key: Key, specs: Specs, structure: bytes) -> None:
        """What the next message with this key will look like, if it is like this one. Noted alike on both ranks."""
        self._layouts[way, rank, key] = layout_of(key, specs, structure)

    def _drain(self) -> None:
        """Receive what is still on its way after a failure: the threads have done that."""

    def _prepared(self, target: int, payload: Payload) -> list[Tensor]:
        """The tensors of a message as they will be sent."""
        return [on_wire(tensor.detach().cpu().contiguous()) for tensor in payload if tensor is not None]

    def _send_tensors(self, target: int, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._post(tensor, target)

    def _let_go(self) -> None:
        """Free what has left. Gloo's works do not say when they are done, so a thread waits for them."""
        if len(self._sent) > _ON_THE_WAY and (self._waiter is None or not self._waiter.is_alive()):
            self._waiter = threading.Thread(target=self._wait_for_sent, name="sent", daemon=True)
            self._waiter.start()

    def _wait_for_sent(self) -> None:
        with suppress(RuntimeError):  # a dead peer is found where the ranks meet
            self._see_off(_ON_THE_WAY // 2)

    def _see_off(self, left: int) -> None:
        """Wait for the oldest sends until so many are left."""
        sent = self._sent
        while len(sent) > left:
            with suppress(IndexError):  # two threads may wait
                sent.popleft()[0].wait(_LONGEST)

    def _announced(self, source: int, key: Key) -> None:
        """Called in the listening thread before a message can be taken."""

    def _receive_tensors(self, source: int, specs: Specs) -> Payload:
        """Called in the listening thread, in the order of the messages."""
        payload = tuple(None if spec is None else torch.empty(spec[1], dtype=spec[0]) for spec in specs)
        tensors = [tensor for tensor in payload if tensor is not None]
        around = self.around_transfer
        with nullcontext() if around is None else around(sum(t.nbytes for t in tensors)):
            for tensor in tensors:
                self._read(on_wire(tensor), source)
        return payload

    def _read(self, tensor: Tensor, source: int) -> None:
        work: Any = dist.irecv(tensor, group=self._group, group_src=source)
        work.wait(_LONGEST)

    def _post(self, tensor: Tensor, target: int) -> None:
        self._sent.append((dist.isend(tensor, group=self._group, group_dst=target), tensor))

    def _listen(self, source: int, keys: Sequence[Key]) -> None:
        """Receive a step's messages from one source, up to the last or the news of a failure."""
        try:
            for key in keys:
                known = self._layouts.get(("from", source, key))
                whole = torch.empty(max(_HEADER, 0 if known is None else known.num_bytes), dtype=torch.uint8)
                self._read(whole, source)
                header = whole[:_HEADER].view(torch.int64)
                if known is not None and header[0] == PACKED:
                    payload = with_structure(known.unpack(whole, key), known.structure)
                    self._receiver.put(source, key, payload)
                    continue
                if announces_failure(header):
                    text = torch.empty(TEXT_LENGTH, dtype=torch.uint8)
                    self._read(text, source)
                    failure = decode_failure(text)
                    assert failure is not None
                    self._receiver.fail(failure)
                    return
                rest = torch.empty(rest_of(header), dtype=torch.int64)
                if rest.numel():
                    self._read(rest, source)
                got, specs, structure = decode_header(torch.cat([header, rest]))
                if got != key:
                    raise RuntimeError(f"expected message {key} from rank {source}, got {got}")
                payload = with_structure(self._receive_tensors(source, specs), structure)
                self._laid_out("from", source, key, specs, structure)
                self._announced(source, key)
                self._receiver.put(source, key, payload)
        except (RuntimeError, ValueError) as err:  # a dead peer, or one that runs another schedule
            self._receiver.fail(PeerFailure(source, -1, "", f"its messages stopped: {err}"))
