"""Launcher `ray`: one agent per node of a Ray cluster, the ranks its subprocesses.

Measured three ways (TorchTrainer, one actor per rank, one agent per node), and the agent chosen: ranks are ordinary
processes with a main thread of their own, so signals, stacks and the entry point are those of every other launcher;
the agent imports no torch (a rank-per-actor design costs 620 MB and a torch import for each); and after a lost rank the
agents and their warm fork servers stay, so a restart on live nodes costs no import. TorchTrainer would bring a second
restarter, and runs training in a thread, where signal handlers cannot be installed.

Placement: one bundle a node, ``launch.nproc`` ranks whole. A node holds consecutive ranks, nodes sorted by their domains
(`topology`) and addresses, so the innermost axes of the mesh (tp, then cp) stay on a node and only the outer ones
(dp_replicate, pp) cross. With several nodes bundles are spread strictly; one node packs strictly.

Ray does not restart ranks here: the supervisor's next attempt replaces the agents that were lost, and only those. The
supervisor itself runs under an actor that Ray does restart (`driver`); a new one finds the agents by their names, and
the ranks never notice.
"""

import os
import platform
import time
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_train.config import Config, LaunchConfig, parse_config
from titan_train.launch.job import Attempt, Launcher
from titan_train.launch.node.agent import NodeJob
from titan_train.launch.place.ray.actor import NodeActor
from titan_train.launch.place.ray.calls import RayAgent
from titan_train.launch.place.ray.cluster import NAMESPACE, agent_prefix, connect, first_line, forwarded, node_versions
from titan_train.launch.place.ray.job import END_S, RayJob
from titan_train.launch.place.ray.nodes import RayNodes
from titan_train.launch.place.ray.topology import order
from titan_train.launch.rank.info import DeviceType
from titan_train.launch.validate import validate

_START_S = 600.0  # for an interpreter's start on a node: minutes where few cores read Ray from a cold disk
_ADOPT_S = 10.0  # for agents of a lost driver to answer
_PING_S = 1.0  # for agents to answer, where one of them may not
_CALLS = 8  # of an agent at a time: one is held open, others order, start and end


class RayLauncher(Launcher):
    """Starts ranks on the nodes of a Ray cluster."""

    def __init__(self, launch: LaunchConfig, per_node: int, outlives: Path | None = None) -> None:
        """Connect, or start a cluster here.

        Args:
            launch: Address, nodes, placement.
            per_node: Ranks on each node.
            outlives: The folder of a run whose ranks live on without this process, until another one adopts them.

        Raises:
            ValueError: Ray is not installed, does not answer, or is of another version.
        """
        self._launch = launch
        self._per_node = per_node
        self._ray = connect(launch, per_node * launch.nnodes)
        self.device: DeviceType = self._device()
        self._nodes = RayNodes(self._ray, launch.ray, self._bundle())
        self._start_s = max(_START_S, launch.ray.wait_s)
        self._agents: list[RayAgent] = []
        self._term = uuid.uuid4().hex
        self._prefix = agent_prefix(outlives) if outlives is not None else ""

    def adopt(self, run_dir: Path) -> tuple[Attempt, RayJob] | None:
        """The attempt that a driver before this one left running, with all its ranks; None if there is none.

        Agents of anything else are ended: a part of an attempt cannot go on.
        """
        handles = self._named_agents()
        if not handles:
            return None
        try:
            jobs: list[NodeJob | None] = self._ray.get(
                [handle.adopt.remote(self._term) for handle in handles], timeout=_ADOPT_S
            )
        except self._ray.exceptions.RayError:  # one of them went with the driver
            jobs = [None]
        found = sorted(
            ((job, handle) for job, handle in zip(jobs, handles, strict=False) if job is not None),
            key=lambda pair: pair[0].node,
        )
        whole = found and [job.node for job, _ in found] == list(range(found[0][0].world_size // self._per_node))
        if not whole or len({job.attempt for job, _ in found}) > 1:
            self._ray.wait(
                [handle.end.remote(self._term) for handle in handles], num_returns=len(handles), timeout=_ADOPT_S
            )
            self._kill(handles)
            return None
        job = found[0][0]
        self._agents = self._described([handle for _, handle in found], self._token(run_dir))
        attempt = Attempt(job.attempt, parse_config(tomllib.loads(job.config_toml)), run_dir, job.world_size)
        printed = self._ray.get(self._agents[0].handle.printed.remote(), timeout=_ADOPT_S)
        return attempt, self._watched(printed)

    def capacity(self) -> int:
        """Ranks on whole nodes: before the first attempt those that are large enough, later those held and those free."""
        if not self._agents:
            return min(self._nodes.large_enough(), self._launch.nnodes) * self._per_node
        held = self._living()
        more = self._nodes.spares([agent.node_id for agent in held], self._launch.nnodes - len(held))
        return (len(held) + more) * self._per_node

    def validate(self, config: Config, world_size: int) -> None:
        """See `titan_train.launch.job.Launcher`. In this process, which then imports torch."""
        validate(config, world_size)

    def start(self, attempt: Attempt) -> RayJob:
        """Start all ranks of an attempt on as many nodes as it needs."""
        nodes = attempt.world_size // self._per_node
        while True:
            self._hold(nodes, attempt.run_dir)
            try:
                self._start_ranks(attempt)
            except self._ray.exceptions.RayActorError:  # the first node was lost this instant: it alone was waited for
                self._agents[0].lost = True
            else:
                return self._watched()

    def close(self, exit_code: int = 1) -> None:
        """Give back the nodes and disconnect; a cluster started here ends."""
        self._kill([agent.handle for agent in self._agents])
        self._agents = []
        self._nodes.release()
        self._ray.shutdown()

    def _start_ranks(self, attempt: Attempt) -> None:
        port, first = attempt.config.launch.port, self._agents[0]
        store = self._ray.get(first.handle.listen.remote(port), timeout=self._start_s)
        if "error" in store:
            raise ValueError(
                f"launch.port={port} cannot be used on node {first.address}: {store['error']}. Free it, or set launch.port to 0."
            )
        here = replace(attempt, run_dir=attempt.run_dir.resolve())  # actors may be in other folders
        job = NodeJob.of(here, 0, self._per_node, self.device, store=store["address"])
        starting = [
            agent.handle.start.remote(replace(job, node=node), self._term) for node, agent in enumerate(self._agents)
        ]
        self._ray.wait(starting, num_returns=len(starting), timeout=self._start_s)  # a failure shows at the first look

    def _watched(self, printed: int = 0) -> RayJob:
        unreachable_s = self._launch.ray.unreachable_s
        return RayJob(
            self._ray, self._agents, self._per_node, term=self._term, printed=printed, unreachable_s=unreachable_s
        )

    def _living(self) -> list[RayAgent]:
        """The agents whose nodes are there, as far as anyone knows."""
        self._ping()
        for agent in self._agents:
            if agent.stuck:
                self._nodes.rule_out(agent.node_id)
            elif agent.lost:
                self._nodes.suspect(agent.node_id)
        alive = self._nodes.alive()
        return [agent for agent in self._agents if not agent.lost and agent.node_id in alive]

    def _ping(self) -> None:
        """Tell agents that their supervisor is there, which may wait several times in a row; those that have ended are lost."""
        calls = {agent.handle.ping.remote(self._term): agent for agent in self._agents if not agent.lost}
        ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=_PING_S) if calls else ([], [])
        for call in ready:
            try:
                self._ray.get(call)
            except self._ray.exceptions.ActorDiedError:
                calls[call].lost = True
            except self._ray.exceptions.RayError:  # it may answer the next one
                pass

    def _device(self) -> DeviceType:
        wanted = self._launch.device
        total = int(self._ray.cluster_resources().get("GPU", 0))
        if wanted == "cuda" and not total:
            raise ValueError(
                "launch.device='cuda', but no node of the Ray cluster has a GPU. Use 'cpu', or start its nodes with --num-gpus."
            )
        return "cuda" if wanted == "cuda" or (wanted == "auto" and total) else "cpu"

    def _bundle(self) -> dict[str, float]:
        bundle = {"CPU": self._launch.ray.cpus_per_rank * self._per_node}
        return bundle | ({"GPU": float(self._per_node)} if self.device == "cuda" else {})

    def _hold(self, nodes: int, run_dir: Path) -> None:
        """Have an agent on each of ``nodes`` nodes: those that live stay, with their warm fork servers."""
        held = self._living()
        keep = held[:nodes] if self._nodes.spread or len(held) == len(self._agents) == nodes else []
        self._kill([agent.handle for agent in self._agents if agent not in keep])
        self._agents = keep
        if len(keep) < nodes:
            self._agents = [*keep, *self._new_agents(nodes - len(keep), run_dir)]
        labels, topology = self._nodes.labels(), self._launch.ray.topology
        self._agents.sort(key=lambda a: order(topology, labels.get(a.node_id, {}), a.address, a.node_id))

    def _new_agents(self, count: int, run_dir: Path) -> list[RayAgent]:
        """Start agents on more nodes; a node that goes away meanwhile is replaced while there is time."""
        token = self._token(run_dir)
        deadline = time.monotonic() + self._launch.ray.wait_s
        while True:
            wait_s = max(1.0, deadline - time.monotonic())
            node_ids = self._nodes.reserve(count, [agent.node_id for agent in self._agents], wait_s)
            handles = [self._start_agent(node_id) for node_id in node_ids]
            try:
                return self._described(handles, token, refuse=True)
            except self._ray.exceptions.RayError as err:
                self._kill(handles)
                for node_id in node_ids:
                    self._nodes.suspect(node_id)
                if isinstance(err, self._ray.exceptions.GetTimeoutError):
                    raise ValueError(
                        f"an agent did not start on its node within {self._start_s:g} s. Look at the nodes' load and at Ray's "
                        f"logs there; to wait longer, set --ray.wait-s above {self._start_s:g}."
                    ) from err
                if time.monotonic() > deadline:
                    raise ValueError(f"an agent could not start on its node: {first_line(err)}") from err

    def _described(self, handles: list[Any], token: Path, *, refuse: bool = False) -> list[RayAgent]:
        """The actors with their nodes; with ``refuse``, those are ended if one of the nodes cannot run the job.

        Raises:
            ValueError: One cannot; the message names all problems.
        """
        facts = self._ray.get([h.describe.remote(str(token.resolve())) for h in handles], timeout=self._start_s)
        raylets = self._nodes.raylets()
        agents = [
            RayAgent(handle, fact["address"], fact["node_id"], raylets.get(fact["node_id"], ("", 0)))
            for handle, fact in zip(handles, facts, strict=True)
        ]
        found = [
            line
            for agent, fact in zip(agents, facts, strict=True)
            for line in problems(agent.name, fact["versions"], sees_run_folder=fact["sees"])
        ]
        if refuse and found:
            self._kill(handles)
            raise ValueError("the Ray cluster cannot run this job:\n  " + "\n  ".join(found))
        return agents

    def _token(self, run_dir: Path) -> Path:
        """A file that nodes with the same file system see."""
        token = run_dir / ".nodes"
        token.parent.mkdir(parents=True, exist_ok=True)
        token.write_text(platform.node(), encoding="utf-8")
        return token

    def _named_agents(self) -> list[Any]:
        named = self._ray.util.list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
        return [self._ray.get_actor(name, NAMESPACE) for name in names if name.startswith(self._prefix)]

    def _start_agent(self, node_id: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        bundle = self._bundle()
        options = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "max_restarts": 0,
            "max_concurrency": _CALLS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        if self._prefix:
            unique = uuid.uuid4().hex[:8]  # where placement packs, a node holds several
            options |= {"lifetime": "detached", "namespace": NAMESPACE, "name": f"{self._prefix}{node_id}/{unique}"}
        threads = max(1, int(self._launch.ray.cpus_per_rank))
        agent = self._ray.remote(NodeActor).options(**options)
        code = os.environ.get("PYTHONPATH", "")
        environ = forwarded(self._launch)
        # between two pings the supervisor reserves nodes and starts agents there, and asks no other agent meanwhile
        idle_s = max(self._launch.ray.wait_s + self._start_s, END_S) if self._prefix else None
        return agent.remote(str(Path.cwd()), environ, code, threads, idle_s=idle_s)

    def _kill(self, handles: Sequence[Any]) -> None:
        """End actors; their ranks end with them."""
        for handle in handles:
            self._ray.kill(handle)


def problems(node: str, theirs: Mapping[str, str], *, sees_run_folder: bool) -> list[str]:
    """What keeps a node from running the job: other versions than here, or another file system."""
    mine, none = node_versions(), "not installed"
    found = [
        f"{node} has {package} {theirs.get(package, none)}, this machine has {mine.get(package, none)}: install the same version"
        for package in sorted({*mine, *theirs})
        if theirs.get(package) != mine.get(package)
    ]
    if not sees_run_folder:
        found.append(f"{node} cannot see the run folder: set run.dir to a file system that all nodes share")
    return found
