"""A Ray cluster of two nodes on this machine, Ray's own way to test several nodes."""

import os
import re
import signal
import socket
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray_nodes import SMALL, ray_cluster
from titan_train.config import Config, LaunchConfig
from titan_train.config.launch import RayConfig
from titan_train.launch.job import Attempt
from titan_train.launch.place.ray import cluster as cluster_module
from titan_train.launch.place.ray import launcher as ray
from titan_train.launch.place.ray.actor import NodeActor
from titan_train.launch.place.ray.cluster import connect, node_versions
from titan_train.launch.place.ray.launcher import RayLauncher, problems
from titan_train.launch.place.ray.nodes import RayNodes

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="titan-train[ray] is not installed")
TWO_NODES = ("--launcher", "ray", "--launch.nproc", "1", "--launch.nnodes", "2")


@pytest.fixture(scope="module")
def cluster(job):
    with ray_cluster(head_cpus=0, nodes=2) as nodes:
        yield nodes


def until(run, beginning):
    """The lines of a run's output up to the first that begins so, a pattern."""
    lines = []
    for line in run.stdout:
        lines.append(line)
        if re.match(beginning, line):
            return lines
    raise AssertionError(f"the run ended without {beginning!r}:\n{''.join(lines)}")


@pytest.mark.slow  # starting three Ray nodes takes seconds, or minutes where nothing of Ray was compiled yet
@pytest.mark.timeout(400)
def test_two_ray_nodes_give_the_losses_of_local_ranks_and_survive_a_killed_rank(
    job, undisturbed, cluster, listening_beyond_loopback
):
    with listening_beyond_loopback() as seen:
        done = job.run(
            "ray", *TWO_NODES, "--ray.address", cluster.address, "--faults", "kill rank=1 step=7", timeout=380
        )
    assert done.returncode == 0, done.stderr
    assert job.losses("ray") == undisturbed
    assert seen == set()
    assert (
        "rank 1 of 2 was ended by SIGKILL (often the kernel, out of memory: see `dmesg`) (node 127.0.0.1" in done.stderr
    )
    assert "restart  from step 4 (restart 1 of 5)" in done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("step=12/12")]
    assert len(printed) == 1  # rank 0 is streamed from its node
    assert (job.folder / "runs" / "ray" / "logs" / "rank-1.log").exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quick_start_has_the_same_losses_under_every_launcher(job, cluster):
    folder = job.folder
    fewer = ("--train.steps", "6", "--train.global-batch", "2", "--schedule.warmup-steps", "2")
    here = ("--run.dir", str(folder / "runs"), "--data.cache-dir", str(folder / "cache"), "--launch.device", "cpu")
    two = ("--launch.nproc", "2")
    launchers = {"local": two, "ray": (*TWO_NODES[2:], "--ray.address", cluster.address)}
    for launcher, words in launchers.items():
        done = job.run(
            f"quick-{launcher}", *fewer, *here, "--launcher", launcher, *words, timeout=450, config="quickstart"
        )
        assert done.returncode == 0, done.stderr
    losses = job.losses("quick-local")
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert job.losses("quick-ray") == losses
    assert job.records("quick-ray", "validation")[-1]["loss"] == job.records("quick-local", "validation")[-1]["loss"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_missing_resources_are_named_with_what_the_cluster_has(job, cluster):
    done = job.run(
        "big", "--launcher", "ray", "--launch.nproc", "3", "--launch.nnodes", "2", "--ray.address", cluster.address,
        "--ray.wait-s", "1",
    )  # fmt: skip
    assert done.returncode == 2
    assert (
        "it needs 2 nodes with 3 CPU each (STRICT_SPREAD), and did not get them in launch.ray.wait_s=1 s" in done.stderr
    )
    assert done.stderr.count(": 1 CPU") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_lost_ray_node_is_replaced_by_another(job, cluster):
    longer = ("--train.steps", "200", "--checkpoint.every", "20")  # it must go on until the node is removed
    code, said = job.supervise("undisturbed-200", *longer)
    assert code == 0, said
    while len(cluster.worker_nodes) < 3:
        cluster.add_node(num_cpus=1, **SMALL)
    with job.start(
        "lost-node", *TWO_NODES, *longer, "--ray.address", cluster.address, "--faults", "slow rank=0 factor=9"
    ) as run:
        told = until(run, "slow     rank 0 (node")[-1]
        node_id = re.search(r"node \S+ ([0-9a-f]+)", told)[1]
        cluster.remove_node(
            next(n for n in cluster.worker_nodes if n.node_id.startswith(node_id)), allow_graceful=False
        )
        output = run.stdout.read()
    assert run.returncode == 0, output
    with_driver = "driver   was lost with its node and runs again on another one" in output  # Ray may have put it there
    assert with_driver or f"({node_id}) was lost: " in output
    assert "state-dump" not in output
    assert job.losses("lost-node") == job.losses("undisturbed-200")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_agent_that_does_not_start_in_time_says_how_to_wait_longer(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(ray, "_START_S", 0.01)
    launch = LaunchConfig(launcher="ray", nproc=1, device="cpu", ray=RayConfig(address=cluster.address, wait_s=0.02))
    launcher = RayLauncher(launch, 1)
    try:
        with pytest.raises(ValueError, match=r"did not start on its node within 0.02 s.* set --ray.wait-s above 0.02"):
            launcher.start(Attempt(0, Config(launch=launch), tmp_path, 1))
    finally:
        launcher.close()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_an_elastic_run_shrinks_with_its_nodes_and_grows_back(job, cluster):
    while len(cluster.worker_nodes) < 3:
        cluster.add_node(num_cpus=1, **SMALL)
    words = ("--launcher", "ray", "--launch.nproc", "1", "--launch.nnodes", "3", "--ray.address", cluster.address)
    with job.start("elastic-nodes", *words, "--launch.elastic", "--train.steps", "5000") as run:
        told = until(run, "step=5/")
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        told += until(run, "resumed  step")
        cluster.add_node(num_cpus=1, **SMALL)
        told += until(run, "elastic  ranks came back")
        told += until(run, ".*sharded over 3 ranks")  # until then the two go on
        told += until(run, "step=")
        run.send_signal(signal.SIGTERM)  # it has done what it should: save and end
        output = "".join(told) + run.stdout.read()
    assert run.returncode == 0, output
    assert [attempt["world_size"] for attempt in job.attempts("elastic-nodes")] == [3, 2, 3], output
    consumed = [record["samples_consumed"] for record in job.records("elastic-nodes")]
    assert consumed == [12 * step for step in range(1, len(consumed) + 1)]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_cluster_of_its_own_listens_on_loopback_only(job, undisturbed, listening_beyond_loopback):
    with listening_beyond_loopback() as seen:
        done = job.run("own-cluster", "--launcher", "ray", timeout=400)
    assert done.returncode == 0, done.stderr
    assert job.losses("own-cluster") == undisturbed
    assert seen == set()


def test_a_wrong_address_says_so_within_seconds():
    with pytest.raises(ValueError, match=r"nothing answers at launch.ray.address='127.0.0.1:1'"):
        connect(LaunchConfig(launcher="ray", ray=RayConfig(address="127.0.0.1:1")), 2)
    with pytest.raises(ValueError, match="is not host:port"):
        connect(LaunchConfig(launcher="ray", ray=RayConfig(address="somewhere")), 2)


def test_ray_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'titan-train\[ray\]'"):
        connect(LaunchConfig(launcher="ray"), 2)


@pytest.mark.parametrize("address", ["", "127.0.0.1:1"])
def test_actors_do_not_import_from_the_working_directory(monkeypatch, tmp_path, address):
    seen = []

    def init(**_):
        seen.append(Path.cwd())  # Ray puts it before all else on the import path of every actor

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setattr(cluster_module, "_check_reachable", lambda _: None)
    connect(LaunchConfig(launcher="ray", ray=RayConfig(address=address)), 2)
    assert seen == [Path(sysconfig.get_path("stdlib")).resolve()]
    assert Path.cwd() == tmp_path

    monkeypatch.setattr("titan_train.launch.place.ray.actor.NodeAgent", lambda _: None)
    monkeypatch.setattr("titan_train.launch.place.ray.actor._own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    NodeActor(str(tmp_path), {}, os.pathsep, 1, idle_s=None)
    assert not {"", ".", str(tmp_path)} & set(sys.path)


def test_a_node_with_other_versions_or_without_the_run_folder_is_refused():
    mine = node_versions()
    assert problems("node 10.0.0.1", mine, sees_run_folder=True) == []
    assert {"titan-train", "titan-pipeline", "titan-cp", "titan-fp8"} < mine.keys()
    version, folder = problems("node 10.0.0.2 (abcdef)", mine | {"torch": "2.0"}, sees_run_folder=False)
    assert (
        version == f"node 10.0.0.2 (abcdef) has torch 2.0, this machine has {mine['torch']}: install the same version"
    )
    assert "cannot see the run folder: set run.dir to a file system that all nodes share" in folder


def test_a_port_that_is_taken_is_refused_before_any_rank_starts(tmp_path):
    class Agent:
        """A node's agent, here, that is asked for a port."""

        address = "127.0.0.1"
        handle = listen = property(lambda self: self)

        def remote(self, port):
            self._address = self.address
            return NodeActor.listen(self, port)

    class Ray:
        get = staticmethod(lambda answer, timeout: answer)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        launch = LaunchConfig(launcher="ray", port=taken.getsockname()[1])
        attempt = Attempt(0, Config(launch=launch), tmp_path, 2)
        with pytest.raises(
            ValueError, match=rf"launch.port={launch.port} cannot be used on node 127.0.0.1: Address al"
        ):
            RayLauncher._start_ranks(SimpleNamespace(_ray=Ray, _agents=[Agent()], _start_s=10.0), attempt)


def test_a_node_whose_agent_was_lost_is_asked_itself_and_not_ray():
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        entry = {"Alive": True, "NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": 1.0}}
        lives = entry | {"NodeID": "a", "NodeManagerPort": raylet.getsockname()[1]}
        gone = entry | {"NodeID": "b", "NodeManagerPort": 1}
        nodes = RayNodes(type("Ray", (), {"nodes": staticmethod(lambda: [lives, gone])}), RayConfig(), {"CPU": 1.0})
        assert nodes.large_enough() == 2
        nodes.suspect("a")
        nodes.suspect("b")
        assert list(nodes.alive()) == ["a"]
