"""Clusters of `ray start --head` and `ray start --address` on loopback, in a network namespace of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from isolated import Isolated, can_isolate, wait_for
from ray_nodes import PATIENT, short_folder

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="titan-train[ray] is not installed"),
    pytest.mark.skipif(not can_isolate(), reason="needs the right to make network and process namespaces"),
]
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--disable-usage-stats"]
SMALL = ["--object-store-memory", "80000000"]
ADDRESS = "127.0.0.1:6379"


class Cluster:
    """Nodes of one machine. The head holds no ranks unless it is given processors."""

    def __init__(self, namespace, folder, files, head_cpus=0):
        self.namespace, self.folder = namespace, folder
        # only for clusters of one Python process, which another test may have set: `ray start` adds no node with it
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
        self.environ = inherited | PATIENT | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        head = ("--head", "--port", "6379", "--include-dashboard=false", "--num-cpus", head_cpus)
        self.start(*head, "--temp-dir", files)

    def start(self, *words):
        done = self.namespace.run([*RAY, *SMALL, *words], self.folder, env=self.environ, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr

    def add_node(self, rack="r0"):
        """Another node; its raylet is the newest one."""
        before = self.raylets()
        self.start("--address", ADDRESS, "--num-cpus", 1, "--labels", f"rack={rack}")
        return next(pid for pid in self.raylets() if pid not in before)

    def raylets(self):
        return self.namespace.pids("/raylet/raylet ")

    def command(self, job, name, *words, nodes):
        ray = ("--launcher", "ray", "--ray.address", ADDRESS, "--launch.nnodes", str(nodes))
        return self.namespace.command(job.command(name, *ray, *words), job.folder)

    def open(self, job, name, *words, nodes=2):
        command = self.command(job, name, "--launch.nproc", "1", *words, nodes=nodes)
        with (job.folder / f"{name}.told").open("a") as told:
            return subprocess.Popen(command, stdout=told, stderr=told, env=self.environ)

    def lose_a_node(self):
        """SIGKILL to the raylet of a node that holds ranks; everything of Ray there ends with it."""
        agent = self.namespace.pids("ray::NodeActor")[-1]
        environ = Path(f"/proc/{agent}/environ").read_bytes().split(b"\0")
        inside = next(word.partition(b"=")[2] for word in environ if word.startswith(b"RAY_RAYLET_PID="))
        (raylet,) = [pid for pid in self.raylets() if number_inside(pid) == int(inside)]
        os.kill(raylet, signal.SIGKILL)

    def stop(self):
        """Let whatever still runs save and stop, so that the next test has the nodes."""
        deadline = time.monotonic() + 300
        while (supervisors := self.namespace.pids("titan_train run --kept")) and time.monotonic() < deadline:
            for pid in supervisors:
                os.kill(pid, signal.SIGTERM)
            time.sleep(2.0)


def told(job, name):
    return (job.folder / f"{name}.told").read_text()


@pytest.fixture(scope="module")
def nodes(job):
    with short_folder() as files, Isolated() as namespace:
        cluster = Cluster(namespace, job.folder, files)
        for rack in ("r1", "r2", "r2"):
            cluster.add_node(rack)
        yield cluster


@pytest.fixture
def cluster(nodes):
    yield nodes
    nodes.stop()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_on_a_cluster_has_the_losses_of_local_ranks_though_its_supervisor_is_killed(job, undisturbed):
    with short_folder() as files, Isolated() as namespace:
        cluster = Cluster(namespace, job.folder, files, head_cpus=2)
        slow = ("--launch.faults", "slow rank=0 factor=12 step=5", "--launch.straggler-factor", "0")
        words = ("--launch.nproc", "2", *slow)
        with subprocess.Popen(
            cluster.command(job, "kept", *words, nodes=1),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=cluster.environ,
        ) as command:
            seen = ""
            for line in command.stdout:
                seen += line
                if line.startswith("step=5/"):
                    (supervisor,) = namespace.pids("titan_train run --kept")
                    os.kill(supervisor, signal.SIGKILL)
    assert command.returncode == 0, seen
    assert "adopted  attempt 0: its 2 ranks went on without a supervisor" in seen
    assert "lost     " not in seen
    assert job.losses("kept") == undisturbed
    assert [attempt["end"] for attempt in job.attempts("kept")] == ["finished"]
    assert json.loads((job.folder / "runs/kept/run.json").read_text())["attempts"][-1]["status"] == "finished"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_and_the_driver_s_actor_may_be_killed_and_the_run_goes_on(job, cluster):
    name, words = "window", ("--train.steps", "150")
    command = cluster.open(job, name, *words)
    wait_for(lambda: "step=5/" in told(job, name))
    command.kill()
    command.wait()
    (actor,) = cluster.namespace.pids("ray::Driver")
    os.kill(actor, signal.SIGKILL)
    again = cluster.open(job, name, *words)  # the same command watches the same run
    assert again.wait(timeout=900) == 0
    text = told(job, name)
    assert "adopted  attempt 0" in text, text
    assert sorted(job.losses(name)) == list(range(1, 151))
    assert len(job.attempts(name)) == 1
    other = cluster.open(job, name, "--train.steps", "9")
    assert other.wait(timeout=900) == 0
    assert "is complete" in told(job, name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_lost_node_a_preempted_one_and_a_killed_rank_end_in_the_same_losses(job, cluster):
    name, run = "nodes", job.folder / "runs" / "nodes"
    longer = ("--train.steps", "600", "--checkpoint.every", "20")
    code, said = job.supervise("undisturbed-600", *longer)
    assert code == 0, said
    faults = ("--launch.faults", "kill rank=1 step=3", "--launch.straggler-factor", "0")
    command = cluster.open(job, name, *longer, *faults, "--ray.topology", "rack")
    wait_for(lambda: "step=5/" in told(job, name))
    # preempted: the batch system sends SIGTERM to a rank; it saves, and all ranks start again
    os.kill(ranks_of(cluster, run)[0], signal.SIGTERM)
    wait_for(lambda: "a rank received SIGTERM from outside" in told(job, name))
    wait_for(lambda: told(job, name).count("resumed  step") == 2)
    cluster.lose_a_node()
    assert command.wait(timeout=900) == 0, told(job, name)
    assert " was lost: " in told(job, name)
    assert job.losses(name) == job.losses("undisturbed-600")
    assert len(job.attempts(name)) == 4


def number_inside(pid):
    """A process's number in its own namespace."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("NSpid:")).split()[-1])


def ranks_of(cluster, run):
    """Training ranks inside the namespace: the processes that have the run's log open."""
    found = []
    for pid in cluster.namespace.pids("multiprocessing.forkserver"):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if str(file.readlink()).startswith(str(run / "logs")):
                found.append(pid)
                break
    return found
