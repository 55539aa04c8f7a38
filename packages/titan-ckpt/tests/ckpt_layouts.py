"""The loop's model under every kind of sharding: saved in one layout, loaded in another."""

import torch
from ckpt_loop import Net, finish, full_state
from titan_ckpt import Checkpointer, TrainState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def sharded(layout: str, tied: bool = True) -> TrainState:
    """The loop's model under a layout such as "fsdp2", "hsdp2x2", "fsdp2xtp2", "ddp2", "plain"."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    model: nn.Module = Net(tied=tied)
    if layout.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    elif layout != "plain":
        dims = [int(n) for n in layout.translate(str.maketrans("", "", "fhsdtp")).split("x")]
        names = {"fsdp": ("dp",), "hsdp": ("rep", "dp"), "tp": ("dp", "tp")}["tp" if "tp" in layout else layout[:4]]
        mesh = init_device_mesh("cpu", tuple(dims), mesh_dim_names=names)
        if "tp" in names:
            plan = {}
            for i in range(2):
                plan |= {f"layers.{i}.0": ColwiseParallel(), f"layers.{i}.2": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            mesh = mesh["dp"]
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    state = finish(model, rank)
    state.rng = False
    state.data = None if layout != "plain" else state.data
    return state


def save_layout(root: str, layout: str, tied: bool) -> dict[str, torch.Tensor]:
    state = sharded(layout, tied)
    model, optim = state.model, state.optim
    model.eval()  # no dropout: every layout computes the same
    for i in range(3):
        ids = torch.randint(18, (4, 6), generator=torch.Generator().manual_seed(i))
        optim.zero_grad()
        model(ids).square().sum().backward()
        optim.step()
        state.sched.step()
    Checkpointer(root).save(3, state)
    return whole(state)


def whole(state: TrainState) -> dict[str, torch.Tensor]:
    return {k.replace(".module.", "."): v for k, v in full_state(state).items()}


def load_layout(root: str, layout: str, tied: bool = True) -> dict[str, torch.Tensor]:
    state = sharded(layout, tied)
    with torch.no_grad():
        for param in state.model.parameters():
            param.fill_(float("nan"))
    state.data = None
    assert Checkpointer(root).restore(state, verify="all") == 3
    assert state.sched.last_epoch == 3
    return whole(state)


def ranks_of(layout: str) -> int:
    n = 1
    for part in layout.split("x"):
        n *= int("".join(c for c in part if c.isdigit()))
    return n


def assert_equal(got, want):
    assert got.keys() == want.keys()
    different = [k for k in got if not torch.equal(got[k], want[k])]
    assert not different, different
