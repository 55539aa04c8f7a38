"""Messages between accelerators, by their own backend (NCCL), without a detour through host memory.

Problem: NCCL runs what is queued on one communicator in order, and a send waits for its receive. Two ranks that both
send first then deadlock on the device, where nothing can interrupt them; and shapes, which may differ by microbatch,
would have to be read back from the device.

Idea: one communicator per directed pair of neighbours, so that a pair's messages are a first-in-first-out channel that
waits for nothing else; and headers over gloo, as in `GlooTransport`. A receive is posted when the executor needs the
message, after its header has come, so that its shape is known and the sender has posted its send. The host runs ahead
of the device, so transfers are queued long before the device gets there. After a failure each rank receives what is
still in its channels and throws it away: they are clean again.

Cost: up to four communicators a rank, made by all ranks of the job together, pipeline after pipeline. Limit: a peer
whose process dies after its header and before its data leaves the device waiting; the backend's own time-out then ends
it. Checked on the CPU, where the channels are gloo groups; NCCL itself has a test that needs two GPUs.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_pipeline.runtime.transport.gloo import GlooTransport
from titan_pipeline.runtime.transport.messages import Key, Payload, PeerFailure, Specs, on_wire, with_structure
from titan_pipeline.runtime.transport.tree import TensorTree

_PATIENCE = 1.0
"""Seconds given to the news of a failure when a data channel broke before it arrived."""


class DeviceTransport(GlooTransport):
    """One rank's end of a pipeline whose tensors stay on their device.

    Construction makes process groups: call it on every rank of the job, in every pipeline, with the same placement.

    Args:
        mesh: The mesh of all ranks of the job, not only of this pipeline.
        axis: Name of its pipeline axis.
        placement: Rank of each stage, as in ``schedule.placement``; schedules that are swapped in must have the same.
        device: Where received tensors go: this rank's accelerator.
        backend: Of the channels; by default what torch uses for the device (NCCL on CUDA, gloo on the CPU).

    Raises:
        ValueError: If the mesh lacks the axis or some ranks of the job, or the axis has another size than the placement.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: str,
        placement: Sequence[int],
        device: torch.device,
        *,
        backend: str | None = None,
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
        pipelines: list[list[int]] = mesh.mesh.movedim(names.index(axis), -1).reshape(-1, size).tolist()
        pairs = sorted({(a, b) for s, t in pairwise(placement) for a, b in ((s, t), (t, s)) if a != b})
        backend = backend or dist.get_default_backend_for_device(device)
        self._device = device
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        me = dist.get_rank()
        for members in pipelines:  # one order on all ranks: making a group is a collective of the job
            control = dist.new_group(members, backend="gloo")
            if me in members:
                super().__init__(cast(dist.ProcessGroup, control))
            for source, target in pairs:
                both = [members[source], members[target]]
                channel = dist.new_group(both, backend=backend)
                if me in both:
                    self._channels[source, target] = cast(dist.ProcessGroup, channel)
        self._coming: dict[int, deque[Key]] = {}
        self._works: list[tuple[list[Any], list[Tensor]]] = []
        self._early: dict[tuple[int, Key], Payload] = {}

    def receive(self, source: int, key: Key) -> Payload | PeerFailure:
        """Wait for the header, then post the receive, after those of the messages before it."""
        if (source, key) in self._early:
            return self._early.pop((source, key))
        promised = self._receiver.take(source, key)
        if isinstance(promised, PeerFailure):
            return promised
        order = self._coming[source]
        try:
            while order[0] != key:
                before = order.popleft()
                self._early[source, before] = self._fetch(source, self._receiver.take(source, before))
            order.popleft()
            return self._fetch(source, promised)
        except RuntimeError as err:
            return self._stopped(source, err)

    def close_step(
        self, failure: PeerFailure | None, values: Sequence[float]
    ) -> tuple[PeerFailure | None, list[list[float]]]:
        """As `GlooTransport.close_step`; what was sent is let go of when it has left."""
        try:
            return super().close_step(failure, values)
        finally:
            self._works.clear()
            self._early.clear()
            self._coming.clear()

    def _drain(self) -> None:
        """Receive what is still coming and see off what was sent; one dead peer must not cost the others theirs."""
        errors: list[RuntimeError] = []
        for source, order in self._coming.items():
            while order:
                try:
                    self._fetch(source, self._receiver.arrived.pop((source, order.popleft())))
                except RuntimeError as err:
                    errors.append(err)
        for work in (work for works, _ in self._works for work in works):
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

    def _send_tensors(self, target: int, payload: Payload) -> None:
        tensors = [on_wire(t.detach().contiguous()) for t in payload if t is not None]
        if tensors:
            channel = self._channels[self.rank, target]
            ops = [dist.P2POp(dist.isend, t, group=channel, group_peer=_other(channel)) for t in tensors]
            self._works.append((dist.batch_isend_irecv(ops), tensors))

    def _receive_tensors(self, source: int, specs: Specs) -> Payload:
        """The listening thread reads headers only; tensors without data stand for what will come."""
        return tuple(None if s is None else torch.empty(s[1], dtype=s[0], device="meta") for s in specs)

    def _announced(self, source: int, key: Key) -> None:
        self._coming.setdefault(source, deque()).append(key)

    def _fetch(self, source: int, promised: Payload | PeerFailure) -> Payload:
        payload = tuple(
            None if t is None else torch.empty_like(t, device=self._device) for t in cast(Payload, promised)
        )
        tensors = [t for t in payload if t is not None]
        if tensors:
            channel = self._channels[source, self.rank]
            ops = [dist.P2POp(dist.irecv, on_wire(t), group=channel, group_peer=_other(channel)) for t in tensors]
            for work in dist.batch_isend_irecv(ops):
                work.wait()  # on an accelerator: its stream waits, the host does not
        return with_structure(payload, promised.structure if isinstance(promised, TensorTree) else None)


def _other(channel: dist.ProcessGroup) -> int:
    """The other rank of a group of two."""
    return 1 - dist.get_rank(channel)
