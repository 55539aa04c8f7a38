"""Seconds of one collective: latency by a tree or a ring, bandwidth by a ring, on the slowest link that the group spans.

NCCL has rings alone for all-gathers and reduce-scatters between nodes of several devices, so that their latency grows with
the number of ranks: 3.4 microseconds a step inside a node, 14 a step between nodes (NCCL's own tuning tables,
src/graph/tuning.cc, ring, "simple" protocol). All-reduces have trees, and groups of one member a node use PAT (NCCL 2.23),
a tree too.

A group is described by its size and by the stride between neighbours in rank order. Groups that lie inside one domain
use the local link. Across domains the members that share a domain add up their network links, so that a group of
stride 1 over domains of 8 drives eight of them.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from titan_train.planner.hardware.machine import Machine
from titan_train.planner.hardware.tables import OperatorTables

_RING_START_S, _RING_LOCAL_S, _RING_NETWORK_S = 8.4e-6, 3.4e-6, 14e-6


@dataclass(frozen=True, slots=True)
class Span:
    """Where a group lies."""

    size: int
    bytes_per_s: float
    latency_s: float
    local: bool
    """Inside one domain."""
    per_domain: int
    """Members that share a domain."""
    tables: OperatorTables | None = None
    """Measured collectives of such a group."""
    ring: tuple[float, float] | None = None
    """Measured latency of a ring's first step and of each further."""

    def measured(self, operation: str, num_bytes: float) -> float | None:
        """Seconds of one measured call; None where it was not measured."""
        return self.tables.find(f"collective.{operation}", num_bytes) if self.tables is not None else None

    @property
    def tree_s(self) -> float:
        """Latency of one collective that a tree serves."""
        return self.latency_s * (math.log2(self.size) + 1)

    @property
    def ring_s(self) -> float:
        """Latency of one all-gather or reduce-scatter."""
        if self.ring is not None:
            return self.ring[0] + self.ring[1] * (self.size - 1)
        if self.local or self.per_domain == 1:
            return self.tree_s
        domains = -(-self.size // self.per_domain)
        steps = (self.size - domains) * _RING_LOCAL_S + (domains - 1) * _RING_NETWORK_S
        return max(self.tree_s, _RING_START_S + steps)


@lru_cache(maxsize=65536)
def span(machine: Machine, size: int, stride: int, local_share: float, network_share: float) -> Span:
    """The link of a group; the shares are the parts of the nominal bandwidths that collectives reach."""
    local = machine.local.bytes_per_s * local_share
    if size * stride <= machine.domain:
        tables = machine.tables if machine.tables is not None and machine.tables.ranks == size > 1 else None
        return Span(size, local, machine.local.latency_s, True, size, tables, machine.local.ring_s)
    members = max(1, min(size, machine.domain // stride))
    network = machine.network.bytes_per_s * network_share * members
    return Span(size, min(local, network), machine.network.latency_s, False, members)


def gather_seconds(num_bytes: float, group: Span, calls: float = 1) -> float:
    """All-gather or reduce-scatter of ``num_bytes`` in total, in so many calls."""
    if group.size <= 1 or num_bytes <= 0:
        return 0.0
    measured = group.measured("all-gather", num_bytes / calls)
    return calls * measured if measured is not None else _moved_once(num_bytes, group) + calls * group.ring_s


def reduce_seconds(num_bytes: float, group: Span, calls: float = 1) -> float:
    """All-reduce of ``num_bytes`` in total, in so many calls."""
    if group.size <= 1 or num_bytes <= 0:
        return 0.0
    measured = group.measured("all-reduce", num_bytes / calls)
    return calls * measured if measured is not None else 2 * (_moved_once(num_bytes, group) + calls * group.tree_s)


def _moved_once(num_bytes: float, group: Span) -> float:
    return num_bytes * (group.size - 1) / group.size / group.bytes_per_s


def exchange_seconds(
    num_bytes: float, group: Span, machine: Machine, *, network_share: float, copies: float = 1.0
) -> float:
    """All-to-all in which each member sends ``num_bytes``, its own part included.

    ``copies`` below 1 is the part of the bytes that crosses domains when a token goes to each domain once.
    """
    n = group.size
    if n <= 1 or num_bytes <= 0:
        return 0.0
    measured = group.measured("all-to-all", num_bytes)
    if measured is not None:
        return measured
    latency = group.tree_s
    if group.local:
        return _moved_once(num_bytes, group) + latency
    outside = num_bytes * (n - group.per_domain) / n * copies / (machine.network.bytes_per_s * network_share)
    inside = num_bytes * (group.per_domain - 1) / n / machine.local.bytes_per_s
    return max(outside, inside) + latency
