"""Bytes between ranks: gather to rank 0, broadcast, scatter, and errors that every rank raises alike.

torch's object collectives pickle, so a checkpoint that used them would unpickle what another process sent. Here
ranks exchange JSON as uint8 tensors. Without torch.distributed the same class serves one process.

With ``ranks_per_node``, bytes of a node's ranks are collected by the first of them, and only these leaders exchange
across nodes: rank 0 has a connection per node, not one per rank.
"""

import json
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from titan_ckpt.errors import CheckpointError, Damage, DamageError


class ByteComm:
    """The ranks that save and load together.

    Args:
        group: Their process group, over a backend with CPU tensors (gloo). None takes the default group if it can
            do that, makes a gloo group of all ranks if it cannot (every rank must then construct at the same
            point), and serves a single process where torch.distributed is not in use.
        ranks_per_node: Consecutive ranks on each node, for messages through the nodes' first ranks. Every rank must then
            construct at the same point. None, nodes that differ, or one node: every rank exchanges with every
            other.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, ranks_per_node: int | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self._node: ByteComm | None = None
        self._leaders: ByteComm | None = None
        if dist.is_available() and dist.is_initialized():
            self.group = group or _cpu_group()
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if ranks_per_node is not None and self.size > 1:
                self._through_leaders(ranks_per_node)
        elif group is not None:
            raise ValueError(
                "a process group was given, but torch.distributed is not initialised. Initialise it first."
            )

    def gather(self, payload: bytes) -> list[bytes] | None:
        """Every rank's bytes, in rank order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [payload]
        if self._node is not None:
            of_node = self._node.gather(payload)
            of_all = None if self._leaders is None else self._leaders.gather(_joined(of_node or []))
            return None if of_all is None else [part for node in of_all for part in _split(node)]
        lengths = self._lengths(len(payload))
        mine = _padded(payload, max(lengths))
        into = [torch.empty_like(mine) for _ in lengths] if self.rank == 0 else None
        dist.gather(mine, into, group=self.group, group_dst=0)
        return [_bytes(t, n) for t, n in zip(into, lengths, strict=True)] if into is not None else None

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank."""
        if self.size == 1:
            return [payload]
        if self._node is not None:
            of_node = self._node.gather(payload)
            of_all = None if self._leaders is None else self._leaders.all_gather(_joined(of_node or []))
            whole = self._node.broadcast(None if of_all is None else _joined(of_all))
            return [part for node in _split(whole) for part in _split(node)]
        lengths = self._lengths(len(payload))
        mine = _padded(payload, max(lengths))
        into = [torch.empty_like(mine) for _ in lengths]
        dist.all_gather(into, mine, group=self.group)
        return [_bytes(t, n) for t, n in zip(into, lengths, strict=True)]

    def scatter(self, payloads: list[bytes] | None) -> bytes:
        """Rank 0's ``payloads[i]`` on rank ``i``; other ranks pass None."""
        if self.size == 1:
            assert payloads is not None
            return payloads[0]
        if self._node is not None:
            each = self._node.size
            nodes = payloads and [_joined(payloads[i : i + each]) for i in range(0, self.size, each)]
            of_node = None if self._leaders is None else _split(self._leaders.scatter(nodes))
            return self._node.scatter(of_node)
        lengths = torch.tensor([len(p) for p in payloads or []] or [0] * self.size, dtype=torch.int64)
        dist.broadcast(lengths, group=self.group, group_src=0)
        longest = max(int(lengths.max()), 1)
        parts = [_padded(p, longest) for p in payloads] if payloads is not None else None
        mine = torch.empty(longest, dtype=torch.uint8)
        dist.scatter(mine, parts, group=self.group, group_src=0)
        return _bytes(mine, int(lengths[self.rank]))

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; other ranks pass None."""
        if self.size == 1:
            assert payload is not None
            return payload
        if self._node is not None:
            return self._node.broadcast(None if self._leaders is None else self._leaders.broadcast(payload))
        length = torch.tensor([len(payload) if payload is not None else 0], dtype=torch.int64)
        dist.broadcast(length, group=self.group, group_src=0)
        data = _padded(payload or b"", int(length))
        dist.broadcast(data, group=self.group, group_src=0)
        return _bytes(data, int(length))

    def agree(self, error: Exception | None, doing: str) -> None:
        """Raise on every rank if any rank has an error. Collective.

        Damage that any rank saw is raised by every rank as one `DamageError` that lists what all ranks saw. It takes
        precedence over other errors, since a damaged step may cause them. Otherwise a rank that failed raises its own
        error; the rest raise the first failed rank's, of the same base type (ValueError, TypeError, else
        `CheckpointError`).
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        replies = [json.loads(reply) for reply in self.all_gather(json.dumps(_encode_error(error)).encode())]
        failed = [rank for rank, reply in enumerate(replies) if reply]
        if not failed:
            return
        damaged = [rank for rank in failed if "damages" in replies[rank]]
        if damaged:
            places = dict.fromkeys(_decode_damage(value) for rank in damaged for value in replies[rank]["damages"])
            raise DamageError(replies[damaged[0]]["step"], list(places), damaged) from error
        if error is not None:
            raise error
        first = replies[failed[0]]
        kind = {t.__name__: t for t in _BASE_TYPES}[first["type"]]
        raise kind(f"{doing}: rank {failed[0]} failed ({len(failed)} of {self.size} ranks did): {first['text']}")

    def _through_leaders(self, ranks_per_node: int) -> None:
        """Make this rank's node group, and on the first rank of a node the group of these leaders."""
        alike = set(self._lengths(ranks_per_node)) == {ranks_per_node}  # nodes may hold different numbers
        if not alike or not 1 < ranks_per_node < self.size or self.size % ranks_per_node:
            return
        ranks = dist.get_process_group_ranks(self.group)
        first = self.rank - self.rank % ranks_per_node
        self._node = ByteComm(_local_group(ranks[first : first + ranks_per_node]))
        if self.rank == first:
            self._leaders = ByteComm(_local_group(ranks[::ranks_per_node]))

    def _lengths(self, length: int) -> list[int]:
        into = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(into, torch.tensor([length], dtype=torch.int64), group=self.group)
        return [int(t) for t in into]


_BASE_TYPES: tuple[type[Exception], ...] = (CheckpointError, ValueError, TypeError)


def _encode_error(error: Exception | None) -> dict[str, Any]:
    """An error as JSON; empty for None."""
    if error is None:
        return {}
    if isinstance(error, DamageError):
        return {"step": error.step, "damages": [asdict(damage) for damage in error.damages]}
    return {"type": _base_type(error).__name__, "text": str(error)}


def _decode_damage(value: dict[str, Any]) -> Damage:
    return Damage(value["file"], value["what"], tuple(value["tensors"]), value["block"], value["offset"])


def _base_type(error: Exception) -> type[Exception]:
    return next((t for t in _BASE_TYPES if isinstance(error, t)), CheckpointError)


def _cpu_group() -> dist.ProcessGroup | None:
    if "gloo" in str(dist.get_backend_config()):
        return dist.group.WORLD
    made = dist.new_group(backend="gloo")
    assert isinstance(made, dist.ProcessGroup)  # of all ranks, so this one is in it
    return made


def _local_group(ranks: list[int]) -> dist.ProcessGroup:
    """A gloo group that only its members make."""
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _joined(parts: list[bytes]) -> bytes:
    """Several payloads as one: each after its length."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _split(joined: bytes) -> list[bytes]:
    """The inverse of `_joined`."""
    parts: list[bytes] = []
    start = 0
    while start < len(joined):
        end = start + 8 + int.from_bytes(joined[start : start + 8], "little")
        parts.append(joined[start + 8 : end])
        start = end
    return parts


def _padded(payload: bytes, length: int) -> torch.Tensor:
    # bytearray: torch.frombuffer wants writable memory. At least one byte: gloo refuses empty tensors.
    return torch.frombuffer(bytearray(payload.ljust(max(length, 1), b"\0")), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor, length: int) -> bytes:
    return tensor[:length].numpy().tobytes()
