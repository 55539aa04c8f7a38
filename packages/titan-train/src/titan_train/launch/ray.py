"""Launcher `ray`: one agent per node of a Ray cluster, the ranks its subprocesses.

Measured three ways (TorchTrainer, one actor per rank, one agent per node), and the agent chosen: ranks are ordinary
processes with a main thread of their own, so signals, stacks and the entry point are those of every other launcher;
the agent imports no torch (a rank-per-actor design costs 620 MB and a torch import for each); and after a lost rank the
agents and their warm fork servers stay, so a restart on live nodes costs no import. TorchTrainer would bring a second
restarter, and runs training in a thread, where signal handlers cannot be installed.

Placement: one bundle a node, ``launch.nproc`` ranks whole. A node holds consecutive ranks, nodes sorted by address, so
the innermost axes of the mesh (tp, then cp) stay on a node and only the outer ones (dp_replicate, pp) cross. With
several nodes bundles are spread strictly; one node packs strictly.

Ray does not restart anything here: the supervisor's next attempt replaces the agents that were lost, and only those.
"""

import importlib.metadata
import ipaddress
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_train.config import LaunchConfig, dump_config
from titan_train.launch.heartbeat import Beat
from titan_train.launch.job import Attempt, RankExit, RankJob
from titan_train.launch.orders import Order
from titan_train.launch.ranks import DeviceType, Ranks
from titan_train.launch.ray_nodes import RayNodes

_CONNECT_S = 5.0
_START_S = 600.0  # for an interpreter's start on a node: minutes where few cores read Ray from a cold disk
_END_S = 60.0  # for an agent to kill its ranks
_FORWARDED = ("OMP_", "NCCL_", "GLOO_", "TORCH_", "CUDA_DEVICE_MAX_CONNECTIONS")
_COMPARED = ("torch", "titan-train", "titan-fsdp", "titan-ckpt", "titan-mesh")


class RayLauncher:
    """Starts ranks on the nodes of a Ray cluster."""

    def __init__(self, launch: LaunchConfig, per_node: int) -> None:
        """Connect, or start a cluster here.

        Args:
            launch: Address, nodes, placement.
            per_node: Ranks on each node.

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

    def capacity(self) -> int:
        """Ranks on whole nodes: before the first attempt those that are large enough, later those held and those free."""
        if not self._agents:
            return min(self._nodes.large_enough(), self._launch.nnodes) * self._per_node
        held = self._living()
        more = self._nodes.spares([agent.node_id for agent in held], self._launch.nnodes - len(held))
        return (len(held) + more) * self._per_node

    def start(self, attempt: Attempt) -> "RayJob":
        """Start all ranks of an attempt on as many nodes as it needs."""
        nodes = attempt.world_size // self._per_node
        while True:
            self._hold(nodes, attempt.run_dir)
            try:
                return RayJob(self._ray, self._agents, attempt, self._per_node, self.device, self._start_s)
            except self._ray.exceptions.RayActorError:  # the first node was lost this instant: it alone was waited for
                self._agents[0].lost = True

    def close(self, exit_code: int = 1) -> None:
        """Give back the nodes and disconnect; a cluster started here ends."""
        self._give_back()
        self._ray.shutdown()

    def _living(self) -> list["RayAgent"]:
        """The agents whose nodes are there, as far as anyone knows."""
        for agent in self._agents:
            if agent.lost:
                self._nodes.suspect(agent.node_id)
        alive = self._nodes.alive()
        return [agent for agent in self._agents if agent.alive(alive)]

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
        for agent in self._agents:
            if agent not in keep:
                agent.kill()
        self._agents = keep
        if len(keep) < nodes:
            self._agents = [*keep, *self._new_agents(nodes - len(keep), run_dir)]
        self._agents.sort(key=lambda agent: (ipaddress.ip_address(agent.address).packed, agent.node_id))

    def _new_agents(self, count: int, run_dir: Path) -> list["RayAgent"]:
        """Start agents on more nodes; a node that goes away meanwhile is replaced while there is time."""
        token = run_dir / ".nodes"
        token.parent.mkdir(parents=True, exist_ok=True)
        token.write_text(platform.node(), encoding="utf-8")
        deadline = time.monotonic() + self._launch.ray.wait_s
        while True:
            wait_s = max(1.0, deadline - time.monotonic())
            node_ids = self._nodes.reserve(count, [agent.node_id for agent in self._agents], wait_s)
            handles = [self._start_agent(node_id) for node_id in node_ids]
            try:
                told = self._ray.get([h.describe.remote(str(token.resolve())) for h in handles], timeout=self._start_s)
                break
            except self._ray.exceptions.RayError as err:
                for handle, node_id in zip(handles, node_ids, strict=True):
                    self._nodes.suspect(node_id)
                    self._ray.kill(handle)
                if isinstance(err, self._ray.exceptions.GetTimeoutError):
                    raise ValueError(
                        f"an agent did not start on its node within {self._start_s:g} s. Look at the nodes' load and at Ray's "
                        f"logs there; to wait longer, set --ray.wait-s above {self._start_s:g}."
                    ) from err
                if time.monotonic() > deadline:
                    raise ValueError(f"an agent could not start on its node: {_first_line(err)}") from err
        agents = [RayAgent(self._ray, handle, **facts) for handle, facts in zip(handles, told, strict=True)]
        problems = [problem for agent in agents for problem in agent.problems()]
        if problems:
            for agent in agents:
                agent.kill()
            raise ValueError("the Ray cluster cannot run this job:\n  " + "\n  ".join(problems))
        return agents

    def _start_agent(self, node_id: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from titan_train.launch.ray_agent import NodeAgent

        bundle = self._bundle()
        options = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        threads = max(1, int(self._launch.ray.cpus_per_rank))
        return self._ray.remote(NodeAgent).options(**options).remote(str(Path.cwd()), self._forwarded(), threads)

    def _forwarded(self) -> dict[str, str]:
        return {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_FORWARDED) or name in self._launch.ray.env
        }

    def _give_back(self) -> None:
        for agent in self._agents:
            agent.kill()
        self._agents = []
        self._nodes.release()


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
                        Ranks(node * per_node + local, local, size, per_node, device, store["address"])).dumps()
                for local in range(per_node)
            ]  # fmt: skip
            starting.append(agent.handle.start.remote(jobs))
        ray.wait(starting, num_returns=len(starting), timeout=start_s)  # a failure shows at the first poll

    def exits(self, timeout_s: float) -> list[RankExit]:
        """See `titan_train.launch.job.Job`."""
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
        """See `titan_train.launch.job.Job`. As old as the last poll, a fraction of a second."""
        return {rank: beat for rank, beat in self._beats.items() if rank // self._per_node not in self._lost}

    def order(self, order: Order) -> None:
        """See `titan_train.launch.job.Job`."""
        for node, agent in enumerate(self._agents):
            if node not in self._lost:
                agent.handle.order.remote(order.name)

    def node_of(self, rank: int) -> str:
        """The node's address and the start of its id."""
        agent = self._agents[rank // self._per_node]
        return f"node {agent.address} {agent.node_id[:8]}"

    def end(self) -> None:
        """See `titan_train.launch.job.Job`."""
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
                theirs = self.versions.get(package, "not installed")
                found.append(f"{name} has {package} {theirs}, this machine {mine}: install the same")
        if not self.sees_run_folder:
            found.append(f"{name} does not see the run's folder: set run.dir to a file system that all nodes share")
        return found

    def alive(self, nodes: Mapping[str, object]) -> bool:
        """Whether the agent answered last time and its node is among those alive."""
        return not self.lost and self.node_id in nodes

    def kill(self) -> None:
        self._ray.kill(self.handle)


def connect(launch: LaunchConfig, world_size: int) -> Any:
    """Connect to ``launch.ray.address``, or start a cluster on this machine's loopback; return the module ``ray``.

    Raises:
        ValueError: Ray is not installed, nothing answers at the address, or its version differs.
    """
    address = launch.ray.address
    if not address:
        # Ray listens on the node's address, and takes loopback for it if told that there is no cluster to join.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray prints pages of its own state when a node dies; the supervisor says it in a line
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "Raylet is terminated|has been marked dead")
    try:
        import ray
    except ImportError:
        raise ValueError("--launcher ray needs Ray, which is not installed: pip install 'titan-train[ray]'.") from None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if not address:
        _start_here(ray, max(1, round(launch.ray.cpus_per_rank * world_size + 0.5)), options)
        return ray
    _check_reachable(address)
    try:
        ray.init(address=address, **options)
    except ConnectionError as err:
        raise ValueError(f"no Ray cluster at launch.ray.address={address!r}: {_first_line(err)}") from err
    except RuntimeError as err:
        raise ValueError(f"the Ray cluster at {address!r} cannot be used: {_first_line(err)}") from err
    return ray


def _start_here(ray: Any, cpus: int, options: dict[str, Any]) -> None:
    """Start a cluster of one node. Ray gives it 30 s, too short for a cold disk; the second time its files are read."""
    for last in (False, True):
        try:
            ray.init(
                address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=100 * 2**20, **options
            )
            return
        except Exception as err:  # Ray's own type for a node that does not start
            if last or "timed out during startup" not in str(err):
                raise ValueError(
                    f"Ray could not start a cluster on this machine: {_first_line(err)} Where it only needs longer, start one "
                    "with `ray start --head` and give its address: --ray.address auto."
                ) from err


def versions() -> dict[str, str]:
    """Versions that must be the same on every node."""
    found = {"python": platform.python_version()}
    for name in _COMPARED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _check_reachable(address: str) -> None:
    """Ray itself would try for half a minute, and not say so."""
    if address == "auto" or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"launch.ray.address={address!r} is not host:port, such as 'head:6379', nor 'auto'.")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as err:
        raise ValueError(
            f"nothing answers at launch.ray.address={address!r} ({err}). Start a head with `ray start --head`, or leave "
            "the address empty to start a cluster on this machine."
        ) from err


def _first_line(err: BaseException) -> str:
    return next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
