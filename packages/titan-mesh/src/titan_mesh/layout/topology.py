"""Which ranks share a node, and which share fast links.

Ranks fill nodes in order, as every launcher does it: node ``n`` holds ranks ``n * gpus_per_node`` and up. An NVLink
domain is a run of ranks that reach each other at NVLink speed: a node of 8 by default, 72 ranks on a GB200 NVL72
rack (18 nodes of 4), or 4 on an 8-GPU node whose two halves are joined by PCIe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from titan_mesh.layout.spec import check_count
from titan_mesh.nearest import either, nearest_divisors

Link = Literal["self", "nvlink", "node", "network"]
"""The slowest link inside a group: none, NVLink, within one node but not NVLink, or between nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """How ranks map to machines.

    Raises:
        ValueError: A number is not positive, or NVLink domains and nodes do not nest.
    """

    gpus_per_node: int = 8
    """Ranks on one machine."""
    nvlink_domain: int | None = None
    """Ranks that reach each other over NVLink; None means one node."""

    def __post_init__(self) -> None:
        check_count("gpus_per_node", self.gpus_per_node)
        if self.nvlink_domain is None:
            return
        check_count("nvlink_domain", self.nvlink_domain)
        node, domain = self.gpus_per_node, self.nvlink_domain
        if node % domain and domain % node:
            multiple = node * max(1, round(domain / node))
            valid = [f"nvlink_domain={d}" for d in sorted({*nearest_divisors(domain, node), multiple})]
            raise ValueError(
                f"nvlink_domain={domain} neither divides nor is a multiple of gpus_per_node={node}: a domain would "
                f"hold parts of nodes. Nearest valid: {either(valid)}."
            )

    @property
    def domain(self) -> int:
        """Ranks in one NVLink domain."""
        return self.gpus_per_node if self.nvlink_domain is None else self.nvlink_domain

    def node_of(self, rank: int) -> int:
        """The node that holds ``rank``."""
        return rank // self.gpus_per_node

    def nodes(self, world_size: int) -> int:
        """How many nodes ``world_size`` ranks take."""
        return -(-world_size // self.gpus_per_node)

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest link between any two of ``ranks`` (ascending)."""
        first, last = ranks[0], ranks[-1]
        if first == last:
            return "self"
        # Domains and nodes are runs of ranks, so the first and the last rank tell for all between them.
        if first // self.domain == last // self.domain:
            return "nvlink"
        return "node" if self.node_of(first) == self.node_of(last) else "network"
