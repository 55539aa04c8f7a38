"""Real gloo ranks: collectives on every axis, and each way that a mesh could go wrong."""

import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from titan_mesh import Layout, Mesh, MeshSpec, build
from titan_mesh.groups.torch_private import default_group, default_store, timeout_of
from titan_testing import run_ranks

FOUR = ["dp4", "pp2 tp2", "dp_replicate2 dp2", "cp2 tp2 order=cp-tp-pp-dp", "dp2 tp2 ep4", "dp2 cp2 ep2"]
EIGHT = [
    "pp2 dp2 tp2",
    "dp_replicate2 dp2 cp2 ep2",
    "pp2 cp2 tp2 order=tp-pp-cp-dp",
    "dp2 cp2 tp2 ep4 order=dp_shard-tp-pp-dp_replicate-cp",
]


def layout_of(text: str) -> Layout:
    return Layout(MeshSpec.parse(text), world_size=dist.get_world_size())


def sum_over_every_name(text: str) -> dict[str, tuple[float, float]]:
    """All-reduce 2**rank over every name: the sum tells exactly who took part."""
    layout, rank = layout_of(text), dist.get_rank()
    found: dict[str, tuple[float, float]] = {}
    with build(layout) as mesh:
        mesh.check()
        for name in layout.names:
            value = torch.tensor(2.0**rank)
            dist.all_reduce(value, group=mesh.group(name))
            found[name] = (float(value), sum(2.0**other for other in layout.group_of(rank, name)))
    return found


@pytest.mark.parametrize(("world_size", "text"), [*((4, t) for t in FOUR), *((8, t) for t in EIGHT)])
def test_all_reduce_over_every_axis_sums_exactly_the_ranks_of_its_group(world_size, text):
    for found in run_ranks(sum_over_every_name, world_size, text):
        for name, (got, want) in found.items():
            assert got == want, name


def timeouts(timeout_s: float | None) -> tuple[list[float], float]:
    with build(layout_of("dp_replicate2 cp2 tp2"), timeout=timeout_s and timedelta(seconds=timeout_s)) as mesh:
        times = [timeout_of(group) for group in mesh.process_groups]
    return [t.total_seconds() for t in times if t is not None], len(times)


def test_timeout_reaches_every_group_axis_and_flatten():
    for times, count in run_ranks(timeouts, 8, 44.0):
        assert times == [44.0] * count
        assert count >= 5


def test_without_a_timeout_every_group_has_the_default_groups():
    for times, count in run_ranks(timeouts, 8, None, timeout_s=51.0):
        assert times == [51.0] * count


def after_other_groups() -> bool:
    """Ranks 0 and 1 have made a group before, which torch counts in the names of groups that only members make."""
    dist.new_group([0, 1])
    with build(layout_of("dp2 tp2")) as mesh:
        mesh.check()
        return mesh._pool.local


def test_ranks_that_made_unequal_numbers_of_groups_before_still_meet():
    assert run_ranks(after_other_groups, 4) == [False] * 4


def groups_of_the_world() -> list[bool]:
    same = []
    for seconds in (timeout_of(default_group()).total_seconds(), 17.0):
        with build(layout_of("dp-1"), timeout=timedelta(seconds=seconds)) as mesh:
            same.append(mesh.group("fsdp") is default_group())
    return same


def test_the_default_group_is_shared_only_if_its_timeout_is_the_wanted_one():
    assert run_ranks(groups_of_the_world, 2) == [[True, False]] * 2


def build_with(texts: list[str], world_sizes: list[int | None]) -> tuple[str, str, float]:
    """Each rank brings its own layout. Returns the error and how long it took."""
    rank = dist.get_rank()
    start = time.monotonic()
    try:
        build(Layout(MeshSpec.parse(texts[rank]), world_size=world_sizes[rank]))
    except (ValueError, RuntimeError) as err:
        return type(err).__name__, str(err), time.monotonic() - start
    return "none", "", time.monotonic() - start


def test_ranks_with_different_specs_all_get_an_error_that_says_who_has_which():
    results = run_ranks(build_with, 4, ["dp4", "dp4", "dp2 tp2", "dp4"], [None] * 4)
    for kind, message, took in results:
        assert kind == "ValueError"
        assert "ranks 0 1 3 have 'dp_shard4 on 4 ranks'" in message
        assert "ranks 2 have 'dp_shard2 tp2 on 4 ranks'" in message
        assert took < 10


def test_ranks_with_different_world_sizes_all_get_an_error():
    for kind, message, took in run_ranks(build_with, 2, ["dp2", "dp4"], [None] * 2):
        assert kind == "ValueError"
        assert "different layouts" in message
        assert took < 10


def test_a_rank_whose_spec_is_refused_does_not_hang_the_others():
    results = run_ranks(build_with, 3, ["dp3", "dp3", "dp2"], [3, 3, 3])
    assert "dp_shard=2" in results[2][1]
    for kind, message, took in results[:2]:
        assert kind == "RuntimeError"
        assert "ranks 2 did not call build within 8 s" in message
        assert took < 10


@pytest.mark.parametrize(("text", "why"), [("dp2", "no place"), ("dp8", "empty")])
def test_a_layout_that_is_not_the_world_is_refused_on_every_rank(text, why):
    for kind, message, _ in run_ranks(build_with, 4, [text] * 4, [None] * 4):
        assert kind == "ValueError"
        assert f"world_size={text[2:]}, but 4 ranks were started" in message
        assert why in message
        assert "dp_shard=-1 with world_size=4" in message


def build_again_and_again() -> list[int]:
    before = len(dist.distributed_c10d._world.pg_map)
    counts = []
    for text in ("dp2 tp2", "dp2 tp2", "pp2 cp2", "dp2 tp2"):
        mesh = build(layout_of(text))
        mesh.check()
        mesh.close()
        mesh.close()
        counts.append(len(dist.distributed_c10d._world.pg_map) - before)
    return counts


def test_closing_leaves_no_group_behind_and_the_mesh_can_be_built_again():
    assert run_ranks(build_again_and_again, 4) == [[0, 0, 0, 0]] * 4


def close_after_an_error() -> None:
    """Rank 0 fails inside the block, and says so once it is out; rank 1 stays inside until then."""
    left = dist.PrefixStore("test", default_store())
    if dist.get_rank() == 0:
        with pytest.raises(KeyError), build(layout_of("dp2")):
            raise KeyError("boom")
        left.set("left", "")
    else:
        mesh = build(layout_of("dp2"))
        left.wait(["left"], timedelta(seconds=20))
        mesh.close(barrier=False)


def test_leaving_by_an_error_does_not_wait_for_the_other_ranks():
    run_ranks(close_after_an_error, 2)


def wrong_groups() -> str:
    layout = layout_of("dp2 tp2")
    with build(layout) as mesh:
        groups = dict(mesh._groups, tp=mesh.group("dp"))
        try:
            Mesh(layout, "cpu", groups, mesh._pool, owns_world=False)
        except RuntimeError as err:
            return str(err)
    return ""


def test_a_group_with_other_ranks_than_the_layout_is_found():
    found = run_ranks(wrong_groups, 4)
    assert any(re.search(r"has index 1 of 2 on tp, but rank 0 of 2", message) for message in found)


def swapped_members() -> str:
    """dp (0, 2) in place of tp (0, 1): the same sizes and, on ranks 0 and 3, the same indices."""
    layout = layout_of("dp2 tp2")
    with build(layout) as mesh:
        mesh._groups["tp"] = mesh.group("dp")
        mesh._check_ranks = lambda: None
        try:
            mesh._groups = {"tp": mesh._groups["tp"]}
            mesh.check()
        except RuntimeError as err:
            return str(err)
    return ""


def test_check_finds_ranks_that_should_not_answer():
    assert "tp should be ranks (0, 1), but (0, 2) answered" in run_ranks(swapped_members, 4)[0]


def overrides() -> tuple[str, bool, bool]:
    layout = layout_of("pp2 dp2")
    with build(layout, backend={"pp": "gloo"}) as mesh:
        mesh.check()
        apart = mesh.group("dp") is mesh.group("fsdp")
        backend = dist.get_backend(mesh.group("pp"))
    with build(layout, backend="gloo") as mesh:
        mesh.check()
        shared = mesh.group("dp_shard") is mesh.group("loss")
    return backend, apart, shared


def test_a_backend_is_given_for_one_axis_or_for_all():
    assert run_ranks(overrides, 4) == [("gloo", True, True)] * 4


def meshes() -> dict[str, object]:
    with build(layout_of("dp_replicate2 dp2 tp2")) as mesh:
        return {
            "get": [mesh.get("cp") is None, mesh.get("tp") is not None, mesh.get("fsdp") is not None],
            "one": (mesh["cp"].size(), mesh.size("cp"), mesh.rank_in("cp"), dist.get_world_size(mesh.group("cp"))),
            "same": mesh["tp"] is mesh["tp"],
            "hsdp": mesh.fsdp_mesh().mesh_dim_names,
            "repr": repr(mesh),
        }


def test_axes_of_size_one_have_meshes_and_get_returns_none_for_them():
    first = run_ranks(meshes, 8)[0]
    assert first["get"] == [True, True, True]
    assert first["one"] == (1, 1, 0, 1)
    assert first["same"] is True
    assert first["hsdp"] == ("dp_replicate", "fsdp")
    assert first["repr"] == "Mesh(dp_replicate2 dp_shard2 tp2, rank 0 of 8, 'cpu')"


def test_one_process_needs_no_launcher():
    assert not dist.is_initialized()
    with build(Layout(MeshSpec())) as mesh:
        mesh.check()
        assert mesh.fsdp_mesh().size() == mesh["tp"].size() == 1
        assert len(mesh.process_groups) == 1
        value = torch.ones(1)
        dist.all_reduce(value, group=mesh.group("loss"))
        assert float(value) == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"timeout": timedelta(0)}, "timeout=.* is not a positive time"),
        ({"agree_within": timedelta(seconds=-1)}, "agree_within=.* is not a positive time"),
        ({"backend": {"tpp": "gloo"}}, "backend names 'tpp'.*Did you mean 'tp'"),
        ({"pg_options": {"ep": object()}}, "pg_options names 'ep'"),
    ],
)
def test_build_refuses_arguments_that_name_nothing(arguments, named):
    with pytest.raises(ValueError, match=named):
        build(Layout(MeshSpec()), **arguments)
    assert not dist.is_initialized()


def test_several_ranks_without_a_launcher_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"this process is alone.*Start 4 processes"):
        build(Layout(MeshSpec.parse("dp4")))


def test_an_unknown_name_is_refused_by_every_accessor():
    with build(Layout(MeshSpec())) as mesh:
        for call in (mesh.__getitem__, mesh.get, mesh.group, mesh.rank_in, mesh.size):
            with pytest.raises(ValueError, match="Did you mean 'tp'"):
                call("tpp")
        with pytest.raises(ValueError, match="ep=1"):
            mesh.group("ep")
        with pytest.raises(ValueError, match="ep=1"):
            mesh.fsdp_mesh(experts=True)


def whole(mesh: Mesh, value: float) -> float:
    """A DTensor of ``mesh`` that went through an operator, gathered: its groups must be there."""
    from torch.distributed.tensor import DTensor, Shard

    return float((DTensor.from_local(torch.full((2,), value), mesh["dp_shard"], [Shard(0)]) * 2).full_tensor().sum())


def meshes_in_turn_and_nested() -> list[float]:
    found = []
    for _ in range(3):
        with build(layout_of("dp2 tp2")) as mesh:
            found.append(whole(mesh, 1.0))
    first, second = build(layout_of("dp2 tp2")), build(layout_of("dp2 tp2"))
    found += [whole(first, 1.0), whole(second, 1.0)]
    first.close()
    found.append(whole(second, 1.0))  # DTensor may have put the first, equal mesh under it
    second.close()
    with build(layout_of("dp2 tp2")) as mesh:
        found.append(whole(mesh, 1.0))
    return found


def test_dtensors_gather_in_every_mesh_of_a_process_whatever_closed_before():
    assert run_ranks(meshes_in_turn_and_nested, 4) == [[8.0] * 7] * 4


def owner_closes_first() -> tuple[bool, float, bool]:
    del os.environ["WORLD_SIZE"]  # as started by hand
    with_world = build(layout_alone())
    second = build(layout_alone())
    with_world.close()
    found = dist.is_initialized(), whole(second, 1.0)
    second.close()
    return *found, dist.is_initialized()


def layout_alone() -> Layout:
    return Layout(MeshSpec.parse("dp1"), world_size=1)


def test_the_default_group_stays_until_the_last_mesh_closes():
    assert run_ranks(owner_closes_first, 1, init=False) == [(True, 4.0, False)]


def expert_tensor_groups():
    with build(Layout(MeshSpec.parse("dp2 tp2 ep2 etp2"))) as mesh:
        mesh.check()
        sums = []
        for name in ("ep", "etp", "tp"):
            rank = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(rank, group=mesh.group(name))
            sums.append(rank.item())
        return sums, mesh["ep", "etp"].mesh.tolist(), mesh.group("etp") is mesh.group("tp")


def test_an_expert_tensor_degree_has_groups_and_shares_them_with_tp_where_they_are_equal():
    results = run_ranks(expert_tensor_groups, 4)
    assert [sums for sums, _, _ in results] == [[2.0, 1.0, 1.0], [4.0, 1.0, 1.0], [2.0, 5.0, 5.0], [4.0, 5.0, 5.0]]
    assert all(grid == [[0, 1], [2, 3]] and shared for _, grid, shared in results)
