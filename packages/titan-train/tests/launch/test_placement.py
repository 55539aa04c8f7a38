import pytest
from titan_mesh import Layout, MeshSpec
from titan_train.parallel.layout.degrees import check_placement


def layout(**degrees):
    return Layout(MeshSpec(**degrees), world_size=16)


def test_inner_axes_stay_on_a_node_and_outer_ones_may_cross():
    assert check_placement(layout(pp=2, dp_shard=2, cp=2, tp=2), 4) == []
    assert check_placement(layout(dp_shard=16), 4) == []


def test_a_tensor_parallel_group_across_nodes_is_refused_with_the_nearest_number_of_ranks():
    with pytest.raises(
        ValueError, match=r"launch.nproc=6 ranks of a node are not whole groups of 4. Use launch.nproc=4"
    ):
        check_placement(layout(dp_shard=4, tp=4), 6)
    with pytest.raises(ValueError, match=r"Use launch.nproc=8"):
        check_placement(layout(dp_shard=2, tp=8), 4)


def test_sequences_shared_across_nodes_are_noted():
    (note,) = check_placement(layout(dp_shard=2, cp=4, tp=2), 4)
    assert "ranks (0, 2, 4, 6): slower" in note
