"""Processes that end the ordinary way, through interpreter shutdown, end with status 0."""

import subprocess
import sys

# One import of torch, four forks of it: each builds, communicates, closes, and leaves by the end of the script.
SCRIPT = """
import os, sys, tempfile
import torch, torch.distributed as dist
from titan_mesh import Layout, MeshSpec, build
from titan_mesh.groups.torch_private import default_store

folder = tempfile.mkdtemp()
children = []
for rank in range(4):
    pid = os.fork()
    if pid:
        children.append(pid)
        continue
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 4), rank=rank, world_size=4)
    with build(Layout(MeshSpec.parse("dp2 tp2"))) as mesh:
        mesh.check()
        dist.all_reduce(torch.ones(1), group=mesh.group("tp"))
    dist.destroy_process_group()
    sys.exit(0)
statuses = [os.waitpid(pid, 0)[1] for pid in children]
print(statuses)
sys.exit(any(statuses))
"""


def test_ranks_that_close_their_mesh_exit_with_status_zero(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "[0, 0, 0, 0]"
