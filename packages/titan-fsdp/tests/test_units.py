"""What units="auto" takes for blocks, mostly on meta without a process group."""

from typing import Any

import pytest
import torch
from model_for_tests import Block, TinyLM
from titan_fsdp import MixedPrecision, Policy, Unit, plan
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in plan(model, {"shard": 4}).units]


def warnings(model: nn.Module) -> str:
    return "\n".join(plan(model, {"shard": 4}).warnings)


class Stack(nn.Module):
    """A tower: blocks, a norm of its own, and an embedding that both towers share."""

    def __init__(self, embed: nn.Embedding, layers: int = 6) -> None:
        super().__init__()
        self.embed = embed
        self.block = nn.ModuleList(Block(8) for _ in range(layers))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.Sequential(self.embed, *self.block)(x))


class TwoTowers(nn.Module):
    """As T5: encoder and decoder are of one class, so they look like two repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 8)
        self.encoder, self.decoder = Stack(self.shared), Stack(self.shared)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.shared.weight


def test_towers_of_one_class_are_searched_for_their_blocks() -> None:
    blocks = [f"{tower}.block.{i}" for tower in ("encoder", "decoder") for i in range(6)]
    assert names(TwoTowers()) == [*blocks, "root"]
    root = plan(TwoTowers(), {"shard": 4}).units[-1]
    assert {p.fqn for p in root.params} > {"shared.weight"}


class Held(nn.Module):
    """Holds parameters, and leaves the computing to the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


class Mixing(nn.Module):
    """Parameters in modules without forward: before the blocks, among them, after them, and in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ParameterDict({"scale": torch.ones(8)})
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), Held()])
        self.mix = nn.ParameterList([torch.ones(8)])
        self.holders = nn.ModuleList([Held(), Held()])
        self.last = Held()
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[2].scale * self.layers[1](self.layers[0](self.first["scale"] * x))
        return self.head(x * self.mix[0] * self.holders[0].scale + self.holders[1].scale * self.last.scale)


def run_mixing() -> list[str]:
    model = Mixing()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    decided = plan(model, mesh)
    decided.apply(model)(torch.ones(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return [unit.name for unit in decided.units]


def test_modules_without_forward_are_gathered_with_the_unit_around_them() -> None:
    assert run_ranks(run_mixing, 1) == [["layers.0", "layers.1", "head", "root"]]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(units=["mix"]), "'mix' is a ParameterList, which has no forward to gather for. Leave it out"),
        (Policy(units=["holders"]), "'holders' is a ModuleList, .* Use 'holders.*'"),
        (Policy(units=[Held]), "'layers.2' is a Held, which has no forward to gather for. Leave it out"),
        (
            Policy(mp=MixedPrecision(param="bf16", keep_fp32=["mix.*"])),
            "'mix' is a ParameterList.*Match the module around it",
        ),
        (Policy(mp=MixedPrecision(param="bf16", keep_fp32=["last"])), "'last' is a Held.*Match the module around it"),
    ],
)
def test_naming_a_module_without_forward_is_refused(policy: Policy, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(Mixing(), {"shard": 4}, policy)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(self.norm(x)) for expert in self.experts)


def test_experts_are_not_taken_out_of_their_block_because_ranks_may_skip_them() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(MoEBlock() for _ in range(2))
    assert names(model) == ["layers.0", "layers.1", "root"]
    assert "layers.0 (50%), layers.1 (50%)" in warnings(model)


def test_stages_of_nested_sequentials_are_cut_where_they_are_large() -> None:
    def layer(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU())

    def stage(width: int, layers: int) -> nn.Module:
        return nn.Sequential(*(layer(width) for _ in range(layers)))

    model = nn.Sequential(stage(4, 3), stage(16, 6))
    assert names(model) == ["0", *(f"1.{i}" for i in range(6)), "root"]


def test_a_flat_network_is_one_unit_with_a_warning() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    assert names(model) == ["root"]
    assert "no repeated block was found" in warnings(model)


def test_one_block_used_many_times_is_one_unit() -> None:
    block = Block(8)
    model = nn.Module()
    model.layers = nn.ModuleList([block] * 4)
    model.head = nn.Linear(8, 8)
    assert names(model) == ["layers.0", "head", "root"]


def test_blocks_tied_to_each_other_are_one_unit_and_blocks_tied_to_the_rest_stay_in_the_root() -> None:
    model = TinyLM(layers=4)
    model.layers[3].up.weight = model.layers[1].up.weight
    assert names(model) == ["embed", "layers.0", "layers.1+layers.3", "layers.2", "norm+head", "root"]
    model.bridge = nn.Linear(18, 6, bias=False)
    model.bridge.weight = model.layers[0].down.weight
    assert names(model) == ["embed", "layers.1+layers.3", "layers.2", "root"]


def test_a_unit_with_more_than_a_fifth_of_the_parameters_is_warned_about() -> None:
    with torch.device("meta"):
        model: Any = TinyLM(layers=12, dim=32)
    assert "a fifth" not in warnings(model)
    with torch.device("meta"):
        model.embed = nn.Embedding(10_000, 32)
    assert "more than a fifth of the parameters are gathered at once in embed (81%)" in warnings(model)


def test_a_module_that_is_named_beside_auto_is_one_unit_with_the_blocks_inside_it() -> None:
    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Stack(nn.Embedding(4, 8), 3)
            self.layers = nn.ModuleList(Block(8) for _ in range(3))

    found = plan(Seeing(), {"shard": 4}, Policy(units=["auto", "encoder"])).units
    assert [unit.name for unit in found if unit.name] == ["encoder", *(f"layers.{i}" for i in range(3)), "root"]


def test_a_module_that_is_named_is_taken_out_of_the_unit_that_was_found() -> None:
    found = plan(TinyLM(), {"shard": 4}, Policy(units=["auto", "head", Unit("layers.0", reshard=False)])).units
    assert [unit.name for unit in found] == ["embed", "layers.0", "layers.1", "norm", "head", "root"]
    assert [unit.reshard for unit in found[1:3]] == [False, True]
