"""The actor around a node's agent on a Ray cluster: without torch, it reports what becomes of that node's ranks."""

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from titan_train.launch.job import RankExit
from titan_train.launch.node.agent import NodeAgent, NodeJob, NodeRanks
from titan_train.launch.place.ray.calls import RayAgent, Watch
from titan_train.launch.place.ray.cluster import node_versions
from titan_train.launch.place.ray.mailbox import Mailbox, News, NodeNews, alike, pack_beats
from titan_train.launch.rank.heartbeat import Beat
from titan_train.launch.rank.orders import Order

_BACKLOG = 1024
_LOOK_S = 0.1  # between looks at heartbeats; a rank's end wakes the agent at once
_PACE_S = 1.0  # between reports of mere progress
_ORPHAN_S = 180.0  # longer than Ray takes to start the driver on another node


class NodeActor:
    """The ranks of one node, and the reports of the nodes that it leads. Ray calls its methods from several threads."""

    def __init__(
        self, folder: str, environ: dict[str, str], code: str, threads_per_rank: int, *, idle_s: float | None
    ) -> None:
        """Start the server that imports torch.

        Args:
            folder: The driver's working folder, entered where it exists here.
            environ: Environment variables the ranks shall have.
            code: Folders that the driver imports from (PYTHONPATH), used where they exist here.
            threads_per_rank: Processor threads of each rank.
            idle_s: How long its driver may be silent between attempts, when it waits for ranks to end or for nodes, before this
                actor takes it for gone and ends. None: Ray ends this actor with its driver.
        """
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's own setting for this actor
        os.environ.update(environ)
        if Path(folder).is_dir():
            os.chdir(folder)
        folders = filter(None, code.split(os.pathsep))  # an empty one would be the working directory
        sys.path += [path for path in folders if path not in sys.path and Path(path).is_dir()]
        self._address = _own_address()
        if interface := _interface_of(self._address):  # or gloo and NCCL take the first one that a name server knows
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        self._agent = NodeAgent(threads_per_rank)
        self._running: _Running | None = None
        self._listener: socket.socket | None = None
        self._term = ""  # of the supervisor that this agent obeys
        self._heard = time.monotonic()
        if idle_s is not None:
            threading.Thread(target=self._end_with_the_driver, args=(idle_s,), name="orphan", daemon=True).start()

    def describe(self, token: str) -> dict[str, object]:
        """Address, id and versions of this node, and whether it sees the driver's file ``token``."""
        import ray

        return {
            "address": self._address,
            "node_id": ray.get_runtime_context().get_node_id(),
            "versions": node_versions(),
            "sees": Path(token).is_file(),
        }

    def listen(self, port: int) -> dict[str, str]:
        """Bind the socket that rank 0 will serve the store on, before anyone learns of it; port 0 takes a free one."""
        try:
            self._listener = socket.create_server((self._address, port), backlog=_BACKLOG)
        except OSError as err:
            return {"error": err.strerror or str(err)}
        return {"address": f"{self._address}:{self._listener.getsockname()[1]}"}

    def start(self, job: NodeJob, term: str) -> None:
        """Start this node's ranks."""
        if not self._obeys(term):
            raise RuntimeError("another supervisor has adopted this node")
        self._term = term
        self.end(term)
        self._heard = time.monotonic()
        self._running = _Running(self._agent, job, self._listener)
        self._listener = None

    def ping(self, term: str) -> None:
        """Learn that the supervisor is there, and waits."""
        if self._obeys(term):
            self._heard = time.monotonic()

    def adopt(self, term: str) -> NodeJob | None:
        """Obey the supervisor of this term alone: Ray may start one elsewhere while the one before it still lives.

        Returns:
            What runs here; None if nothing does.
        """
        self._term = term
        return None if self._running is None else self._running.job

    def printed(self) -> int:
        """Bytes that rank 0 has printed, if it is here."""
        return 0 if self._running is None else len(self._running.news(0, 0, 0.0).output)

    def lead(self, children: Mapping[int, RayAgent], unreachable_s: float) -> None:
        """Watch other nodes too, and report for them."""
        if self._running is not None:
            self._running.lead(children, unreachable_s)

    def news(self, after: int, output_from: int, timeout_s: float) -> News:
        """What changed on this node, and those it leads, since version ``after``; waits up to ``timeout_s`` for it.

        Args:
            after: The version of the answer before.
            output_from: Bytes of rank 0's output that are known; -1 asks for none.
            timeout_s: How long to wait.
        """
        self._heard = time.monotonic()
        if self._running is None:
            raise RuntimeError("this node's ranks were not started")
        return self._running.news(after, output_from, timeout_s)

    def order(self, name: str, term: str) -> None:
        """Pass an order on."""
        if self._running is not None and self._obeys(term):
            self._running.ranks.order(Order[name])

    def end(self, term: str) -> str:
        """Kill this node's ranks. Returns which of them do not end; empty if all do."""
        if not self._obeys(term):
            return ""
        running, self._running = self._running, None
        try:
            if running is not None:
                running.end()
        except RuntimeError as err:
            return str(err)
        return ""

    def _obeys(self, term: str) -> bool:
        return self._term in ("", term)

    def _end_with_the_driver(self, idle_s: float) -> None:
        """Without a driver for minutes, let the ranks save and stop, as they do when the launcher is gone; then go."""
        while time.monotonic() - self._heard < _ORPHAN_S + (idle_s if self._running is None else 0.0):
            time.sleep(_LOOK_S)
        os._exit(0)


class _Running:
    """The ranks of this node in one attempt, watched by a thread."""

    def __init__(self, agent: NodeAgent, job: NodeJob, listener: socket.socket | None) -> None:
        self.job = job
        self._log = Path(job.run_dir, "logs", "rank-0.log") if job.node == 0 else None
        self._log_start = self._log.stat().st_size if self._log is not None and self._log.exists() else 0
        self.ranks = NodeRanks(agent, job, log_rank_0=True, listener=listener)
        self._mailbox = Mailbox(_PACE_S)
        self._over = threading.Event()
        self._followed = threading.Lock()  # held while the board is read, so that it is not removed meanwhile
        threading.Thread(target=self._follow_ranks, name="ranks", daemon=True).start()

    def lead(self, children: Mapping[int, RayAgent], unreachable_s: float) -> None:
        threading.Thread(target=self._follow_nodes, args=(children, unreachable_s), name="nodes", daemon=True).start()

    def news(self, after: int, output_from: int, timeout_s: float) -> News:
        news = self._mailbox.take(after, timeout_s)
        return News(news.version, news.nodes, self._printed(output_from)) if output_from >= 0 else news

    def end(self) -> None:
        self._over.set()
        with self._followed:
            self.ranks.end()

    def _follow_ranks(self) -> None:
        known: dict[int, Beat] = {}
        exits: tuple[RankExit, ...] = ()
        while not self._over.is_set():
            with self._followed:
                if self._over.is_set():
                    return
                ended = self.ranks.exits(_LOOK_S)
                beats = self.ranks.beats()
            if ended or not alike(beats, known):
                exits, known = (*exits, *ended), beats
                self._mailbox.put(NodeNews(self.job.node, pack_beats(beats), exits))
            self._over.wait(0.0 if ended else _LOOK_S if len(exits) == self.job.per_node else 0.001)

    def _follow_nodes(self, children: Mapping[int, RayAgent], unreachable_s: float) -> None:
        import ray

        watch = Watch(ray, children, unreachable_s=unreachable_s)
        while not self._over.is_set():
            for news in watch.look(_LOOK_S):
                self._mailbox.put(news)

    def _printed(self, output_from: int) -> bytes:
        if self._log is None:
            return b""
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_start + output_from)
                return file.read()
        except OSError:  # not there yet, or its disk fails: what ranks print does not end a run
            return b""


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if the kernel does not list it."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return None
