"""A Ray cluster of two nodes on this machine, Ray's own way to test several nodes."""

import os
import re
import sys
from importlib.util import find_spec

import pytest
from titan_train.config import LaunchConfig
from titan_train.config.launch import RayConfig
from titan_train.launch.ray import connect, versions

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="titan-train[ray] is not installed")
# Before Ray is imported: its nodes then take loopback for their address, as in a cluster that the command starts.
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")

TWO_NODES = ("--launcher", "ray", "--launch.nproc", "1", "--launch.nnodes", "2")


@pytest.fixture(scope="module")
def cluster(job):
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    for _ in range(2):
        cluster.add_node(num_cpus=1, **small)
    yield cluster
    cluster.shutdown()


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
def test_a_lost_ray_node_is_replaced_by_another(job, undisturbed, cluster):
    cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    with job.start(
        "lost-node", *TWO_NODES, "--ray.address", cluster.address, "--faults", "slow rank=0 factor=9"
    ) as run:
        told = next(line for line in run.stdout if line.startswith("slow     rank 0 (node"))
        node_id = re.search(r"node \S+ ([0-9a-f]+)", told)[1]
        cluster.remove_node(
            next(n for n in cluster.worker_nodes if n.node_id.startswith(node_id)), allow_graceful=False
        )
        output = run.stdout.read()
    assert run.returncode == 0, output
    assert f"({node_id}) was lost: " in output
    assert job.losses("lost-node") == undisturbed


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


def test_a_node_with_other_versions_or_without_the_run_folder_is_refused():
    from titan_train.launch.ray import RayAgent

    mine = versions()
    alike = RayAgent(None, None, address="10.0.0.1", node_id="abcdef012345", versions=mine, sees=True)
    assert alike.problems() == []
    other = RayAgent(None, None, address="10.0.0.2", node_id="abcdef", versions=mine | {"torch": "2.0"}, sees=False)
    version, folder = other.problems()
    assert version == f"node 10.0.0.2 (abcdef) has torch 2.0, this machine {mine['torch']}: install the same"
    assert "does not see the run's folder: set run.dir to a file system that all nodes share" in folder


@pytest.mark.timeout(60)
def test_a_port_that_is_taken_is_refused_before_any_rank_starts():
    import socket

    from titan_train.launch.ray_agent import bind

    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])
    listener = bind("127.0.0.1", 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()
