import itertools

import pytest
import torch
from titan_ckpt.state.sharding import Cut, local_part, shard_runs
from titan_testing import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


@pytest.mark.parametrize("length", range(12))
def test_cuts_in_any_order_partition_every_length(length):
    for parts, stride in itertools.product((1, 2, 3, 4), (0, 2, 3)):
        seen = []
        for part in range(parts):
            for start, n in shard_runs(length, [Cut(parts, part, stride)]):
                seen += range(start, start + n)
        assert sorted(seen) == list(range(length))


def test_a_strided_cut_takes_a_part_of_every_piece():
    assert shard_runs(8, [Cut(2, 0, 2)]) == [(0, 2), (4, 2)]
    assert shard_runs(8, [Cut(2, 1, 2)]) == [(2, 2), (6, 2)]


def boxes_hold_the_right_values() -> list[str]:
    """Each rank rebuilds, from its boxes, what torch put into its local tensor. Contract with torch's private layout."""
    wrong = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = [Shard(0), Shard(1), Replicate()]
    for rows, columns in [(8, 8), (7, 5), (3, 9), (1, 4)]:
        whole = torch.arange(float(rows * columns)).reshape(rows, columns)
        for pair in itertools.product(placements, placements):
            wrong += check(distribute_tensor(whole, mesh, list(pair)), whole, f"{rows}x{columns} {pair}")
    for rows in (2, 3, 5, 8, 9, 10, 16, 18):
        linear = torch.nn.Linear(6, rows, bias=False)
        whole = torch.arange(float(rows * 6)).reshape(rows, 6)
        parallelize_module(linear, mesh["tp"], ColwiseParallel())
        with torch.no_grad():
            local = whole.chunk(2)[mesh["tp"].get_local_rank()] if rows > 1 else whole
            linear.weight.to_local().copy_(local)
        fully_shard(linear, mesh=mesh["dp"])  # gives _StridedShard
        wrong += check(linear.weight, whole, f"fsdp over tp, {rows} rows")
    return wrong


def check(tensor, whole, name) -> list[str]:
    part = local_part(tensor, name)
    wrong = []
    for i, (chunk, _) in enumerate(part.boxes):
        want = whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
        if not torch.equal(part.view(i), want):
            wrong.append(name)
    if sum(chunk.numel for chunk, _ in part.boxes) != tensor.to_local().numel():
        wrong.append(f"{name}: size")
    return wrong


def test_boxes_hold_what_torch_2_11_to_2_15_put_into_local_tensors_uneven_and_strided_too():
    assert run_ranks(boxes_hold_the_right_values, 4) == [[]] * 4


def partial() -> str:
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    try:
        local_part(DTensor.from_local(torch.ones(2), mesh, [Partial()]), "model.x")
    except ValueError as err:
        return str(err)
    return ""


def test_a_partial_placement_is_refused_with_the_name():
    assert all("model.x has placement" in text for text in run_ranks(partial, 2))


def test_sparse_tensors_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match="Call to_dense"):
        local_part(torch.eye(3).to_sparse(), "x")
