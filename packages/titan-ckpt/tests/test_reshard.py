import pytest
import torch
from ckpt_layouts import assert_equal, load_layout, ranks_of, save_layout
from ckpt_loop import build, full_state, train
from titan_ckpt import Checkpointer, TrainState
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

ROUNDS = [
    ("fsdp2", ["fsdp4", "fsdp3", "hsdp2x2", "ddp2"]),
    ("hsdp2x2", ["fsdp2"]),
    ("ddp2", ["fsdp2"]),
    ("fsdp2xtp2", ["fsdp3", "fsdp1xtp2"]),
]


@pytest.mark.parametrize(("layout", "others"), ROUNDS, ids=[r[0] for r in ROUNDS])
def test_a_step_saved_in_one_layout_loads_bitwise_in_others_and_in_one_plain_process(tmp_path, layout, others):
    tied = "tp" not in layout  # parallelize_module would cut the two names of one weight in two ways
    want = run_ranks(save_layout, ranks_of(layout), str(tmp_path), layout, tied)[0]
    for other in others:
        got = run_ranks(load_layout, ranks_of(other), str(tmp_path), other, tied)
        for state in got:
            assert_equal(state, want)
    assert_equal(load_layout(str(tmp_path), "plain", tied), want)


def test_a_step_saved_by_one_plain_process_loads_sharded(tmp_path):
    state = build()
    state.rng = False
    train(state, 3)
    state.data = None
    Checkpointer(tmp_path).save(3, state)
    assert_equal(run_ranks(load_layout, 2, str(tmp_path), "fsdp2")[0], full_state(state))


def save_stages(root: str) -> None:
    rank = torch.distributed.get_rank()
    net = build(tied=False).model
    stage = nn.Module()
    stage.layers = nn.ModuleDict({str(rank): net.layers[rank]})
    if rank == 0:
        stage.embed = net.embed
        stage.register_buffer("calls", net.calls)
    else:
        stage.head = net.head
    optim = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    for param in stage.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    Checkpointer(root).save(1, TrainState(model=[stage], optim=[optim], rng=False))


def test_pipeline_stages_load_into_the_whole_model_and_back(tmp_path):
    run_ranks(save_stages, 2, str(tmp_path))
    want = build(tied=False)
    for param in want.model.parameters():
        param.grad = torch.ones_like(param)
    want.optim.step()
    got = build(seed=8, tied=False)
    Checkpointer(tmp_path).restore(TrainState(model=got.model, optim=got.optim, rng=False))
    assert_equal(full_state(got), full_state(want))
    one = nn.Module()
    one.head = nn.Linear(10, 18, bias=False)
    Checkpointer(tmp_path).restore(TrainState(model=one, rng=False), strict=False)
    assert torch.equal(one.head.weight, want.model.head.weight)


def save_special(root: str) -> int:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(70.0).reshape(7, 10)
    model = nn.Module()
    model.rows = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    model.columns = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
    model.copies = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
    model.one_row = nn.Parameter(distribute_tensor(whole[:1].clone(), mesh, [Shard(0)]))
    for name, value in special_tensors().items():
        model.register_buffer(name, value)
    assert isinstance(model.rows, DTensor)
    path = Checkpointer(root).save(1, TrainState(model=model, rng=False)).path
    return sum(file.stat().st_size for file in path.glob("model-*"))


def special_tensors() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(3.5),
        "count": torch.tensor([1, 2**62]),
        "flags": torch.tensor([True, False, True]),
        "bf16": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "eight": torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
    }


def test_every_dtype_and_odd_shape_survives_and_replicas_are_stored_once(tmp_path):
    sizes = run_ranks(save_special, 2, str(tmp_path))
    data = 4 * (70 * 3 + 10) + sum(t.numel() * t.element_size() for t in special_tensors().values())
    assert data <= sizes[0] <= data + 2 * 4096
    model = nn.Module()
    for name in ("rows", "columns", "copies"):
        model.register_buffer(name, torch.full((7, 10), -1.0))
    model.register_buffer("one_row", torch.full((1, 10), -1.0))
    for name, value in special_tensors().items():
        model.register_buffer(name, torch.zeros_like(value))
    Checkpointer(tmp_path).restore(TrainState(model=model, rng=False))
    for name in ("rows", "columns", "copies"):
        assert torch.equal(getattr(model, name), torch.arange(70.0).reshape(7, 10)), name
    for name, value in special_tensors().items():
        got = getattr(model, name)
        assert got.dtype == value.dtype
        assert torch.equal(got.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def test_every_model_file_opens_with_the_plain_safetensors_library(tmp_path):
    from safetensors import safe_open

    run_ranks(save_special, 2, str(tmp_path))
    names = set()
    for file in (tmp_path / "step-00000001").glob("model-*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
            for key in opened.keys():  # noqa: SIM118 - not a dict
                opened.get_tensor(key)
    assert names == {"rows", "columns", "copies", "one_row", *special_tensors()}


def disagree(root: str) -> str:
    rank = torch.distributed.get_rank()
    model = nn.Linear(4, 4 + rank)
    try:
        Checkpointer(root).save(1, TrainState(model=model, rng=False))
    except ValueError as err:
        return str(err)
    return ""


def test_ranks_that_disagree_on_a_shape_all_get_the_same_error(tmp_path):
    errors = run_ranks(disagree, 2, str(tmp_path))
    assert all("'weight' is F32 [4, 4] on rank 0 but F32 [5, 4] on rank 1" in error for error in errors)
    assert not list(tmp_path.iterdir())


def fail_on_one_rank(root: str) -> str:
    rank = torch.distributed.get_rank()
    extra = {"bad": object()} if rank == 1 else {"bad": 1}
    try:
        Checkpointer(root).save(1, TrainState(extra=extra, rng=False))
    except TypeError as err:
        return str(err)
    return ""


def test_an_error_on_one_rank_is_raised_by_every_rank(tmp_path):
    errors = run_ranks(fail_on_one_rank, 2, str(tmp_path))
    assert errors[0].startswith("save of step 1: rank 1 failed")
    assert "extra.bad is a builtins.object" in errors[1]
