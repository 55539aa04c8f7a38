"""A run on a real Ray cluster, in every test run: two nodes of this machine, one rank on each."""

from importlib.util import find_spec

import pytest
from ray_nodes import ray_cluster

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="titan-train[ray] is not installed"),
    pytest.mark.timeout(1800),  # 45 s of processor time; Ray takes minutes where nothing of it was compiled yet
]


def test_a_run_on_two_ray_nodes_has_the_losses_of_local_ranks(job, undisturbed, monkeypatch):
    monkeypatch.setenv("RAY_health_check_failure_threshold", "1000")  # a busy machine is no lost node
    words = ("--launcher", "ray", "--launch.nproc", "1", "--launch.nnodes", "2", "--ray.wait-s", "600")
    with ray_cluster(head_cpus=1, nodes=1) as cluster:
        done = job.run("on-ray", *words, "--ray.address", cluster.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.losses("on-ray") == undisturbed
    assert "(2 cpu ranks on 2 nodes)" in done.stdout
    (attempt,) = job.attempts("on-ray")
    assert attempt["end"] == "finished"
