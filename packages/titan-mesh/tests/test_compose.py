"""torch's own parallelisms accept these meshes, and give the single process's gradients, in any order of axes."""

import pytest
import torch
import torch.distributed as dist
from titan_mesh import Layout, MeshSpec, build
from titan_testing import assert_close, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SAMPLES = 8


def model_and_input() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(SAMPLES, 8)


def parallel_gradients(text: str) -> dict[str, Tensor]:
    model, samples = model_and_input()
    with build(Layout(MeshSpec.parse(text), world_size=dist.get_world_size())) as mesh:
        if (tp := mesh.get("tp")) is not None:
            parallelize_module(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh.fsdp_mesh())
        mine = samples.chunk(mesh.size("loss"))[mesh.rank_in("loss")]
        model(mine).square().mean().backward()
        return {
            name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad)
            for name, p in model.named_parameters()
        }


@pytest.mark.parametrize(
    "text",
    [
        "dp4",
        "dp_replicate2 dp2",
        "dp_replicate4",
        "dp2 tp2",
        "dp2 cp2",
        "tp4",
        "dp2 tp2 order=tp-dp_shard-cp-dp_replicate-pp",
        "dp_replicate2 dp2 order=dp_shard-dp_replicate-pp-cp-tp",
    ],
)
def test_fsdp_and_tensor_parallel_gradients_equal_one_process(text):
    check_gradients(4, text)


@pytest.mark.parametrize(
    "text",
    [
        "dp_replicate2 dp2 tp2",
        # fsdp's axes apart and tp between them; replicas innermost
        "dp2 cp2 tp2 order=pp-dp_shard-tp-cp-dp_replicate",
        "dp_replicate2 dp2 tp2 order=tp-cp-dp_shard-dp_replicate-pp",
    ],
)
def test_fsdp_and_tensor_parallel_gradients_equal_one_process_on_eight_ranks(text):
    check_gradients(8, text)


def check_gradients(world_size: int, text: str) -> None:
    model, samples = model_and_input()
    model(samples).square().mean().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for got in run_ranks(parallel_gradients, world_size, text):
        assert_close(got, want)


def round_trip(text: str) -> list[list[int]]:
    """Scatter by coordinate without communication, gather by group rank: equal only if the two orders agree."""
    whole = torch.arange(8)
    found = []
    with build(Layout(MeshSpec.parse(text), world_size=dist.get_world_size())) as mesh:
        for names in ("fsdp", "loss", "tp", "dp"):
            sharded = distribute_tensor(whole, mesh[names], [Shard(0)], src_data_rank=None)
            found.append(sharded.full_tensor().tolist())
        pair = distribute_tensor(whole, mesh["tp", "dp_shard"], [Shard(0), Shard(0)], src_data_rank=None)
        found.append(pair.full_tensor().tolist())
    return found


@pytest.mark.parametrize(
    "text", ["dp2 cp2 tp2 order=tp-cp-pp-dp", "dp2 cp2 tp2 order=cp-tp-dp_shard-pp-dp_replicate", "dp2 cp2 tp2"]
)
def test_a_tensor_scattered_by_coordinate_comes_back_in_order(text):
    for found in run_ranks(round_trip, 8, text):
        assert found == [list(range(8))] * 5
