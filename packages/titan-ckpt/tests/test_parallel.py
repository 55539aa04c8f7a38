"""Large layouts: eight ranks, pipeline stages, experts. Each loads the other bit for bit."""

import pytest
import torch
from ckpt_layouts import assert_equal, load_layout, ranks_of, save_layout
from titan_ckpt import Checkpointer, LocalShard, TrainState
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


def test_eight_ranks_of_fsdp4_by_tp2_load_on_two_one_three_ranks_and_on_a_plain_cpu_process(tmp_path):
    want = run_ranks(save_layout, 8, str(tmp_path), "fsdp4xtp2", False)[0]
    for other in ("fsdp2", "fsdp1xtp2", "fsdp1", "fsdp3"):
        for got in run_ranks(load_layout, ranks_of(other), str(tmp_path), other, False):
            assert_equal(got, want)
    assert_equal(load_layout(str(tmp_path), "plain", False), want)


def test_two_ranks_load_on_eight(tmp_path):
    want = run_ranks(save_layout, 2, str(tmp_path), "fsdp2", True)[0]
    assert_equal(run_ranks(load_layout, 8, str(tmp_path), "fsdp8")[0], want)


def layers(stage: int, stages: int, seed: int) -> nn.Module:
    """Stage ``stage`` of six layers under their full names, its parameters sharded over the other mesh axis."""
    torch.manual_seed(seed)
    whole = nn.Module()
    whole.layers = nn.ModuleDict({str(i): nn.Linear(6, 10 if i % 2 else 6) for i in range(6)})
    for i in range(6):
        if i * stages // 6 != stage:
            del whole.layers[str(i)]
    return whole


def pipeline(root: str, action: str, stages: int, shards: int) -> bool:
    seed = 0 if action == "save" else 5
    if stages * shards == 1:
        model = layers(0, 1, seed)
    else:
        mesh = init_device_mesh("cpu", (stages, shards), mesh_dim_names=("pp", "dp"))
        model = layers(mesh["pp"].get_local_rank(), stages, seed)
        if shards > 1:
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["dp"])
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = TrainState(model=model, optim=optim, rng=False)
    if action == "save":
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        Checkpointer(root).save(1, state)
        return True
    Checkpointer(root).restore(state)
    reference = layers(0, 1, 0)
    for param in reference.parameters():
        param.grad = torch.ones_like(param)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    other.step()
    names = {id(param): name for name, param in reference.named_parameters()}
    moments = {names[id(param)]: values["exp_avg"] for param, values in other.state.items()}
    weights = reference.state_dict()
    return all(
        torch.equal(full(param), weights[name]) and torch.equal(full(optim.state[param]["exp_avg"]), moments[name])
        for name, param in model.named_parameters()
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (1, 3)), ((2, 1), (3, 1)), ((1, 2), (2, 2))], ids=str)
def test_pipeline_stages_by_shards_load_into_other_stages_and_shards(tmp_path, saved, loaded):
    run_ranks(pipeline, saved[0] * saved[1], str(tmp_path), "save", *saved)
    assert all(run_ranks(pipeline, loaded[0] * loaded[1], str(tmp_path), "load", *loaded))


EXPERTS, WIDTH, DIM = 8, 5, 3


def stack() -> torch.Tensor:
    return torch.arange(float(EXPERTS * WIDTH * DIM)).reshape(EXPERTS, WIDTH, DIM)


def expert_state(layout: str) -> tuple[TrainState, nn.Module]:
    """Experts over ranks: as a DTensor over (expert, shard), as plain tensors, as plain tensors sharded further."""
    model = nn.Module()
    shards = {}
    if layout == "whole":
        model.w1 = nn.Parameter(stack())
    elif layout.startswith("dtensor"):
        ep, dp = (int(n) for n in layout.removeprefix("dtensor").split("x"))
        mesh = init_device_mesh("cpu", (ep, dp), mesh_dim_names=("ep", "dp"))
        model.w1 = nn.Parameter(distribute_tensor(stack(), mesh, [Shard(0), Shard(1)]))
    else:
        ep, dp = (int(n) for n in layout.removeprefix("plain").split("x"))
        mesh = init_device_mesh("cpu", (ep, dp), mesh_dim_names=("ep", "dp"))
        mine = EXPERTS // ep
        start = mesh["ep"].get_local_rank() * mine
        model.w1 = nn.Parameter(stack()[start : start + mine].clone())
        if dp > 1:
            fully_shard(model, mesh=mesh["dp"])
        shards["w1"] = LocalShard((EXPERTS, WIDTH, DIM), (start, 0, 0))
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    return TrainState(model=model, optim=optim, rng=False, shards=shards), model


def save_experts(root: str, layout: str) -> None:
    state, model = expert_state(layout)
    for _ in range(2):
        model.w1.grad = model.w1.detach() * 0.5 + 1
        state.optim.step()
    Checkpointer(root).save(2, state)


def load_experts(root: str, layout: str) -> float:
    """The largest difference between this rank's part and the same steps taken on the whole."""
    state, model = expert_state(layout)
    start = state.shards["w1"].offsets[0] if state.shards else 0
    with torch.no_grad():
        model.w1.fill_(-1)
    Checkpointer(root).restore(state, verify="all")
    want, whole = expert_state("whole")
    for _ in range(2):
        whole.w1.grad = whole.w1.detach() * 0.5 + 1
        want.optim.step()
    got = [full(model.w1), full(state.optim.state[model.w1]["exp_avg"])]
    wanted = [whole.w1, want.optim.state[whole.w1]["exp_avg"]]
    return max(float((g - w[start : start + len(g)]).detach().abs().max()) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("saved", "ranks", "others"),
    [
        ("dtensor2x2", 4, [("plain4x1", 4), ("dtensor1x3", 3)]),
        ("plain2x1", 2, [("dtensor4x1", 4), ("plain2x2", 4)]),
        ("plain2x2", 4, [("plain4x1", 4), ("dtensor2x1", 2)]),
    ],
    ids=["dtensor", "explicit", "explicit-and-sharded"],
)
def test_experts_of_any_layout_load_in_any_other(tmp_path, saved, ranks, others):
    run_ranks(save_experts, ranks, str(tmp_path), saved)
    for layout, n in others:
        assert run_ranks(load_experts, n, str(tmp_path), layout) == [0.0] * n
    assert load_experts(str(tmp_path), "whole") == 0.0


def test_a_shard_that_does_not_fit_is_refused(tmp_path):
    state = TrainState(model=nn.Linear(4, 2), rng=False, shards={"weight": LocalShard((4, 4), (3, 0))})
    with pytest.raises(ValueError, match=r"model.weight of shape \[2, 4\] does not fit into \[4, 4\] at \[3, 0\]"):
        Checkpointer(tmp_path).save(1, state)
    state.shards = {"nothing": LocalShard((4, 4), (0, 0))}
    with pytest.raises(ValueError, match=r"shards names \['nothing'\]"):
        Checkpointer(tmp_path).save(1, state)
    state.shards = {"weight": LocalShard((4, 4), (2, 0))}
    with pytest.raises(ValueError, match="the ranks hold 8 in 1 distinct parts"):
        Checkpointer(tmp_path).save(1, state)
