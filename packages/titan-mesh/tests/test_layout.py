"""Layout: pure rank arithmetic, checked against brute force over every order."""

import copy
import itertools
import math
import pickle
import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from titan_mesh import Layout, MeshSpec, Topology, megatron, megatron_experts

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# no deadline: the machine may be busy; no database: nothing is written beside the tests
PROPERTY = settings(deadline=None, max_examples=40, database=None)
SIZES = st.sampled_from([1, 1, 2, 2, 3])
SPECS = st.builds(
    lambda sizes, order: MeshSpec(**sizes, order="-".join(order)),
    st.fixed_dictionaries(dict.fromkeys(AXES, SIZES)),
    st.permutations(AXES),
)


@pytest.fixture
def example() -> Layout:
    return Layout(MeshSpec.parse("pp3 dp4 tp8"))


def test_example_of_96_ranks_has_the_groups_it_should(example):
    assert example.world_size == 96
    assert example.groups("tp") == [tuple(range(start, start + 8)) for start in range(0, 96, 8)]
    assert example.groups("dp")[0] == (0, 8, 16, 24)
    assert example.groups("dp_shard")[0] == (0, 8, 16, 24)
    assert example.groups("pp")[0] == (0, 32, 64)
    assert example.coord(37, "pp", "dp", "tp") == {"pp": 1, "dp": 0, "tp": 5}
    assert example.coord(37) == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 5}
    assert example.rank(pp=1, dp=0, tp=5) == 37
    assert example.group_of(37, "pp") == (5, 37, 69)


@PROPERTY
@given(SPECS, st.data())
def test_groups_partition_the_world_and_a_coordinate_is_the_index_in_the_group(spec, data):
    layout = Layout(spec)
    names = data.draw(st.lists(st.sampled_from(AXES), min_size=1, max_size=5, unique=True))
    groups = layout.groups(*names)
    assert sorted(itertools.chain(*groups)) == list(range(layout.num_ranks))
    assert len(groups) == layout.num_ranks // layout.size(*names)
    for group in groups:
        assert list(group) == sorted(group)
        for rank in group:
            assert layout.group_of(rank, *names) == group
            if len(names) == 1:
                assert group.index(rank) == layout.coord(rank)[names[0]]


@PROPERTY
@given(SPECS)
def test_groups_are_the_ranks_that_agree_in_all_other_coordinates(spec):
    layout = Layout(spec)
    degrees = spec.degrees
    # brute force, from the definition: the first axis of the order turns slowest
    coords = [dict(zip(degrees, point, strict=True)) for point in itertools.product(*map(range, degrees.values()))]
    for rank in range(0, layout.num_ranks, 7):
        assert layout.coord(rank) == coords[rank]
        assert layout.rank(**coords[rank]) == rank
        for name in layout.names:
            axes = layout.flattens.get(name, (name,))
            others = [axis for axis in AXES if axis not in axes]
            want = tuple(r for r, c in enumerate(coords) if all(c[axis] == coords[rank][axis] for axis in others))
            assert layout.group_of(rank, name) == want


@PROPERTY
@given(SPECS, st.data())
def test_rank_of_the_coordinates_on_flattens_is_the_rank(spec, data):
    layout = Layout(spec)
    rank = data.draw(st.integers(0, layout.num_ranks - 1))
    for names in (("pp", "dp", "cp", "tp"), ("pp", "dp_replicate", "fsdp", "tp"), ("pp", "loss", "tp")):
        assert layout.rank(**layout.coord(rank, *names)) == rank


@pytest.mark.parametrize("order", ["-".join(p) for p in itertools.permutations(["tp", "cp", "dp", "pp"])])
def test_layout_equals_megatrons_rank_generator_in_every_order(order):
    draw = random.Random(order)
    degrees = {axis: draw.choice([1, 2, 3, 4]) for axis in ("tp", "cp", "dp", "pp")}
    spec = MeshSpec(pp=degrees["pp"], dp_shard=degrees["dp"], cp=degrees["cp"], tp=degrees["tp"], order=megatron(order))
    layout = Layout(spec)
    names = order.split("-")
    for count in (1, 2, 3):
        for wanted in itertools.combinations(names, count):
            mask = [name in wanted for name in names]
            want = _megatron_groups([degrees[name] for name in names], mask)
            got = layout.groups(*("dp_shard" if name == "dp" else name for name in wanted))
            assert sorted(got) == sorted(tuple(sorted(group)) for group in want)


def _megatron_groups(sizes: list[int], mask: list[bool]) -> list[list[int]]:
    """Groups by Megatron-LM's definition: the leftmost of ``sizes`` has stride 1; masked axes vary within a group."""
    strides = [math.prod(sizes[:i]) for i in range(len(sizes))]
    inside = [range(size) for size, masked in zip(sizes, mask, strict=True) if masked]
    outside = [range(size) for size, masked in zip(sizes, mask, strict=True) if not masked]
    in_strides = [stride for stride, masked in zip(strides, mask, strict=True) if masked]
    out_strides = [stride for stride, masked in zip(strides, mask, strict=True) if not masked]
    return [
        [
            sum(i * s for i, s in zip((*a, *b), (*out_strides, *in_strides), strict=True))
            for b in itertools.product(*inside)
        ]
        for a in itertools.product(*outside)
    ]


@pytest.mark.parametrize("order", ["-".join(p) for p in itertools.permutations(["tp", "cp", "ep", "dp", "pp"])])
def test_expert_view_equals_megatrons_expert_generator_in_every_order_it_accepts(order):
    """Megatron lays its experts by a second generator: expert tensor degree for tp, no cp, and what is left as dp."""
    draw = random.Random(order)
    names, accepted = order.split("-"), 0
    for _ in range(40):
        tp, cp, dp, pp = (draw.choice([1, 2, 4]) for _ in range(4))
        etp = draw.choice([1, tp])  # tp dropped in the experts, or kept
        ep = draw.choice([d for d in (1, 2, 4, 8) if (dp * cp * tp) % (d * etp) == 0])
        dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
        expert = {"tp": etp, "cp": 1, "ep": ep, "dp": dp * cp * tp // (ep * etp), "pp": pp}

        def groups(degrees, *wanted):
            found = _megatron_groups([degrees[n] for n in names], [n in wanted for n in names])
            return sorted(tuple(sorted(group)) for group in found)

        if groups(dense, "pp") != groups(expert, "pp"):
            continue  # Megatron refuses it: stages would differ between dense and expert layers
        accepted += 1
        layout = Layout(
            MeshSpec(pp=pp, dp_shard=dp, cp=cp, tp=tp, ep=ep, etp=etp, order=megatron(order),
                     expert_order=megatron_experts(order))
        )  # fmt: skip
        ours = {"tp": "etp", "ep": "ep", "dp": "efsdp", "pp": "pp"}
        view = layout.view("sparse")
        for count in (1, 2, 3):
            for wanted in itertools.combinations(ours, count):
                axes = [ours[n] for n in wanted if ours[n] in view.axes]
                got = view.groups(*axes) if axes else [(rank,) for rank in range(layout.num_ranks)]
                assert sorted(got) == groups(expert, *wanted), (wanted, dense, expert)
    assert accepted >= 10


def test_an_expert_tensor_degree_keeps_or_drops_tp_in_the_experts():
    kept = Layout(MeshSpec.parse("dp4 tp2 ep4 etp2"))
    dropped = Layout(MeshSpec.parse("dp4 tp2 ep4"))
    assert kept.groups("etp") == kept.groups("tp")
    assert kept.groups("ep") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert dropped.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert kept.size("efsdp") == 1
    assert "efsdp x ep x etp = dp_shard x cp x tp" in kept.explain()
    assert MeshSpec.parse(str(kept.spec)) == kept.spec
    assert kept.digest() != dropped.digest()
    named = Layout(MeshSpec.parse("dp4 tp2 ep2 expert_order=ep-efsdp-etp"))
    assert named.groups("ep") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dp4 tp2 ep4 etp4", r"ep=4 \* etp=4 = 16 does not divide dp_shard=4 \* cp=1 \* tp=2 = 8.*ep=2"),
        ("dp4 etp-1", r"etp=-1 is not a number of ranks, and cannot be inferred"),
        ("dp4 expert_order=ep-etp", r"expert_order='ep-etp' must name efsdp, ep and etp once each"),
        ("dp4 order=pp-dp-cp-tp-etp", r"'etp' in order=.*Its place is in expert_order, the order of the expert view"),
    ],
)
def test_expert_degrees_that_cannot_work_are_refused(text, named):
    with pytest.raises(ValueError, match=named):
        Layout(MeshSpec.parse(text))


@PROPERTY
@given(SPECS, st.data())
def test_expert_view_cuts_the_ranks_of_dp_shard_cp_and_tp(spec, data):
    region = spec.dp_shard * spec.cp * spec.tp
    ep = data.draw(st.sampled_from([d for d in range(1, region + 1) if region % d == 0]))
    layout = Layout(MeshSpec(**spec.degrees, ep=ep, order=spec.order))
    sparse = layout.view("sparse")
    assert sparse.axes == ("pp", "dp_replicate", "efsdp", "ep")
    assert sparse.size("efsdp") * sparse.size("ep") == region
    # experts and dense layers agree on stages, replicas, and the ranks of one replica of a stage
    assert sparse.groups("pp") == layout.groups("pp")
    assert sparse.groups("dp_replicate") == layout.groups("dp_replicate")
    assert sparse.groups("efsdp", "ep") == layout.groups("dp_shard", "cp", "tp")
    for rank in range(0, layout.num_ranks, 5):
        coord = sparse.coord(rank)
        assert sparse.rank(**coord) == rank
        for axis in sparse.axes:
            assert sparse.group_of(rank, axis).index(rank) == coord[axis]
    if ep > 1:
        assert layout.groups("ep") == sparse.groups("ep")
        assert layout.coord(0, "ep") == {"ep": 0}


def test_flatten_adds_a_name_and_leaves_the_layout_as_it_was(example):
    more = example.flatten("model", ("tp", "pp"))
    assert "model" not in example.names
    assert more.group_of(0, "model") == tuple(rank + base for base in (0, 32, 64) for rank in range(8))
    assert more.flatten("model", ("pp", "tp")).groups("model") == more.groups("model")


@pytest.mark.parametrize(
    ("name", "axes", "named"),
    [
        ("tp", ("pp", "tp"), "the name is taken"),
        ("fsdp", ("pp", "tp"), "the name is taken by dp_shard x cp"),
        ("both", ("pp", "tpp"), "'tpp' is not an axis"),
        ("both", ("tp", "tp"), "each once"),
        ("none", (), "at least one"),
    ],
)
def test_flatten_refuses_taken_names_and_unknown_axes(example, name, axes, named):
    with pytest.raises(ValueError, match=named):
        example.flatten(name, axes)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda layout: layout.groups("tpp"), "Did you mean 'tp'"),
        (lambda layout: layout.groups(), "at least one axis"),
        (lambda layout: layout.groups("dp", "dp_shard"), "dp_shard is named twice"),
        (lambda layout: layout.groups("cp", "ep"), "mixes the expert view"),
        (lambda layout: layout.coord(96), "Nearest valid: 95"),
        (lambda layout: layout.coord(-1), "Nearest valid: 0"),
        (lambda layout: layout.rank(pp=1, tp=5), "dp_shard is missing"),
        (lambda layout: layout.rank(pp=3, dp=0, tp=0), "Nearest valid: pp=2"),
        (lambda layout: layout.rank(pp=0, dp=4, tp=0), "Nearest valid: dp=3"),
        (lambda layout: layout.rank(pp=0, dp=0, fsdp=1, tp=0), "dp_shard is given twice"),
        (lambda layout: layout.rank(ep=0), "expert view"),
        (lambda layout: layout.view("spares"), "'dense' and 'sparse'"),
        (lambda layout: layout.view("sparse").size("tp"), "'tp' is not an axis"),
    ],
)
def test_layout_refuses_what_it_does_not_know(example, call, named):
    with pytest.raises(ValueError, match=named):
        call(example)


def test_layout_needs_a_world_size_to_infer_a_degree():
    with pytest.raises(ValueError, match="give Layout a world_size"):
        Layout(MeshSpec.parse("dp-1 tp8"))
    assert Layout(MeshSpec.parse("dp-1 tp8"), world_size=32).spec.dp_shard == 4


def test_equal_layouts_are_equal_hash_alike_and_travel(example):
    again = Layout(MeshSpec.parse("pp3 dp-1 tp8"), world_size=96)
    assert again == example
    assert hash(again) == hash(example)
    for other in (pickle.loads(pickle.dumps(example)), copy.deepcopy(example)):
        assert other == example
        assert other.groups("tp") == example.groups("tp")


def test_digest_differs_when_any_group_does(example):
    digests = {
        example.digest(),
        Layout(MeshSpec.parse("pp3 dp8 tp4")).digest(),
        Layout(MeshSpec.parse("pp3 dp_replicate4 tp8")).digest(),
        Layout(MeshSpec.parse("pp3 dp4 tp8 ep8")).digest(),
        Layout(MeshSpec.parse("pp3 dp4 tp8 order=tp-pp-dp-cp")).digest(),
        example.flatten("model", ("pp", "tp")).digest(),
    }
    assert len(digests) == 6
    assert Layout(example.spec, topology=Topology(gpus_per_node=4)).digest() == example.digest()


def test_diff_counts_the_ranks_that_change():
    before = Layout(MeshSpec.parse("dp4 tp2"))
    assert not before.diff(Layout(MeshSpec.parse("tp2 dp4")))
    assert str(before.diff(before)) == "no rank changes its groups or its place"
    after = Layout(MeshSpec.parse("pp2 dp2 tp2"))
    diff = before.diff(after)
    assert diff.regrouped["tp"] == ()
    assert diff.regrouped["dp_shard"] == tuple(range(8))
    # (0, 2, 4, 6) becomes (0, 2) and (4, 6): the last two move to the front
    assert diff.moved["dp_shard"] == (4, 5, 6, 7)
    assert diff.moved["pp"] == (4, 5, 6, 7)
    assert "dp_shard" in str(diff)


def test_diff_of_a_smaller_world_counts_the_ranks_that_go():
    diff = Layout(MeshSpec.parse("dp4 tp2")).diff(Layout(MeshSpec.parse("dp2 tp2")))
    assert diff.num_ranks == 8
    assert diff.regrouped["tp"] == (4, 5, 6, 7)
    assert diff.moved["tp"] == ()


def test_a_world_of_16384_ranks_is_laid_out_and_explained_in_under_a_second():
    start = time.process_time()  # this process's own seconds, whatever else the machine is doing
    layout = Layout(MeshSpec.parse("pp16 dp_replicate4 dp8 cp4 tp8 ep16"))
    text = layout.explain() + layout.explain(rank=12345)
    elapsed = time.process_time() - start
    assert layout.num_ranks == 16384
    assert "rank 12345 of 16384" in text
    assert elapsed < 1.0


def test_importing_and_explaining_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import titan_mesh as m; "
        "m.Layout(m.MeshSpec.parse('pp3 dp4 tp8')).explain(); m.draw_svg(m.Layout(m.MeshSpec(tp=8)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
