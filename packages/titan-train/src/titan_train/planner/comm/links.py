"""Seconds of one collective: latency by a tree, bandwidth by a ring, on the slowest link that the group spans.

A group is described by its size and by the stride between neighbours in rank order. Groups that lie inside one domain
use the local link. Across domains the members that share a domain add up their network links, so that a group of
stride 1 over domains of 8 drives eight of them.
"""

import math
from dataclasses import dataclass

from titan_train.planner.hardware.machine import Machine


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


def span(machine: Machine, size: int, stride: int, *, local_share: float, network_share: float) -> Span:
    """The link of a group; the shares are the parts of the nominal bandwidths that collectives reach."""
    local = machine.local.bytes_per_s * local_share
    if size * stride <= machine.domain:
        return Span(size, local, machine.local.latency_s, True, size)
    members = max(1, min(size, machine.domain // stride))
    network = machine.network.bytes_per_s * network_share * members
    return Span(size, min(local, network), machine.network.latency_s, False, members)


def gather_seconds(num_bytes: float, group: Span) -> float:
    """All-gather or reduce-scatter of ``num_bytes`` in total."""
    if group.size <= 1 or num_bytes <= 0:
        return 0.0
    n = group.size
    return num_bytes * (n - 1) / n / group.bytes_per_s + group.latency_s * (math.log2(n) + 1)


def reduce_seconds(num_bytes: float, group: Span) -> float:
    """All-reduce."""
    return 2 * gather_seconds(num_bytes, group)


def exchange_seconds(
    num_bytes: float, group: Span, machine: Machine, *, network_share: float, copies: float = 1.0
) -> float:
    """All-to-all in which each member sends ``num_bytes``, its own part included.

    ``copies`` below 1 is the part of the bytes that crosses domains when a token goes to each domain once.
    """
    n = group.size
    if n <= 1 or num_bytes <= 0:
        return 0.0
    latency = group.latency_s * (math.log2(n) + 1)
    if group.local:
        return num_bytes * (n - 1) / n / group.bytes_per_s + latency
    outside = num_bytes * (n - group.per_domain) / n * copies / (machine.network.bytes_per_s * network_share)
    inside = num_bytes * (group.per_domain - 1) / n / machine.local.bytes_per_s
    return max(outside, inside) + latency
