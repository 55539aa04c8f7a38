"""What runs on a node of a Ray cluster: an actor without torch that forks ranks and answers questions about them."""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from titan_train.launch.job import RankExit, RankJob
from titan_train.launch.launchers.forked import ForkedRanks, ForkServer
from titan_train.launch.launchers.ray.cluster import versions
from titan_train.launch.rank.heartbeat import Beat
from titan_train.launch.rank.orders import Order


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What happened on a node since the last poll."""

    exits: list[RankExit]
    beats: dict[int, Beat]
    output: str
    """What rank 0 printed, if it is here."""


class NodeAgent:
    """The ranks of one node. One method runs at a time."""

    def __init__(self, folder: str, environ: dict[str, str], threads_per_rank: int) -> None:
        """Start the server that imports torch.

        Args:
            folder: The driver's working folder, entered where it exists here: a user's modules are found from it.
            environ: Environment variables the ranks shall have.
            threads_per_rank: Processor threads of each rank.
        """
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's own setting for this actor
        os.environ.update(environ)
        if Path(folder).is_dir():
            os.chdir(folder)
            sys.path.insert(0, folder)
        address = _own_address()
        interface = _interface_of(address)
        if interface:  # or gloo and NCCL take the first one that a name server knows
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        self._address = address
        self._server = ForkServer(threads_per_rank)
        self._ranks: ForkedRanks | None = None
        self._listener: socket.socket | None = None
        self._log: Path | None = None
        self._read = 0

    def describe(self, token: str) -> dict[str, object]:
        """Address, id and versions of this node, and whether it sees the driver's file ``token``."""
        import ray

        return {
            "address": self._address,
            "node_id": ray.get_runtime_context().get_node_id(),
            "versions": versions(),
            "sees": Path(token).is_file(),
        }

    def listen(self, port: int) -> dict[str, str]:
        """Bind the socket that rank 0 will serve the store on, before anyone is told of it."""
        try:
            listener = bind(self._address, port)
        except OSError as err:
            return {"error": err.strerror or str(err)}
        self._listener = listener
        return {"address": f"{self._address}:{listener.getsockname()[1]}"}

    def start(self, jobs: list[str]) -> None:
        """Start this node's ranks."""
        rank_jobs = [RankJob.loads(job) for job in jobs]
        if rank_jobs[0].ranks.rank == 0:
            self._log = Path(rank_jobs[0].run_dir, "logs", "rank-0.log")
            self._read = self._log.stat().st_size if self._log.exists() else 0
        self._ranks = ForkedRanks(self._server, rank_jobs, log_rank_0=True, listener=self._listener)
        self._listener = None

    def poll(self, timeout_s: float) -> NodeReport:
        """Wait up to ``timeout_s`` for a rank to end, and tell what is known."""
        if self._ranks is None:
            raise RuntimeError("this node's ranks were not started")
        exits = self._ranks.exits(timeout_s)
        return NodeReport(exits, self._ranks.beats(), self._new_output())

    def order(self, name: str) -> None:
        """Pass an order on."""
        if self._ranks is not None:
            self._ranks.order(Order[name])

    def end(self) -> None:
        """Kill this node's ranks."""
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None

    def _new_output(self) -> str:
        if self._log is None or not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        return new.decode("utf-8", errors="replace")


def bind(address: str, port: int) -> socket.socket:
    """Listen on this address alone; port 0 takes a free one.

    Raises:
        OSError: The port is taken.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


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
