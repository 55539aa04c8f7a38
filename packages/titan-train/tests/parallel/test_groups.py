"""The groups that one rank of 2,048 makes when a run starts; torch's ``fake`` backend takes the other ranks' place."""

import time
from datetime import timedelta

import torch.distributed as dist
from titan_mesh import Layout, MeshSpec, build
from titan_pipeline.runtime.transport import device as transport
from titan_train.parallel.context import _usp_groups
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = 2048


def test_a_rank_of_2048_starts_without_a_barrier_and_names_groups_as_the_others_do(monkeypatch):
    layout = Layout(MeshSpec.parse("pp16 dp-1 cp4 tp8"), world_size=WORLD)
    pairs = transport._neighbours(range(16))
    barriers, names, seconds = [], set(), []
    monkeypatch.setattr(distributed_c10d, "_store_based_barrier", lambda *given: barriers.append(given))
    for rank in (0, 777, WORLD - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        try:
            began = time.perf_counter()
            with build(layout) as mesh:
                _usp_groups(mesh, 2)
                channels = transport._make_channels(layout.groups("pp"), pairs, "fake", timedelta(seconds=77))
                assert len(channels) == (2 if layout.coord(rank, "pp")["pp"] in (0, 15) else 4)
                seconds.append(time.perf_counter() - began)
                names.add(distributed_c10d._world.group_count)
        finally:
            dist.destroy_process_group()
    assert barriers == []
    assert len(names) == 1  # members of a group that is made later meet at its name
    assert max(seconds) < 60
