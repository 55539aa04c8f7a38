"""Bytes between ranks: gather to rank 0, broadcast, scatter, and errors that every rank raises.

torch's object collectives would unpickle bytes of another process. Here ranks exchange JSON as uint8 tensors. Without
torch.distributed the same class serves one process.

With ``ranks_per_node``, the first rank of each node, its leader, collects the bytes of the node. Only leaders exchange
across nodes. Rank 0 then has one connection per node instead of one per rank.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titan_ckpt.errors import CheckpointError, Damage, DamageError
from titan_ckpt.format.tagged_json import join_parts, split_parts

_T = TypeVar("_T")


class ByteComm:
    """The ranks that save and load together.

    Args:
        group: Their process group, with a backend for CPU tensors (gloo). None takes the default group if it has gloo,
            else makes a gloo group of all ranks. Every rank must then construct at the same point. Without
            torch.distributed, None serves a single process.
        ranks_per_node: Consecutive ranks on each node. Messages then go through the leaders, and every rank must construct
            at the same point. None, one node, or nodes of different sizes: every rank exchanges with every other.
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
        """Every rank's bytes, in rank order, on rank 0; None on the others."""
        return self._collect(payload, everywhere=False)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank."""
        return self._collect(payload, everywhere=True) or []

    def _collect(self, payload: bytes, *, everywhere: bool) -> list[bytes] | None:
        if self.size == 1:
            return [payload]
        if self._node is not None:
            of_node = self._node.gather(payload)
            of_all = self._leaders and self._leaders._collect(join_parts(of_node or []), everywhere=everywhere)
            if everywhere:
                of_all = split_parts(self._node.broadcast(None if of_all is None else join_parts(of_all)))
            return None if of_all is None else [part for node in of_all for part in split_parts(node)]
        lengths = self._lengths(len(payload))
        mine = _padded(payload, max(lengths))
        into = [torch.empty_like(mine) for _ in lengths] if everywhere or self.rank == 0 else None
        if into is not None and everywhere:
            dist.all_gather(into, mine, group=self.group)
        else:
            dist.gather(mine, into, group=self.group, group_dst=0)
        return None if into is None else [_bytes(t, n) for t, n in zip(into, lengths, strict=True)]

    def scatter(self, payloads: list[bytes] | None) -> bytes:
        """Rank 0's ``payloads[i]`` on rank ``i``; other ranks pass None."""
        if self.size == 1:
            assert payloads is not None
            return payloads[0]
        if self._node is not None:
            each = self._node.size
            nodes = payloads and [join_parts(payloads[i : i + each]) for i in range(0, self.size, each)]
            of_node = None if self._leaders is None else split_parts(self._leaders.scatter(nodes))
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

    def from_rank0(self, make: Callable[[], Any], doing: str, failure: Callable[[OSError], Exception]) -> Any:
        """What ``make`` returns on rank 0, sent as JSON to every rank. Collective.

        An error of ``make`` is raised on every rank, an OSError as ``failure`` says.
        """
        made = self.attempt(lambda: json.dumps(make()).encode() if self.rank == 0 else None, doing, failure)
        return json.loads(self.broadcast(made))

    def attempt(
        self, action: Callable[[], _T], doing: str, failure: Callable[[OSError], Exception] = lambda err: err
    ) -> _T:
        """What ``action`` returns on this rank. Collective.

        An error of any kind is raised on every rank (`agree`), so that no rank hangs; an OSError as ``failure`` says.
        """
        done: list[_T] = []
        error: Exception | None = None
        try:
            done.append(action())
        except OSError as err:
            error = failure(err)
        except Exception as err:
            error = err
        self.agree(error, doing)
        return done[0]

    def agree(self, error: Exception | None, doing: str) -> None:
        """Raise on every rank if any rank has an error. Collective.

        If any rank found damage, every rank raises one `DamageError` that lists all places. It takes precedence, since
        damage may cause other errors. Otherwise a failed rank raises its own error, and the others raise that of the
        first failed rank as ValueError, TypeError or `CheckpointError`.
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
        """Make the group of this rank's node and, on a leader, the group of the leaders."""
        alike = set(self._lengths(ranks_per_node)) == {ranks_per_node}  # nodes may differ in size
        if not alike or not 1 < ranks_per_node < self.size or self.size % ranks_per_node:
            return
        ranks = dist.get_process_group_ranks(self.group)
        self._node = ByteComm(_join([ranks[i : i + ranks_per_node] for i in range(0, self.size, ranks_per_node)]))
        across = _join([ranks[place::ranks_per_node] for place in range(ranks_per_node)])
        if self.rank % ranks_per_node == 0:
            self._leaders = ByteComm(across)

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


def _join(partition: list[list[int]]) -> dist.ProcessGroup:
    """The gloo group of ``partition`` that holds this rank. Collective over all its ranks.

    Where they are all ranks, every rank walks every group: torch then names them alike. What only members make is named by how
    many groups each of them has made before, and ranks of a pipeline have made unequal numbers.
    """
    everybody = sum(map(len, partition)) == dist.get_world_size()
    made = [
        dist.new_group(ranks, backend="gloo", use_local_synchronization=not everybody)
        for ranks in partition
        if everybody or dist.get_rank() in ranks
    ]
    (mine,) = [group for group in made if isinstance(group, dist.ProcessGroup)]
    return mine


def _padded(payload: bytes, length: int) -> torch.Tensor:
    # bytearray: torch.frombuffer wants writable memory. At least one byte: gloo refuses empty tensors.
    return torch.frombuffer(bytearray(payload.ljust(max(length, 1), b"\0")), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor, length: int) -> bytes:
    return tensor[:length].numpy().tobytes()
