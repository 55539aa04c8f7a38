"""Which nodes of a Ray cluster a job may have: asked for together, held one by one, replaced one by one.

Problem: a placement group lives and dies as a whole. Giving it back after the loss of one node throws away the warm fork
servers of all others; keeping it, Ray places the lost bundle again only when it believes in the loss (15 s measured, a
killed raylet), on a node of its own choice.

Idea: a placement group is only the question. It reserves the nodes together, so two jobs cannot each hold half of what
they need, and autoscalers see the demand; then it is given back and each node is held by its agent, placed on that node
by id. A lost node is asked for by a group of its own, whose label selector rules out the nodes held and those that do
not answer.
"""

import time
from collections.abc import Collection, Mapping
from typing import Any

from titan_train.config.launch import RayConfig
from titan_train.launch.place.ray.calls import answers, raylets
from titan_train.launch.place.ray.topology import selectors

_NODE_ID = "ray.io/node-id"
_FIRST_LOOK_S = 1.0  # Ray answers in about 40 ms if a node is free


class RayNodes:
    """The nodes of a cluster, as one job sees them."""

    def __init__(self, ray: Any, settings: RayConfig, bundle: dict[str, float]) -> None:
        """Look at a cluster.

        Args:
            ray: The module, connected.
            settings: Placement and patience.
            bundle: Resources needed on each node, by Ray's names.
        """
        self._ray = ray
        self._settings = settings
        self._bundle = bundle
        self._suspects: set[str] = set()
        self._ruled_out: set[str] = set()
        self._spares: dict[str, Any] = {}
        self._asked: Any = None

    @property
    def spread(self) -> bool:
        """Whether no two agents share a node, so that one alone can be replaced."""
        return self._settings.placement in ("auto", "strict_spread")

    def suspect(self, node_id: str) -> None:
        """An agent there was lost. Ray takes 15 s to believe that a node is gone: from now on, ask the node itself."""
        self._suspects.add(node_id)

    def rule_out(self, node_id: str) -> None:
        """A rank there cannot be killed: place nothing there any more."""
        self._ruled_out.add(node_id)

    def alive(self) -> dict[str, dict[str, float]]:
        """Resources of every node by its id. A node that comes back has another id."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        suspects = raylets([node for node in nodes if node["NodeID"] in self._suspects])
        gone = {node for node, answer in zip(suspects, answers(list(suspects.values())), strict=True) if not answer}
        return {node["NodeID"]: node["Resources"] for node in nodes if node["NodeID"] not in gone | self._ruled_out}

    def labels(self) -> dict[str, Mapping[str, str]]:
        """Labels of every node by its id."""
        return {node["NodeID"]: node.get("Labels") or {} for node in self._ray.nodes() if node["Alive"]}

    def raylets(self) -> dict[str, tuple[str, int]]:
        """Where each node's raylet listens, by node id."""
        return raylets([node for node in self._ray.nodes() if node["Alive"]])

    def large_enough(self) -> int:
        """Nodes that could hold a bundle if nobody else had anything on them."""
        return len(self._large())

    def _large(self) -> list[str]:
        nodes = self.alive().items()
        return [id for id, has in nodes if all(has.get(name, 0) >= amount for name, amount in self._bundle.items())]

    def spares(self, held: Collection[str], most: int) -> int:
        """Look for more nodes without waiting, and keep those found reserved until `reserve` takes them.

        Args:
            held: Ids of nodes that the job has.
            most: How many more it could use.

        Returns:
            How many are reserved now.
        """
        alive = self.alive()
        for node_id in [node for node in self._spares if node not in alive]:
            self._remove(self._spares.pop(node_id))
        while len(self._spares) < most:
            patience_s = 0.0
            if self._asked is None:
                self._asked = self._ask(1, "STRICT_PACK", [*held, *self._spares])
                patience_s = _FIRST_LOOK_S
            if not self._asked.wait(patience_s):
                break
            (node_id,) = self._placed(self._asked)
            self._spares[node_id] = self._asked
            self._asked = None
        return min(most, len(self._spares))

    def reserve(self, count: int, held: Collection[str], wait_s: float) -> list[str]:
        """Get ``count`` nodes, all or none, and let go of them at once for the agents to take.

        Args:
            count: Nodes needed.
            held: Ids of nodes that the job has.
            wait_s: Seconds to wait for them.

        Returns:
            Their ids; the same one several times where placement packs.

        Raises:
            ValueError: The cluster did not have them in time; the message says what it has.
        """
        alive = self.alive()
        found = [node for node in self._spares if node in alive][:count]
        self.release()
        missing = count - len(found)
        if missing:
            placement = self._settings.placement
            strategy = ("STRICT_PACK" if count == 1 else "STRICT_SPREAD") if placement == "auto" else placement.upper()
            found += self._near(missing, strategy, [*held, *found], wait_s)
            if len(found) < count:
                raise ValueError(self._what_is_missing(count, strategy))
        return found

    def _near(self, count: int, strategy: str, held: Collection[str], wait_s: float) -> list[str]:
        """Ask for nodes of one domain, then for less and less; only the last question waits."""
        labels = self.labels()
        taken = set(held) if self.spread else set[str]()
        candidates = [labels[node] for node in self._large() if node in labels and node not in taken]
        here = [labels[node] for node in held if node in labels]
        questions = selectors(self._settings.topology, candidates, count if self.spread else 1, here)
        deadline = time.monotonic() + wait_s
        for question in questions:
            group = self._ask(count, strategy, held, question)
            try:
                if group.wait(max(_FIRST_LOOK_S, deadline - time.monotonic()) if not question else _FIRST_LOOK_S):
                    return self._placed(group)
            finally:
                self._remove(group)
        return []

    def release(self) -> None:
        """Give back what is reserved."""
        for group in self._spares.values():
            self._remove(group)
        self._spares = {}
        if self._asked is not None:
            self._remove(self._asked)
            self._asked = None

    def _ask(self, count: int, strategy: str, held: Collection[str], near: Mapping[str, str] | None = None) -> Any:
        from ray.util.placement_group import placement_group

        alive = self.alive()
        ruled_out = {node for node in self._suspects if node not in alive} | self._ruled_out
        ruled_out |= set(held) if self.spread else set[str]()
        selector = {**(near or {}), **({_NODE_ID: f"!in({','.join(sorted(ruled_out))})"} if ruled_out else {})}
        return placement_group([self._bundle] * count, strategy=strategy, bundle_label_selector=[selector] * count)

    def _placed(self, group: Any) -> list[str]:
        from ray.util.placement_group import placement_group_table

        nodes = placement_group_table(group)["bundles_to_node_id"]
        return [nodes[index] for index in sorted(nodes)]

    def _remove(self, group: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)

    def _what_is_missing(self, nodes: int, strategy: str) -> str:
        bundle = ", ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
        head = (
            f"the Ray cluster cannot hold this job: it needs {nodes} node{'s' if nodes > 1 else ''} with {bundle} each "
            f"({strategy}), and did not get them in launch.ray.wait_s={self._settings.wait_s:g} s. It has:"
        )
        lines = [head]
        for node in self._ray.nodes():
            if node["Alive"]:
                has = ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in self._bundle)
                lines.append(f"  node {node['NodeManagerAddress']} ({node['NodeID'][:8]}): {has}")
        free = self._ray.available_resources()
        lines.append("  free in all: " + ", ".join(f"{free.get(name, 0):g} {name}" for name in self._bundle))
        lines.append("Lower launch.nnodes, launch.nproc or launch.ray.cpus_per_rank, or add nodes.")
        return "\n".join(lines)
