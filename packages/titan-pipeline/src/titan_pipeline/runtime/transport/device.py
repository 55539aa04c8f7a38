"""Messages between accelerators, by their own backend (NCCL), without a detour through host memory.

Problem: NCCL runs what is queued on one communicator in order, and a send waits for its receive. Two ranks that both
send first then deadlock on the device, where nothing can interrupt them; and shapes, which may differ by microbatch,
would have to be read back from the device.

Idea: one communicator per directed pair of neighbours, so that a pair's messages are a first-in-first-out channel that
waits for nothing else; and headers over gloo, as in `GlooTransport`. What is queued on a communicator waits for what was
queued to compute before it. So receives are posted before every action and while a rank waits for a header, as soon as
their own is here and up to two messages ahead: the data comes while the rank computes, and the stream waits for it only
where it is needed. Memory of receives is taken and given back in the order of the program, however far the host runs ahead.
What was sent is kept until the device says that it has left. After a failure each rank receives what is still in its
channels and throws it away: they are clean again.

The first message of a channel connects it, and holds up the host until the other rank comes, however long. So all channels
are connected when they are made, in one order on all ranks, and two ranks meet through the store before.

What little passes between ranks without a channel (a schedule from rank 0) goes through host memory, as in `GlooTransport`.

Cost: up to four communicators a rank (more where stages jump, or share a weight). A receive that is posted occupies
multiprocessors of the GPU until its data is here: NCCL's channels take four at most. What that saves the computation and costs
the messages has not been measured. Every rank of the job makes the groups of every pipeline: torch counts the groups that
a rank has made and names them by it, so ranks that left out those of others would wait for different names. To leave one
out costs a rank about ten microseconds.

Limit: a peer whose process dies after its header and before its data leaves the device waiting; the backend's own
time-out then ends it. Checked on the CPU, where the channels are gloo groups; NCCL itself has a test that needs two GPUs.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_pipeline.runtime.transport.gloo import GlooTransport
from titan_pipeline.runtime.transport.messages import Key, Payload, PeerFailure, Specs, on_wire
from titan_pipeline.runtime.transport.tree import TensorTree

_AHEAD = 2
"""Messages of one source whose receive may be posted before they are needed: memory for so many more."""
_MAX_CTAS = 4
"""Thread blocks of NCCL that one message may occupy; by default up to 32 over NVLink."""
_PATIENCE = 1.0
"""Seconds given to the news of a failure when a data channel broke before it arrived."""


class DeviceTransport(GlooTransport):
    """One rank's end of a pipeline whose tensors stay on their device.

    Construction makes process groups and connects them: call it on every rank of the job, in every pipeline, with the same
    placement.

    Args:
        mesh: The mesh of all ranks of the job, not only of this pipeline.
        axis: Name of its pipeline axis. Headers go by its group, if that has gloo.
        placement: Rank of each stage, as in ``schedule.placement``; schedules that are swapped in must have the same.
        device: Where received tensors go: this rank's accelerator.
        backend: Of the channels; by default what torch uses for the device (NCCL on CUDA, gloo on the CPU).
        timeout_s: Seconds until a rank that does not come to connect, or data that does not come, is an error.
        also_between: Pairs of this pipeline's ranks that get channels too, both ways, though none of their stages follow one
            another: those that share a weight, as ``[(0, 3)]`` for an embedding tied to the head. Without one, its gradients go
            through host memory.

    Raises:
        ValueError: If the mesh lacks the axis or some ranks of the job, or the axis has another size than the placement, or
            ``also_between`` names a rank that the placement does not use.
        RuntimeError: If a neighbour did not connect in time.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: str,
        placement: Sequence[int],
        device: torch.device,
        *,
        backend: str | None = None,
        timeout_s: float = 600.0,
        also_between: Sequence[tuple[int, int]] = (),
    ) -> None:
        names = mesh.mesh_dim_names or ()
        if axis not in names:
            raise ValueError(f"axis={axis!r} is none of the mesh's axes {names}.")
        size, num_ranks = mesh.size(names.index(axis)), max(placement) + 1
        if size != num_ranks or mesh.size() != dist.get_world_size():
            raise ValueError(
                f"the mesh has {mesh.size()} of {dist.get_world_size()} ranks and {size} of them on axis {axis!r}, the "
                f"placement uses {num_ranks}. Give the mesh of the whole job, and schedule.placement."
            )
        if any(not 0 <= rank < num_ranks for pair in also_between for rank in pair):
            raise ValueError(
                f"also_between={list(also_between)} names ranks that the placement does not use. Give ranks of the pipeline, "
                f"0 to {num_ranks - 1}."
            )
        pipelines: list[list[int]] = mesh.mesh.movedim(names.index(axis), -1).reshape(-1, size).tolist()
        backend = backend or dist.get_default_backend_for_device(device)
        limit = timedelta(seconds=timeout_s)
        self._device = device
        self._simulated = backend == "fake"
        self._tells = backend not in ("gloo", "fake")
        """Whether a send's work says when it has left; that of torch 2.11's fake groups never does."""
        self._leaving: deque[tuple[list[Any], list[Tensor]]] = deque()
        self._coming: dict[int, deque[Key]] = {}
        """By source, messages whose header is here and whose receive is not posted, in order."""
        self._posted: dict[tuple[int, Key], tuple[Payload, list[Any]]] = {}
        super().__init__(_control_group(mesh, axis, pipelines, limit))
        self._channels = _make_channels(pipelines, _neighbours(placement, also_between), backend, limit)
        for pair in self._channels:
            self._connect(pair, limit)

    def begin(self, expected: Mapping[int, Sequence[Key]], sends: Mapping[int, int]) -> None:
        """As `GlooTransport.begin`."""
        self._coming = {source: deque() for source in expected}
        super().begin(expected, sends)

    def failed(self) -> PeerFailure | None:
        """Asked before every action: what the next actions need is posted before this one is queued."""
        while (source := self._next_source()) is not None:
            failure = self._try_to_post(source)
            if failure is not None:
                return failure
        return super().failed()

    def receive(self, source: int, key: Key) -> Payload | PeerFailure:
        """Wait for the header, and post what others send meanwhile; the stream that computes then waits for the tensors."""
        self._let_go()
        if (source, self.rank) not in self._channels:
            got = super().receive(source, key)
            return got if isinstance(got, PeerFailure) else self._on_device(got)
        while (source, key) not in self._posted:
            promised = self._receiver.look(source, key, lambda: self._next_source() is not None)
            if isinstance(promised, PeerFailure):
                return promised
            ready = self._next_source()
            failure = self._try_to_post(source if ready is None else ready)
            if failure is not None:
                return failure
        try:
            payload, works = self._posted.pop((source, key))
            for work in works:
                work.wait()  # on an accelerator: its stream waits, the host does not
        except RuntimeError as err:
            return self._stopped(source, err)
        return payload

    def close_step(
        self, failure: PeerFailure | None, values: Sequence[float]
    ) -> tuple[PeerFailure | None, list[list[float]]]:
        """As `GlooTransport.close_step`; what was sent is let go of when it has left."""
        try:
            return super().close_step(failure, values)
        finally:
            self._leaving.clear()
            self._posted.clear()
            self._coming.clear()

    def _laid_out(self, way: str, rank: int, key: Key, specs: Specs, structure: bytes) -> None:
        """Nothing is packed: tensors have a way of their own."""

    def _drain(self) -> None:
        """See in what nobody took and see off what was sent; one dead peer must not cost the others theirs."""
        errors: list[RuntimeError] = []
        for source, order in self._coming.items():
            try:
                while order:
                    self._post_next(source)
                    _, works = self._posted.popitem()[1]  # one message at a time: memory may be what failed
                    for work in works:
                        work.wait()
            except RuntimeError as err:
                errors.append(err)
        pending = [works for _, works in self._posted.values()] + [works for works, _ in self._leaving]
        for work in (work for works in pending for work in works):
            try:
                work.wait()
            except RuntimeError as err:
                errors.append(err)
        if errors:
            raise errors[0]

    def _stopped(self, source: int, err: RuntimeError) -> PeerFailure:
        """Why data did not come: the news that its sender heard of on the other channel, else the sender's death."""
        for thread in self._threads:
            if thread.name == f"from-{source}":
                thread.join(_PATIENCE)
        failure = self._receiver.failure or PeerFailure(source, -1, "", f"its messages stopped: {err}")
        self._receiver.fail(failure)
        return failure

    def _on_device(self, payload: Payload) -> Payload:
        """A message that came through host memory."""
        moved = tuple(None if t is None else t.to(self._device) for t in payload)
        return payload.holding(t for t in moved if t is not None) if isinstance(payload, TensorTree) else moved

    def _prepared(self, target: int, payload: Payload) -> list[Tensor]:
        if (self.rank, target) not in self._channels:
            return super()._prepared(target, payload)
        # `to` moves what is kept in host memory: gradients of tied weights under FSDP's offload
        return [on_wire(t.detach().to(self._device).contiguous()) for t in payload if t is not None]

    def _send_tensors(self, target: int, tensors: list[Tensor]) -> None:
        if (self.rank, target) not in self._channels:
            super()._send_tensors(target, tensors)
        elif tensors:
            works = self._exchange(dist.isend, (self.rank, target), tensors)
            if self._tells:
                self._leaving.append((works, tensors))
            else:
                self._sent.extend((work, tensor) for work, tensor in zip(works, tensors, strict=True))

    def _let_go(self) -> None:
        super()._let_go()
        while self._leaving and all(work.is_completed() for work in self._leaving[0][0]):
            works, _ = self._leaving.popleft()
            for work in works:
                work.wait()  # costs nothing now, and the work lets go of its tensors too

    def _receive_tensors(self, source: int, specs: Specs) -> Payload:
        """The listening thread reads headers only; tensors without data stand for what will come by the channel."""
        if (source, self.rank) not in self._channels:
            return super()._receive_tensors(source, specs)
        return tuple(None if s is None else torch.empty(s[1], dtype=s[0], device="meta") for s in specs)

    def _announced(self, source: int, key: Key) -> None:
        if (source, self.rank) in self._channels:
            self._coming[source].append(key)

    def _next_source(self) -> int | None:
        """A source whose next message can be posted: its header is here, and fewer than `_AHEAD` before it are posted."""
        for source, order in self._coming.items():
            posted = sum(source == other for other, _ in self._posted)
            if order and posted < _AHEAD and (source, order[0]) in self._receiver.arrived:
                return source
        return None

    def _try_to_post(self, source: int) -> PeerFailure | None:
        """As `_post_next`; why it could not, if that is not this rank's own lack of memory."""
        try:
            self._post_next(source)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as err:
            return self._stopped(source, err)
        return None

    def _post_next(self, source: int) -> None:
        """Post the receive of the next message of a source, whose header is here."""
        key = self._coming[source][0]
        promised = self._receiver.arrived[source, key]
        payload = tuple(None if t is None else torch.empty_like(t, device=self._device) for t in promised)
        self._coming[source].popleft()  # only now: what found no memory is drained
        del self._receiver.arrived[source, key]
        tensors = [on_wire(t) for t in payload if t is not None]
        works = self._exchange(dist.irecv, (source, self.rank), tensors) if tensors else []
        if isinstance(promised, TensorTree):
            payload = promised.holding(t for t in payload if t is not None)
        self._posted[source, key] = payload, works

    def _exchange(self, way: Any, pair: tuple[int, int], tensors: Sequence[Tensor]) -> list[Any]:
        channel = self._channels[pair]
        other = 1 - dist.get_rank(channel)
        return dist.batch_isend_irecv([dist.P2POp(way, t, group=channel, group_peer=other) for t in tensors])

    def _connect(self, pair: tuple[int, int], limit: timedelta) -> None:
        """Meet the other rank, then exchange one element over a channel: NCCL would wait for it without a limit."""
        deadline = time.monotonic() + limit.total_seconds()
        other = pair[1] if pair[0] == self.rank else pair[0]
        token = torch.zeros(1, device=self._device)
        try:
            if not self._simulated:
                store: Any = dist.distributed_c10d._get_default_store()
                here = f"titan_pipeline/connect/{self._channels[pair].group_name}/{pair}"
                store.set(f"{here}/{self.rank}", "")
                store.wait([f"{here}/{other}"], limit)
            for work in self._exchange(dist.isend if pair[0] == self.rank else dist.irecv, pair, [token]):
                if not self._tells:
                    work.wait(limit)
                while self._tells and not work.is_completed():
                    if time.monotonic() > deadline:
                        raise RuntimeError("it did not come")
                    time.sleep(0.001)
        except RuntimeError as err:
            raise RuntimeError(
                f"rank {self.rank} of the pipeline could not connect to rank {other} within {limit.total_seconds():g} s: {err}. "
                "See whether that rank still runs, and whether the machines reach each other by the network that the backend "
                "takes (NCCL_DEBUG=INFO prints it)."
            ) from err


def _neighbours(placement: Sequence[int], others: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Directed pairs of ranks that have channels, in the order in which they connect.

    Every second pair of neighbours, then those between: in ascending order each rank would wait for the one before. One order
    of all pairs, whichever it is, ends: of those that are left, nothing holds up the first.
    """
    pairs = {(a, b) for s, t in (*pairwise(placement), *others) for a, b in ((s, t), (t, s)) if a != b}
    return sorted(pairs, key=lambda pair: (min(pair) % 2, pair))


def _make_channels(
    pipelines: Sequence[Sequence[int]], pairs: Sequence[tuple[int, int]], backend: str, limit: timedelta
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Make the channels of this rank, in the order of ``pairs``. All ranks make those of all pipelines in one order."""
    channels: dict[tuple[int, int], dist.ProcessGroup] = {}
    me = dist.get_rank()
    for members in pipelines:
        for source, target in pairs:
            both = [members[source], members[target]]
            channel = dist.new_group(both, backend=backend, timeout=limit, pg_options=_options(backend, limit))
            if me in both:
                channels[source, target] = cast(dist.ProcessGroup, channel)
    return channels


def _options(backend: str, limit: timedelta) -> Any:
    """Of one channel."""
    if backend != "nccl" or not hasattr(dist, "ProcessGroupNCCL"):
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = limit  # torch warns if it is not that of new_group
    if hasattr(options, "config"):
        options.config.max_ctas = _MAX_CTAS
    return options


def _control_group(
    mesh: DeviceMesh, axis: str, pipelines: Sequence[Sequence[int]], limit: timedelta
) -> dist.ProcessGroup:
    """The gloo group of this rank's pipeline: the mesh's own, if it has gloo."""
    group = mesh.get_group(axis)
    if "gloo" in dist.get_backend(group):
        return group
    made = {tuple(ranks): dist.new_group(list(ranks), backend="gloo", timeout=limit) for ranks in pipelines}
    return cast(dist.ProcessGroup, next(made[ranks] for ranks in made if dist.get_rank() in ranks))
