"""The ranks of one attempt on a Ray cluster, and the driver's view of each node's agent."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from titan_train.launch.job import Attempt, RankExit
from titan_train.launch.node.agent import NodeJob
from titan_train.launch.place.ray.calls import Child, Watch, groups
from titan_train.launch.place.ray.cluster import versions
from titan_train.launch.place.ray.mailbox import NodeNews, unpack_beats
from titan_train.launch.rank.heartbeat import Beat
from titan_train.launch.rank.info import DeviceType
from titan_train.launch.rank.orders import Order

_END_S = 60.0  # for an agent to kill its ranks


class RayJob:
    """The ranks of one attempt."""

    def __init__(
        self,
        ray: Any,
        agents: Sequence["RayAgent"],
        per_node: int,
        *,
        term: str = "",
        printed: int = 0,
        unreachable_s: float = 0.0,
    ) -> None:
        """Watch ranks that run already; `started` starts them.

        Args:
            ray: The module, connected.
            agents: One per node, in the order of their ranks.
            per_node: Ranks on each node.
            term: The supervisor's, as in `NodeActor.adopt`.
            printed: Bytes of rank 0's output that are not to be shown again.
            unreachable_s: As in `titan_train.config.launch.RayConfig`.
        """
        self._ray = ray
        self._agents = agents
        self._per_node = per_node
        self._term = term
        self._known: dict[int, tuple[float, NodeNews]] = {}  # node -> when it was received, what
        self._told: set[int] = set()  # ranks whose end was reported
        children = [Child(node, agent.handle, agent.name, agent.raylet) for node, agent in enumerate(agents)]
        first = [group[0] for group in groups(len(agents))]
        for group in groups(len(agents)):
            if len(group) > 1:
                agents[group[0]].handle.lead.remote([children[node] for node in group[1:]], unreachable_s)
        self._watch = Watch(ray, [children[node] for node in first], printed, unreachable_s)

    @classmethod
    def started(
        cls,
        ray: Any,
        agents: Sequence["RayAgent"],
        attempt: Attempt,
        per_node: int,
        device: DeviceType,
        start_s: float,
        term: str = "",
    ) -> "RayJob":
        """Start the ranks of an attempt.

        Raises:
            ValueError: The port that they would meet at is taken.
        """
        launch = attempt.config.launch
        store = ray.get(agents[0].handle.listen.remote(launch.port), timeout=start_s)
        if "error" in store:
            raise ValueError(f"launch.port={launch.port} cannot be used on node {agents[0].address}: {store['error']}. "
                             "Free it, or set launch.port to 0.")  # fmt: skip
        here = dataclasses.replace(attempt, run_dir=attempt.run_dir.resolve())  # nodes may be in other folders
        job = NodeJob.of(here, 0, per_node, device, store=store["address"])
        starting = [
            agent.handle.start.remote(dataclasses.replace(job, node=node), term) for node, agent in enumerate(agents)
        ]
        ray.wait(starting, num_returns=len(starting), timeout=start_s)  # a failure shows at the first look
        return cls(ray, agents, per_node, term=term, unreachable_s=launch.ray.unreachable_s)

    def exits(self, timeout_s: float) -> list[RankExit]:
        """See `titan_train.launch.job.RunningJob`."""
        deadline = time.monotonic() + timeout_s
        while True:
            found: list[RankExit] = []
            for news in self._watch.look(max(0.0, deadline - time.monotonic())):
                found += self._take(news)
            if output := self._watch.output:
                whole = output.rpartition(b"\n")[0] + b"\n" if b"\n" in output else b""
                self._watch.output = output[len(whole) :]
                print(whole.decode("utf-8", errors="replace"), end="", flush=True)
            if found or time.monotonic() >= deadline:
                return found

    def beats(self) -> dict[int, Beat]:
        """See `titan_train.launch.job.RunningJob`. Progress is at most two seconds old, and its age is known."""
        now = time.monotonic()
        found: dict[int, Beat] = {}
        for node, (received, news) in self._known.items():
            if not self._agents[node].lost:
                found.update(unpack_beats(news.beats, news.age_s + now - received))
        return found

    def order(self, order: Order) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        for agent in self._agents:
            if not agent.lost:
                agent.handle.order.remote(order.name, self._term)

    def node_of(self, rank: int) -> str:
        """The node's address and the start of its id."""
        agent = self._agents[rank // self._per_node]
        return f"node {agent.address} {agent.node_id[:8]}"

    def end(self) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        calls = [agent.handle.end.remote(self._term) for agent in self._agents if not agent.lost]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=_END_S)

    def _take(self, news: NodeNews) -> list[RankExit]:
        """Keep the news of a node; its ranks that have ended since the last."""
        exits = news.exits
        if news.lost:
            self._agents[news.node].lost = True
            ranks = range(news.node * self._per_node, (news.node + 1) * self._per_node)
            exits = tuple(RankExit(rank, None, news.lost) for rank in ranks)
        else:
            self._known[news.node] = (time.monotonic(), news)
        fresh = [exit for exit in exits if exit.rank not in self._told]
        self._told |= {exit.rank for exit in fresh}
        return fresh


class RayAgent:
    """The driver's view of one node's agent."""

    def __init__(
        self,
        ray: Any,
        handle: Any,
        *,
        address: str,
        node_id: str,
        versions: dict[str, str],
        sees: bool,
        raylet: tuple[str, int] = ("", 0),
    ) -> None:
        self._ray = ray
        self.handle = handle
        self.address = address
        self.node_id = node_id
        self.versions = versions
        self.sees_run_folder = sees
        self.raylet = raylet
        self.lost = False

    @property
    def name(self) -> str:
        """For messages: the node's address and the start of its id."""
        return f"node {self.address} ({self.node_id[:8]})"

    def problems(self) -> list[str]:
        """What keeps this node from running the job."""
        found: list[str] = []
        for package, mine in versions().items():
            if self.versions.get(package) != mine:
                installed = self.versions.get(package, "not installed")
                found.append(
                    f"{self.name} has {package} {installed}, this machine has {mine}: install the same version"
                )
        if not self.sees_run_folder:
            found.append(f"{self.name} cannot see the run folder: set run.dir to a file system that all nodes share")
        return found

    def alive(self, nodes: Mapping[str, object]) -> bool:
        """Whether the agent answered last time and its node is among those alive."""
        return not self.lost and self.node_id in nodes

    def kill(self) -> None:
        """End the actor; its ranks end with it."""
        self._ray.kill(self.handle)
