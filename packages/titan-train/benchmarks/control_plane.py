"""What does it cost to watch 1,000 nodes, and how soon is a failure seen?

Question: which share of one core does the driver of a run on many Ray nodes take while nothing happens, and how many
seconds pass from a failure on one of them until the driver knows?

Method: a Ray cluster on this machine. A few actors stand for all nodes: they hold the mailboxes that the first agent of
each group would hold, and 8 ranks a node whose heartbeats change every second. The driver is the real one: `RayJob`
keeps a call open for each leader, `WatchedAttempt` judges all heartbeats. Its processor time (all threads, Ray's too) is
taken over --seconds. Then failures, one after the other: a rank is killed (reported by its agent through its leader), a
node's Ray is gone without a word (its leader is silent, its raylet refuses), a machine is gone without a word (its raylet's
address replies nothing: a socket whose queue is full), the process of several leaders is killed.

Output: one JSON object on the last line of stdout; with --out also OUT.json and OUT.md.

Limits: one machine, so no network is in the times, and the fake agents share its cores with the driver; that leaders
watch their nodes by the same code is tested, not measured here.

Example: python packages/titan-train/benchmarks/control_plane.py --out benchmarks/results/control_plane_cpu2_202611
"""

import argparse
import io
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")

from titan_train.config import Config
from titan_train.launch.job import Attempt, RankExit
from titan_train.launch.place.ray.calls import RayAgent, groups
from titan_train.launch.place.ray.job import RayJob
from titan_train.launch.place.ray.mailbox import Mailbox, NodeNews, pack_beats
from titan_train.launch.rank.heartbeat import Beat, Phase
from titan_train.launch.supervise.attempt import WatchedAttempt
from titan_train.launch.supervise.journal import Journal
from titan_train.launch.supervise.requests import Requests

PER_NODE = 8


class Racks:
    """Some groups of nodes: what the mailbox of each group's leader would hold. An actor."""

    def __init__(self, led: dict[int, list[int]]) -> None:
        self._boxes = {leader: Mailbox(1.0) for leader in led}
        self._led = led
        self._silent: set[int] = set()
        threading.Thread(target=self._progress, daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def news(self, leader: int, after: int, output_from: int, timeout_s: float):
        while leader in self._silent:
            time.sleep(1.0)
        return self._boxes[leader].take(after, timeout_s)

    def fail(self, node: int) -> float:
        """Report that the first rank of a node was killed; returns when."""
        leader = next(leader for leader, nodes in self._led.items() if node in nodes)
        self._boxes[leader].put(NodeNews(node, b"", (RankExit(node * PER_NODE, -9),)))
        return time.time()

    def fall_silent(self, leader: int) -> float:
        self._silent.add(leader)
        return time.time()

    def _progress(self) -> None:
        step = 0
        while True:
            step += 1
            began = time.monotonic()
            for leader, nodes in self._led.items():
                for node in nodes:
                    ranks = range(node * PER_NODE, (node + 1) * PER_NODE)
                    beats = {rank: Beat(rank, Phase.TRAIN, step, 0.1, 1.0, 0.3 + rank % 7 / 100, 0) for rank in ranks}
                    self._boxes[leader].put(NodeNews(node, pack_beats(beats)))
            time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))


class Raylet:
    """Where a node is asked whether it lives: a socket whose connections are accepted until it ends."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(0)
        self.address = self._socket.getsockname()
        self._ended = threading.Event()
        self._waiting: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def end(self, *, replies: bool) -> None:
        """Refuse connections, as a machine does whose raylet is gone; or leave them without a reply, as a dead machine."""
        self._ended.set()
        socket.create_connection(self.address).close()  # wakes the thread
        time.sleep(0.1)
        if replies:
            self._socket.close()
            return
        for _ in range(3):
            self._waiting.append(socket.socket())
            self._waiting[-1].setblocking(False)
            self._waiting[-1].connect_ex(self.address)

    def _accept(self) -> None:
        while not self._ended.is_set():
            self._socket.accept()[0].close()


class Handle:
    """Stands for the handle of one agent: calls go to the actor of its rack."""

    def __init__(self, actor, node: int) -> None:
        self._actor, self._node = actor, node

    @property
    def news(self):
        return Call(lambda *words: self._actor.news.remote(self._node, *words))

    lead = property(lambda self: Call(lambda *_: None))


class Call:
    def __init__(self, call) -> None:
        self.remote = call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--actors", type=int, default=4, help="processes that stand for the nodes")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--failures", type=int, default=10, help="of each kind but the last")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        result = measure(ray, arguments)
    finally:
        ray.shutdown()
    if arguments.out is not None:
        arguments.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(as_text(result))
    print(json.dumps(result))


def measure(ray, arguments: argparse.Namespace) -> dict:
    made = groups(arguments.nodes)
    actors = []
    of_node: dict[int, object] = {}
    for number in range(arguments.actors):
        led = {group[0]: list(group) for group in made[number :: arguments.actors]}
        actor = ray.remote(Racks).options(num_cpus=0, max_concurrency=len(led) + 4).remote(led)
        actors.append((actor, led))
        of_node |= {node: actor for nodes in led.values() for node in nodes}
    pids = [ray.get(actor.pid.remote()) for actor, _ in actors]
    leaders = [group[0] for group in made if group[0] in actors[0][1]][: arguments.failures]
    without_power = [group[0] for group in made if group[0] in actors[1][1]][: arguments.failures]
    alive = Raylet()
    raylets = {node: Raylet() for node in (*leaders, *without_power)}
    agents = [
        RayAgent(
            Handle(of_node[node], node),
            f"10.0.{node // 250}.{node % 250}",
            f"{node:08d}",
            raylets.get(node, alive).address,
        )
        for node in range(arguments.nodes)
    ]
    job = RayJob(ray, agents, PER_NODE)
    steady = watch_quietly(job, arguments)
    killed = [failure(job, lambda node=node: ray.get(of_node[node].fail.remote(node)))
              for node in range(5, arguments.nodes, arguments.nodes // arguments.failures)]  # fmt: skip

    def lose(node: int) -> float:
        raylets[node].end(replies=node in leaders)
        return ray.get(of_node[node].fall_silent.remote(node))

    silent = [failure(job, lambda node=node: lose(node)) for node in leaders]
    dark = [failure(job, lambda node=node: lose(node)) for node in without_power]

    def kill() -> float:
        os.kill(pids[-1], signal.SIGKILL)
        return time.time()

    broken = [failure(job, kill)]
    return {
        "benchmark": "control_plane",
        "nodes": arguments.nodes,
        "ranks": arguments.nodes * PER_NODE,
        "open_calls": len(made),
        **steady,
        "seen_s": {
            "a rank is killed": spread(killed),
            "a node's Ray is gone without a word": spread(silent),
            "a machine is gone: nothing comes back": spread(dark),
            "the process of leaders is killed": spread(broken),
        },
        "load": round(os.getloadavg()[0], 1),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "ray": version("ray"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        ).stdout.strip(),
    }


def watch_quietly(job: RayJob, arguments: argparse.Namespace) -> dict:
    """The driver's processor time while every rank makes a step a second."""
    requests, told = Requests(), io.StringIO()
    run_dir = Path(tempfile.mkdtemp(prefix="control-plane-"))
    attempt = Attempt(0, Config(), run_dir, arguments.nodes * PER_NODE)
    watched = WatchedAttempt(
        attempt, job, requests=requests, journal=Journal(run_dir / "a", told), lost_at=None, can_grow=lambda: False
    )
    while len(job.beats()) < attempt.world_size:
        job.exits(0.1)
    shares: list[float] = []

    def sample() -> None:
        for _ in range(5):
            cpu, wall = time.process_time(), time.monotonic()
            time.sleep(arguments.seconds / 5)
            shares.append((time.process_time() - cpu) / (time.monotonic() - wall))
        requests.stops, requests._interrupts = 2, 2  # a second Ctrl-C ends the watch

    threading.Thread(target=sample, daemon=True).start()
    outcome = watched.watch()
    assert outcome.to_step > 3, told.getvalue()
    oldest = max(beat.age_s for beat in job.beats().values())
    return {
        "driver_core_share": round(statistics.median(shares), 4),
        "driver_core_share_worst": round(max(shares), 4),
        "oldest_heartbeat_s": round(oldest, 2),
    }


def failure(job: RayJob, strike) -> float:
    """Seconds from a failure until the driver has it."""
    job.exits(0.2)
    struck: list[float] = []
    thread = threading.Thread(target=lambda: struck.append(strike()))
    thread.start()
    while not job.exits(0.1):
        pass
    seen = time.time()
    thread.join()
    return seen - struck[0]


def spread(times: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 3), "worst": round(max(times), 3), "count": len(times)}


def as_text(result: dict) -> str:
    rows = "\n".join(
        f"| {kind} | {t['count']} | {t['median']} s | {t['worst']} s |" for kind, t in result["seen_s"].items()
    )
    return (
        f"# Watching {result['nodes']} nodes\n\n{result['nodes']} fake Ray nodes of {PER_NODE} ranks, a step a second; "
        f"{result['cpus']} cores, load {result['load']}, Ray {result['ray']}, commit {result['commit']}.\n\n"
        f"The driver holds {result['open_calls']} calls open and takes {100 * result['driver_core_share']:.1f} % of a core "
        f"(median of five spans; worst {100 * result['driver_core_share_worst']:.1f} %). The oldest heartbeat it knew was "
        f"{result['oldest_heartbeat_s']} s old.\n\n| failure | times | seen after: median | worst |\n| --- | --- | --- | --- |\n"
        f"{rows}\n"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
