"""A Ray cluster of several nodes on this machine, Ray's own way to test them: real raylets on loopback, no root needed."""

import contextlib
import os
import shutil
import tempfile
import time

# Before Ray is imported: its nodes then take loopback for their address, as in a cluster of the command's.
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
SMALL = {"object_store_memory": 80 * 2**20}
_START_S = 150  # Ray gives each of its processes 30 s to start, too short on two busy cores
_TRIES = 3
PATIENT = {
    "RAY_gcs_server_port_wait_time_s": str(_START_S),
    "RAY_raylet_start_wait_time_s": str(_START_S),
    "RAY_agent_register_timeout_ms": str(1000 * _START_S),
    "RAY_worker_register_timeout_seconds": str(_START_S),
    "RAY_worker_niceness": "0",  # at Ray's 15, beside other tests, they get no processor for minutes
}
"""In the environment of whatever starts a node."""


@contextlib.contextmanager
def ray_cluster(*, head_cpus, nodes):
    """A head and ``nodes`` nodes of one processor, on ports of their own. What they started ends with the block.

    Args:
        head_cpus: Processors of the head; 0 so that it holds no ranks.
        nodes: Further nodes.
    """
    import pytest
    from ray._private import services
    from ray.cluster_utils import Cluster

    with short_folder() as files, pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", _patient(services.get_node))
        patch.setattr(Cluster, "_wait_for_node", lambda _, node: _wait_for_node(services, node))
        patch.setenv("RAY_TMPDIR", files)
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        cluster = Cluster()
        try:
            unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
            _add_node(cluster, num_cpus=head_cpus, **unused)
            for _ in range(nodes):
                _add_node(cluster, num_cpus=1)
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def short_folder():
    """For Ray's files: a long path is too long for its sockets, and clusters of one folder take each other's address."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _add_node(cluster, **settings):
    """A raylet on a very busy machine sometimes never registers, however long one waits: another one does."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return cluster.add_node(**settings, **SMALL)
        except Exception:  # Ray raises no more precise type
            if not tries_left:
                raise
    return None


def _wait_for_node(services, node):
    services.wait_for_node(node.gcs_address, node.plasma_store_socket_name, _START_S)


def _patient(get_node):
    """Ray asks this for a new node until it no longer raises, or 30 s are over."""

    def get(*words):
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return get_node(*words)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    return get
