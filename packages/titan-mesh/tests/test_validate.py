"""What does not fit is found, named, and can be mended with the fix that the issue offers."""

import pytest
from titan_mesh import Layout, MeshSpec, Topology


def issues(text: str, topology: Topology | None = None, **model: int):
    return Layout(MeshSpec.parse(text), topology=topology or Topology()).validate(**model)


def test_a_model_that_fits_has_no_issues():
    model = {"heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256, "seq_len": 8192, "layers": 32}
    assert issues("pp4 dp4 cp2 tp8", **model, batch=64, microbatches=8) == []


# Each row: layout, model, and the one issue's level, field, value, and what its message and fix must name.
FOUND = {
    "heads": (
        "tp8",
        {"heads": 12},
        "error",
        "heads",
        ["tp=8", "part of an attention head", "tp=6 or tp=12", "heads=16"],
    ),
    "kv_heads": ("tp8", {"kv_heads": 4}, "error", "kv_heads", ["tp=8", "Use tp=4", "kv_heads=8"]),
    "hidden": ("tp8", {"hidden": 100}, "error", "hidden", ["tp=8", "tp=10 or tp=5", "hidden=104"]),
    "vocab": ("tp8", {"vocab": 50257}, "error", "vocab", ["tp=8", "vocab=50264"]),
    "seq_len": (
        "cp4 tp2",
        {"seq_len": 1000},
        "error",
        "seq_len",
        ["2 * cp=4 * tp=2 = 16", "seq_len=992 or seq_len=1008"],
    ),
    "too few layers": ("pp8", {"layers": 6}, "error", "layers", ["pp=8", "hold no layer", "pp=6 or less"]),
    "uneven layers": ("pp8", {"layers": 30}, "warning", "layers", ["3 or 4 layers", "pp=6 or pp=10"]),
    "experts": ("dp8 ep8", {"experts": 12}, "error", "experts", ["ep=8", "ep=6 or ep=12", "experts=16"]),
    "batch": ("dp_replicate2 dp4", {"batch": 20}, "error", "batch", ["dp=8", "batch=16 or batch=24"]),
    "batch in microbatches": ("dp2", {"batch": 6, "microbatches": 2}, "error", "batch", ["dp=2 * microbatches=2 = 4"]),
    "few microbatches": ("pp4", {"microbatches": 2}, "warning", "microbatches", ["60%", "microbatches=16", "16%"]),
}


@pytest.mark.parametrize(("text", "model", "level", "field", "named"), FOUND.values(), ids=FOUND)
def test_an_issue_names_the_field_the_value_and_the_fix(text, model, level, field, named):
    (issue,) = issues(text, **model)
    assert (issue.level, issue.field, issue.value) == (level, field, model[field])
    assert str(issue).startswith(f"{level}: {field}={model[field]} ")
    for piece in named:
        assert piece in f"{issue.message} {issue.fix}"


def test_sequence_without_sequence_parallelism_need_not_divide_by_tp():
    layout = Layout(MeshSpec.parse("cp4 tp2"))
    assert layout.validate(seq_len=1000, sequence_parallel=False) == []


def test_tensor_parallelism_across_nodes_is_a_warning_with_the_number_of_groups():
    (issue,) = issues("dp2 tp16")
    assert (issue.level, issue.field, issue.value) == ("warning", "tp", 16)
    assert "2 of 2 groups" in issue.message
    assert "Use tp=8" in issue.fix


def test_tensor_parallelism_within_a_rack_of_72_is_no_issue():
    topology = Topology(gpus_per_node=4, nvlink_domain=72)
    assert issues("dp9 tp8", topology) == []


def test_tensor_parallelism_that_is_not_innermost_is_told_to_go_there():
    (issue,) = issues("dp4 tp8 order=pp-tp-dp-cp")
    assert "8 of" not in issue.message.split("ranks")[0]
    assert "Put tp innermost" in issue.fix


def test_experts_that_leave_the_nvlink_domain_are_a_warning():
    (issue,) = issues("dp2 tp8 ep16")
    assert (issue.field, issue.value) == ("ep", 16)
    assert "Use ep=8" in issue.fix


def test_a_node_that_is_not_full_is_a_warning():
    (issue,) = issues("dp12")
    assert (issue.field, issue.value) == ("world_size", 12)
    assert "world_size=8" in issue.fix


def test_numbers_that_are_no_counts_are_refused():
    with pytest.raises(ValueError, match="heads=0 is not a positive integer"):
        issues("tp2", heads=0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"gpus_per_node": 0}, "gpus_per_node=0"),
        ({"nvlink_domain": 0}, "nvlink_domain=0"),
        ({"gpus_per_node": 8, "nvlink_domain": 12}, "nvlink_domain=8 or nvlink_domain=16"),
    ],
)
def test_a_topology_that_does_not_nest_is_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        Topology(**arguments)


def test_the_slowest_link_of_a_group_is_found():
    topology = Topology(gpus_per_node=8, nvlink_domain=4)
    assert topology.link((3,)) == "self"
    assert topology.link((0, 1, 2, 3)) == "nvlink"
    assert topology.link((3, 4)) == "node"
    assert topology.link((7, 8)) == "network"
    assert Topology(gpus_per_node=4, nvlink_domain=72).link((0, 71)) == "nvlink"
    assert Topology(gpus_per_node=4, nvlink_domain=72).link((71, 72)) == "network"
