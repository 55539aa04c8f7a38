"""The layout, torch's DeviceMesh, and the groups that `build` makes agree for every rank of every order.

Torch's ``fake`` backend lets one process take every rank's place in turn: groups are made and never communicate.
"""

import contextlib
import itertools
import random
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from titan_mesh import Layout, MeshSpec, build
from titan_mesh.groups.torch_private import default_group, groups_so_far
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
ORDERS = list(itertools.permutations(AXES))


def random_spec(order: tuple[str, ...], most: int = 24) -> MeshSpec:
    """Random degrees (the order is the seed) whose product is at most ``most``, and a random ep that fits."""
    draw = random.Random("-".join(order))
    while True:
        degrees = {axis: draw.choice([1, 2, 2, 3, 4]) for axis in AXES}
        product = 1
        for degree in degrees.values():
            product *= degree
        if 4 <= product <= most:
            break
    region = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    ep = draw.choice([d for d in range(1, region + 1) if region % d == 0])
    return MeshSpec(**degrees, ep=ep, order="-".join(order))


@contextlib.contextmanager
def simulated(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_rank_of_a_layout_sits_where_torchs_device_mesh_puts_it(order):
    layout = Layout(random_spec(order))
    sizes = tuple(layout.spec.degrees[axis] for axis in order)
    for rank in range(layout.num_ranks):
        with simulated(rank, layout.num_ranks):
            theirs = init_device_mesh("cpu", sizes, mesh_dim_names=order)
            assert layout.coord(rank) == dict(zip(order, theirs.get_coordinate() or (), strict=True))
            for axis in order:
                assert list(layout.group_of(rank, axis)) == theirs[axis].mesh.tolist()
                assert theirs.get_local_rank(axis) == layout.coord(rank)[axis]
            for name, axes in layout.flattens.items():
                ordered = tuple(axis for axis in order if axis in axes)
                assert list(layout.group_of(rank, name)) == theirs[ordered].mesh.flatten().tolist()


@pytest.mark.parametrize("text", ["pp16 dp-1 tp8", "dp_replicate4 dp-1 cp4 tp8 ep16"])
def test_a_rank_of_2048_makes_its_own_groups_without_a_barrier_of_the_world(text, monkeypatch):
    """Counted under TORCH_DIST_INIT_BARRIER=1, which some clusters set."""
    layout = Layout(MeshSpec.parse(text), world_size=2048)
    counters, barriers = set(), []
    for rank in (0, 777, 2047):
        with simulated(rank, 2048), monkeypatch.context() as patch:
            patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
            patch.setattr(distributed_c10d, "_store_based_barrier", lambda *given: barriers.append(given[3]))
            with build(layout) as mesh:
                counters.add(groups_so_far())  # later names of groups are equal
                made = len(mesh._pool.created)
                assert len(barriers) == made
                assert made <= len(layout.names)
                assert max(barriers) < 2048
            barriers.clear()
    assert len(counters) == 1


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_coordinate_is_the_rank_in_the_group_that_build_made(order):
    layout = Layout(random_spec(order, most=16))
    rank_sets = {group for name in layout.names for group in layout.groups(name)}
    for rank in random.Random(0).sample(range(layout.num_ranks), 3):
        with simulated(rank, layout.num_ranks), build(layout) as mesh:
            mesh.check()
            for name in layout.names:
                view = mesh[name]
                group = layout.group_of(rank, name)
                assert tuple(dist.get_process_group_ranks(mesh.group(name))) == group
                assert view.get_group() is mesh.group(name)
                assert view.mesh.tolist() == list(group)
                assert view.get_coordinate() == (view.get_local_rank(),) == (group.index(rank),)
                assert mesh.rank_in(name) == group.index(rank)
            # every distinct set of ranks has one group at most, the world's is the default group
            mine = {ranks for ranks in rank_sets if rank in ranks}
            groups = mesh.process_groups
            assert len(groups) == len({tuple(dist.get_process_group_ranks(g)) for g in groups}) == len(mine)
            for g in groups:
                assert (g is default_group()) == (dist.get_world_size(g) == layout.num_ranks)


@pytest.mark.parametrize("order", ORDERS[::7], ids="-".join)
def test_a_mesh_of_several_axes_in_any_order_holds_ascending_groups(order):
    layout = Layout(random_spec(order, most=16))
    rank = layout.num_ranks // 2
    with simulated(rank, layout.num_ranks), build(layout) as mesh:
        for count in (2, 3):
            for names in itertools.permutations((*AXES, "fsdp", "dp"), count):
                axes = [axis for name in names for axis in layout.flattens.get(name, (name,))]
                if len(set(axes)) < len(axes):
                    continue
                view = mesh[names]
                assert view.mesh_dim_names == names
                assert view.shape == tuple(layout.size(name) for name in names)
                assert view.get_coordinate() == tuple(layout.coord(rank, *names).values())
                for dim, name in enumerate(names):
                    assert view.get_group(dim) is mesh.group(name)
                    # the mesh's own idea of this rank's row, with all other coordinates fixed
                    row = view.mesh[tuple(slice(None) if i == dim else c for i, c in enumerate(view.get_coordinate()))]
                    assert tuple(row.tolist()) == layout.group_of(rank, name)


def test_expert_meshes_combine_with_stages_and_replicas():
    layout = Layout(MeshSpec.parse("pp2 dp_replicate2 dp2 tp2 ep4"))
    with simulated(5, 16), build(layout) as mesh:
        assert mesh["ep"].mesh.tolist() == [4, 5, 6, 7]
        assert mesh["efsdp", "ep"].shape == (1, 4)
        assert mesh.fsdp_mesh(experts=True).mesh_dim_names == ("dp_replicate", "efsdp")
        assert mesh["ep", "pp"].shape == (4, 2)
        with pytest.raises(ValueError, match="mixes the expert view"):
            mesh["tp", "ep"]


def test_16384_simulated_ranks_are_built_and_know_their_place():
    layout = Layout(MeshSpec.parse("pp8 dp_replicate2 dp32 cp4 tp8 ep16"))
    with simulated(12345, layout.num_ranks), build(layout) as mesh:
        for name, index in layout.coord(12345, *layout.names).items():
            assert mesh.rank_in(name) == index
        assert len(mesh.process_groups) == 10


def test_timeout_reaches_every_new_group_torch_is_asked_for(monkeypatch):
    asked: list[timedelta | None] = []
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *a, **k: (asked.append(k["timeout"]), new_group(*a, **k))[1])
    with simulated(0, 16):
        build(Layout(MeshSpec.parse("pp2 dp_replicate2 dp2 tp2 ep4")), timeout=timedelta(seconds=44)).close()
    assert asked
    assert set(asked) == {timedelta(seconds=44)}


def test_a_rank_tensor_of_a_permuted_flatten_ascends(monkeypatch):
    # dp_shard and cp are apart and tp is outermost: torch would have to reorder ranks to flatten them
    layout = Layout(MeshSpec.parse("tp2 dp2 cp2 pp2 order=tp-cp-pp-dp_replicate-dp_shard"))
    with simulated(0, 16), build(layout) as mesh:
        assert mesh["fsdp"].mesh.tolist() == [0, 1, 4, 5]
        assert torch.equal(mesh["fsdp", "tp"].mesh, torch.tensor([[0, 8], [1, 9], [4, 12], [5, 13]]))
