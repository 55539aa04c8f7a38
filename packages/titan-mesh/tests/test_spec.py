"""MeshSpec: reading, inferring, and refusing with a way out."""

import math
import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from titan_mesh import DEFAULT_ORDER, MeshSpec, megatron

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# no deadline: the machine may be busy; no database: nothing is written beside the tests
PROPERTY = settings(deadline=None, max_examples=100, database=None)


def test_parse_reads_every_way_to_write_a_degree():
    want = MeshSpec(pp=3, dp_shard=4, tp=8)
    for text in ("pp3 dp4 tp8", "pp=3, dp=4, tp=8", "tp:8 pp:3 dp_shard4", "  pp3  dp4,tp8 "):
        assert MeshSpec.parse(text) == want
    assert MeshSpec.parse("") == MeshSpec()
    assert MeshSpec.parse("dp-1 tp2") == MeshSpec(dp_shard=-1, tp=2)
    assert MeshSpec.parse("dp_replicate2 dp_shard=-1 ep4").ep == 4


@PROPERTY
@given(
    st.permutations(AXES),
    st.dictionaries(st.sampled_from((*AXES, "ep")), st.integers(1, 64)),
)
def test_text_of_a_spec_parses_back_to_it(order, degrees):
    spec = MeshSpec(**degrees, order="-".join(order))
    assert MeshSpec.parse(str(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("axis", AXES)
def test_one_degree_is_inferred_from_the_world_size(axis):
    spec = MeshSpec(**({"pp": 2, "tp": 2, "dp_replicate": 2, "cp": 2, "dp_shard": 2} | {axis: -1}))
    resolved = spec.resolve(48)
    assert getattr(resolved, axis) == 3
    assert resolved.resolve(48) == resolved


def test_a_spec_that_fits_resolves_to_itself():
    spec = MeshSpec(pp=3, dp_shard=4, tp=8)
    assert spec.resolve(96) == spec


# Each row: what is given, and what the message must name: the factor, and the nearest valid choice.
INVALID = {
    "tp larger than the world": ("tp16 dp-1", 8, ["tp=16", "world_size=8", "Nearest valid: tp=8."]),
    "tp that does not divide": ("tp3 dp-1", 8, ["tp=3", "world_size=8", "Nearest valid: tp=2 or tp=4."]),
    "tp that does not divide what is left": ("dp4 tp3", 8, ["tp=3", "Nearest valid: tp=2."]),
    "tp of zero": ("tp0", 8, ["tp=0", "Nearest valid: tp=1"]),
    "negative dp_shard": ("dp_shard-2", 8, ["dp_shard=-2", "Nearest valid: dp_shard=-1"]),
    "zero pp": ("pp0", 8, ["pp=0", "Nearest valid: pp=1"]),
    "two degrees to infer": ("dp-1 tp-1", 8, ["dp_shard=-1 and tp=-1", "only one"]),
    "product below the world": ("tp4", 8, ["tp=4 needs 4 ranks", "dp_shard=2", "dp_shard=-1 infers it"]),
    "product above the world": ("pp2 dp4 tp8", 32, ["needs 64 ranks", "world_size=32", "dp_shard=2, pp=1 or tp=4"]),
    "product that no factor mends": ("pp4 tp4 cp9", 36, ["needs 144 ranks", "world_size=36", "cp", "Nearest valid"]),
    "rest that cannot be inferred": ("pp4 tp4 dp-1", 24, ["pp=4 * tp=4 = 16", "dp_shard=-1", "pp=3", "tp=3"]),
    "ep that does not divide": ("dp8 ep3", 8, ["ep=3", "dp_shard=8 * cp=1 * tp=1 = 8", "Nearest valid: ep=2 or ep=4."]),
    "ep across replicas": (
        "dp_replicate2 dp_shard4 ep8",
        8,
        ["ep=8", "dp_replicate=2", "Nearest valid: ep=4", "dp_replicate=1 dp_shard=8"],
    ),
    "ep to infer": ("dp8 ep-1", 8, ["ep=-1", "ep=1"]),
    "ep of zero": ("dp8 ep0", 8, ["ep=0", "Nearest valid: ep=1"]),
    "misspelt axis": ("tpp8", 8, ["'tpp'", "Did you mean 'tp'?"]),
    "axis twice": ("tp2 tp4", 8, ["tp appears twice", "2 and 4"]),
    "dp named twice under two names": ("dp2 dp_shard4", 8, ["dp_shard appears twice"]),
    "no number": ("tp", 8, ["'tp'", "'tp8'"]),
    "order without an axis": ("tp8 order=pp-dp-tp", 8, ["leaves out cp"]),
    "order with an axis twice": ("tp8 order=pp-dp-dp_shard-cp-tp", 8, ["names dp_shard 2 times"]),
    "order with ep": ("tp8 order=pp-dp-cp-ep-tp", 8, ["'ep'", "expert view"]),
    "order with an unknown axis": ("tp8 order=pp-dp-cp-xp-tp", 8, ["'xp'", "is not an axis"]),
    "world of no ranks": ("tp1", 0, ["world_size=0", "Nearest valid: world_size=1"]),
}


@pytest.mark.parametrize(("text", "world_size", "named"), INVALID.values(), ids=INVALID)
def test_a_spec_that_cannot_be_laid_out_is_refused_with_the_nearest_valid_choice(text, world_size, named):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below, piece by piece
        MeshSpec.parse(text).resolve(world_size)
    for piece in named:
        assert piece in str(caught.value)


@PROPERTY
@given(
    st.fixed_dictionaries({axis: st.sampled_from([1, 1, 2, 3, 4]) for axis in AXES}),
    st.sampled_from([None, *AXES]),
    st.integers(1, 96),
)
def test_resolve_either_fills_the_world_or_offers_a_choice(degrees, inferred, world_size):
    spec = MeshSpec(**(degrees | ({inferred: -1} if inferred else {})))
    fixed = math.prod(degree for axis, degree in degrees.items() if axis != inferred)
    if world_size == fixed or (inferred and world_size % fixed == 0):
        assert math.prod(spec.resolve(world_size).degrees.values()) == world_size
    else:
        with pytest.raises(ValueError, match=r"Nearest valid|Or start"):
            spec.resolve(world_size)


@PROPERTY
@given(st.integers(1, 48), st.integers(1, 16), st.integers(1, 16))
def test_every_expert_degree_that_is_offered_fits(region, ep, etp):
    spec = MeshSpec(dp_shard=region, ep=ep, etp=etp)
    if region % (ep * etp) == 0:
        assert spec.resolve(region) == spec
        return
    with pytest.raises(ValueError, match="Nearest valid") as caught:
        spec.resolve(region)
    for choice in re.split(", | or ", str(caught.value).partition("Nearest valid: ")[2].rstrip(".")):
        changed = {name: int(degree) for name, degree in re.findall(r"(\w+)=(\d+)", choice)}
        assert changed
        replace(spec, **changed).resolve(region)


@pytest.mark.parametrize("degree", [2.0, True, "2", None])
def test_a_degree_that_is_no_integer_is_refused(degree):
    with pytest.raises(ValueError, match="is not an integer"):
        MeshSpec(tp=degree)


def test_megatron_order_is_read_innermost_first():
    assert megatron("tp-cp-ep-dp-pp") == DEFAULT_ORDER
    assert megatron("tp-pp-dp-cp") == "cp-dp_replicate-dp_shard-pp-tp"


@pytest.mark.parametrize(
    ("order", "named"),
    [("tp-cp-dp", "names pp 0 times"), ("tp-tp-cp-dp-pp", "names tp 2 times"), ("tp-cp-zz-dp-pp", "'zz'")],
)
def test_megatron_order_that_is_incomplete_is_refused(order, named):
    with pytest.raises(ValueError, match=named):
        megatron(order)
