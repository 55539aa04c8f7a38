"""The private corners of torch that `titan_mesh.groups.torch_private` wraps. Checked on torch 2.11 and 2.15.

If this fails on a newer torch, `groups/torch_private.py` is the only module to mend.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from titan_mesh.groups.torch_private import (
    default_group,
    default_store,
    forget_meshes,
    groups_so_far,
    name_groups_once,
    timeout_of,
)


def test_default_store_and_a_groups_timeout_can_be_read():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=33))
    try:
        store = default_store()
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert store.add("count", 2) == 2
        assert timeout_of(default_group()) == timedelta(seconds=33)
        before = groups_so_far()
        group = dist.new_group([0], timeout=timedelta(seconds=21))
        assert timeout_of(group) == timedelta(seconds=21)
        assert groups_so_far() != before
    finally:
        dist.destroy_process_group()


def test_the_name_of_a_destroyed_group_does_not_come_back():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        names = []
        for _ in range(3):
            name_groups_once()
            group = dist.new_group([0], use_local_synchronization=True)
            names.append(group.group_name)
            dist.destroy_process_group(group)
        assert len(set(names)) == 3
    finally:
        dist.destroy_process_group()


def test_dtensors_cache_of_meshes_can_be_emptied():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        meshes = [init_device_mesh("cpu", (1,), mesh_dim_names=("x",)) for _ in range(3)]
        found = []
        for mesh in meshes:
            found.append((distribute_tensor(torch.ones(2), mesh, [Replicate()]) * 2).device_mesh)
            if mesh is meshes[1]:
                forget_meshes()
        assert found[1] is meshes[0]  # the trap: an equal mesh from the cache
        assert found[2] is meshes[2]
    finally:
        dist.destroy_process_group()
