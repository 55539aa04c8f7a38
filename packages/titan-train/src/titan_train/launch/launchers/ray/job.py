"""The ranks of one attempt on a Ray cluster, and the driver's view of each node's agent."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from titan_train.config import dump_config
from titan_train.launch.job import Attempt, RankExit, RankJob
from titan_train.launch.launchers.ray.cluster import versions
from titan_train.launch.rank.heartbeat import Beat
from titan_train.launch.rank.info import DeviceType, RankInfo
from titan_train.launch.rank.orders import Order

_END_S = 60.0  # for an agent to kill its ranks


class RayJob:
    """The ranks of one attempt."""

    def __init__(
        self,
        ray: Any,
        agents: Sequence["RayAgent"],
        attempt: Attempt,
        per_node: int,
        device: DeviceType,
        start_s: float,
    ) -> None:
        self._ray = ray
        self._agents = agents
        self._per_node = per_node
        self._lost: set[int] = set()
        self._beats: dict[int, Beat] = {}
        self._polls: dict[Any, int] = {}
        launch, size = attempt.config.launch, attempt.world_size
        store = ray.get(agents[0].handle.listen.remote(launch.port), timeout=start_s)
        if "error" in store:
            raise ValueError(f"launch.port={launch.port} cannot be used on node {agents[0].address}: {store['error']}. "
                             "Free it, or set launch.port to 0.")  # fmt: skip
        text, run_dir = dump_config(attempt.config), str(attempt.run_dir.resolve())
        starting: list[Any] = []
        for node, agent in enumerate(agents):
            jobs = [
                RankJob(text, run_dir, "", attempt.number,
                        RankInfo(node * per_node + local, local, size, per_node, device, store["address"])).dumps()
                for local in range(per_node)
            ]  # fmt: skip
            starting.append(agent.handle.start.remote(jobs))
        ray.wait(starting, num_returns=len(starting), timeout=start_s)  # a failure shows at the first poll

    def exits(self, timeout_s: float) -> list[RankExit]:
        """See `titan_train.launch.job.RunningJob`."""
        deadline = time.monotonic() + timeout_s
        found: list[RankExit] = []
        while not found:
            asked = set(self._polls.values())
            for node, agent in enumerate(self._agents):
                if node not in self._lost and node not in asked:
                    self._polls[agent.handle.poll.remote(timeout_s)] = node
            left_s = deadline - time.monotonic()
            if not self._polls or left_s <= 0:
                break
            ready, _ = self._ray.wait(list(self._polls), num_returns=1, timeout=left_s)
            for reference in ready:
                found += self._take(self._polls.pop(reference), reference)
        return found

    def beats(self) -> dict[int, Beat]:
        """See `titan_train.launch.job.RunningJob`. As old as the last poll, a fraction of a second."""
        return {rank: beat for rank, beat in self._beats.items() if rank // self._per_node not in self._lost}

    def order(self, order: Order) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        for node, agent in enumerate(self._agents):
            if node not in self._lost:
                agent.handle.order.remote(order.name)

    def node_of(self, rank: int) -> str:
        """The node's address and the start of its id."""
        agent = self._agents[rank // self._per_node]
        return f"node {agent.address} {agent.node_id[:8]}"

    def end(self) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        calls = [agent.handle.end.remote() for node, agent in enumerate(self._agents) if node not in self._lost]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=_END_S)
        self._polls = {}

    def _take(self, node: int, reference: Any) -> list[RankExit]:
        agent = self._agents[node]
        try:
            report = self._ray.get(reference)
        except self._ray.exceptions.RayError as err:
            self._lost.add(node)
            agent.lost = True
            note = f"node {agent.address} ({agent.node_id[:8]}) was lost: {type(err).__name__}"
            ranks = range(node * self._per_node, (node + 1) * self._per_node)
            return [RankExit(rank, None, note) for rank in ranks]
        self._beats.update(report.beats)
        if report.output:
            print(report.output, end="", flush=True)
        return report.exits


class RayAgent:
    """The driver's view of one node's agent."""

    def __init__(
        self, ray: Any, handle: Any, *, address: str, node_id: str, versions: dict[str, str], sees: bool
    ) -> None:
        self._ray = ray
        self.handle = handle
        self.address = address
        self.node_id = node_id
        self.versions = versions
        self.sees_run_folder = sees
        self.lost = False

    def problems(self) -> list[str]:
        """What keeps this node from running the job."""
        found: list[str] = []
        name = f"node {self.address} ({self.node_id[:8]})"
        for package, mine in versions().items():
            if self.versions.get(package) != mine:
                installed = self.versions.get(package, "not installed")
                found.append(f"{name} has {package} {installed}, this machine has {mine}: install the same version")
        if not self.sees_run_folder:
            found.append(f"{name} cannot see the run folder: set run.dir to a file system that all nodes share")
        return found

    def alive(self, nodes: Mapping[str, object]) -> bool:
        """Whether the agent answered last time and its node is among those alive."""
        return not self.lost and self.node_id in nodes

    def kill(self) -> None:
        self._ray.kill(self.handle)
