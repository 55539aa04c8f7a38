"""Weights that depend on the seed and the name, and on nothing else."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from model_for_tests import TinyLM, fill
from titan_fsdp import Comm, Policy, Unit, full_state_dict, materialize, named_parameters, plan
from titan_fsdp.training import state as full_state
from titan_testing import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def wrapped_weights(tied: bool, use_init: bool) -> list[dict[str, Tensor]]:
    """Full weights in every mode, materialized before and after wrapping."""
    world = dist.get_world_size()
    init = fill if use_init else None
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")) if world > 1 else None
    results: list[dict[str, Tensor]] = []
    policies = [Policy(), Policy(mode="ddp"), Policy(units=[Unit("layers.*", shard_dim="auto")])]
    if grid is not None:
        policies.append(Policy(mode="hsdp"))
    for policy in policies:
        for before in (False, True):
            with torch.device("meta"):
                model: Any = TinyLM(tied=tied)
            if before:
                materialize(model, "cpu", init, seed=3)
            mesh = grid if policy.mode == "hsdp" else line
            model = plan(model, mesh, policy).apply(model)
            if not before:
                materialize(model, "cpu", init, seed=3)
            assert (model.head.weight is model.embed.weight) == tied
            results.append(full_state_dict(model, rank0=False))
    with torch.device("meta"):
        model = TinyLM(tied=tied)
    policy = Policy(mode="ddp", comm=Comm(ddp_hook="bf16"))
    decided = plan(model, line, policy)
    results.append(full_state_dict(decided.apply(materialize(model, "cpu", init, seed=3)), rank0=False))
    return results


@pytest.mark.parametrize("use_init", [True, False], ids=["init", "reset_parameters"])
def test_weights_are_bitwise_the_same_for_any_ranks_mode_and_order(use_init: bool) -> None:
    with torch.device("meta"):
        model = TinyLM(tied=True)
    want = full_state_dict(materialize(model, "cpu", fill if use_init else None, seed=3))
    for ranks in (1, 2, 4):
        for states in run_ranks(wrapped_weights, ranks, True, use_init):
            for state in states:
                assert state.keys() == want.keys()
                for name, tensor in want.items():
                    assert torch.equal(state[name], tensor), f"{ranks} ranks: {name}"


def test_a_skipped_parameter_is_allocated_and_not_filled() -> None:
    with torch.device("meta"):
        model = TinyLM()
    names = [name for name, _ in named_parameters(model)]
    filled: list[str] = []

    def note(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        filled.append(name)
        tensor.zero_()

    materialize(model, "cpu", note, skip=lambda name: name == names[0])
    assert filled == names[1:]
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_the_seed_and_the_name_decide() -> None:
    a, b = (dict(named_parameters(materialize(TinyLM(), "cpu", None, seed=s))) for s in (0, 1))
    assert not torch.equal(a["layers.0.up.weight"], b["layers.0.up.weight"])
    assert not torch.equal(a["layers.0.up.weight"], a["layers.1.up.weight"])


def test_wrappers_do_not_change_weights() -> None:
    with torch.device("meta"):
        model: Any = TinyLM()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    wrapped = dict(named_parameters(materialize(model, "cpu", fill)))
    plain = dict(named_parameters(materialize(TinyLM(), "cpu", fill)))
    assert wrapped.keys() == plain.keys()
    assert all(torch.equal(wrapped[n], plain[n]) for n in plain)


def test_the_global_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    model = TinyLM()
    after = torch.get_rng_state()
    materialize(model, "cpu", None)
    materialize(model, "cpu", fill)
    assert not torch.equal(before, after)
    assert torch.equal(torch.get_rng_state(), after)


class Rotary(nn.Module):
    """As most code writes it: the table is made in the constructor, and nothing fills it again."""

    def __init__(self, dim: int, base: float = 10000.0, device: torch.device | None = None) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("table", base ** -(torch.arange(0, dim, 2, device=device) / dim), persistent=False)
        self.cache = torch.arange(dim, device=device)


class Resets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2))
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.register_buffer("steps", torch.ones(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.table = torch.arange(3.0)
        nn.init.ones_(self.steps)


class Model(nn.Module):
    """The convention of Hugging Face and many others; not a subclass of anything of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.rotary = Rotary(8, base=500.0)
        self.token = nn.Parameter(torch.full((4,), 3.0))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
        if isinstance(module, Model):
            nn.init.constant_(module.norm.weight, 2.0)


def never_a_buffer(name: str, tensor: Tensor, _: torch.Generator) -> None:
    assert not any(buffer in name for buffer in ("table", "steps", "running")), name
    tensor.zero_()


@pytest.mark.parametrize("init", [None, never_a_buffer], ids=["own-methods", "init"])
def test_buffers_on_meta_hold_what_their_module_computes(init: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rotary(8, base=500.0), Resets(), nn.BatchNorm1d(4))
    materialize(model, "cpu", init)
    rotary, resets, norm = model
    want = Rotary(8, base=500.0)
    assert torch.equal(rotary.table, want.table)
    assert torch.equal(rotary.cache, want.cache), "a plain tensor attribute on meta is computed as well"
    assert resets.table.tolist() == [0.0, 1.0, 2.0]
    assert resets.steps.tolist() == [1.0]
    assert norm.running_mean.tolist() == [0.0] * 4
    assert norm.running_var.tolist() == [1.0] * 4
    assert norm.num_batches_tracked.item() == 0


def test_buffers_that_are_not_on_meta_keep_their_values() -> None:
    with torch.device("meta"):
        model = Resets()
    model.steps = torch.full((1,), 5.0)
    materialize(model, "cpu", never_a_buffer)
    assert model.table.tolist() == [0.0, 1.0, 2.0]
    assert model.steps.tolist() == [5.0]


class Scaled(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", table)


def test_a_buffer_of_several_modules_keeps_its_value_in_each_and_stays_one_tensor() -> None:
    table = torch.tensor([1.0, 2.0, 3.0])
    with torch.device("meta"):
        model = nn.ModuleList([Scaled(table) for _ in range(3)])
    for place in ("cpu", "meta"):
        materialize(model, "cpu", never_a_buffer, skip=lambda name: True, buffer_device=place)
        tables = [block.get_buffer("table") for block in model]
        assert all(found.device.type == place for found in tables)
        assert place == "meta" or [found.tolist() for found in tables] == [[1.0, 2.0, 3.0]] * 3
        assert {id(found) for found in tables} == {id(tables[0])}


def test_buffers_can_be_elsewhere_than_parameters() -> None:
    """With CPU offload FSDP brings parameters to the device, and nothing else. meta stands for that device."""
    with torch.device("meta"):
        model = nn.Sequential(Rotary(8), Resets(), nn.BatchNorm1d(4))
    model[1].steps = torch.full((1,), 5.0)
    materialize(model, "cpu", never_a_buffer, skip=lambda name: True, buffer_device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert model[0].cache.is_meta


def test_the_models_own_init_weights_overrides_reset_parameters() -> None:
    with torch.device("meta"):
        model = Model()
    materialize(model, "cpu", None)
    assert (model.linear.weight == 0.5).all()
    assert (model.norm.weight == 2.0).all(), "a call on the parent may fill a child's parameter"
    assert (model.norm.bias == 0.0).all()
    assert (model.attention.in_proj_bias == 0.0).all(), "nn.MultiheadAttention spells it _reset_parameters"
    assert 0 < model.attention.in_proj_weight.std() < 1


def test_a_parameter_takes_the_value_of_its_constructor_where_nothing_else_fills_it() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Model())
    materialize(model, "cpu", None)
    assert model[0].token.tolist() == [3.0] * 4


class Hidden(nn.Module):
    """The base is not kept, so a second module would silently have another table."""

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("table", base ** torch.arange(dim))


class Doubled(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = 2 * dim
        self.register_buffer("table", torch.arange(2 * dim))


class Half(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))

    def reset_parameters(self) -> None:
        self.table[:2] = 1.0


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: Hidden(4, base=2.0), "constructor argument 'base' is not kept as an attribute"),
        (lambda: Doubled(4), "gives dim=16 instead of 8"),
        (lambda: Half(4), r"constructor takes \*dims"),
    ],
    ids=["hidden-argument", "changed-argument", "half-filled"],
)
def test_a_buffer_whose_value_is_unknown_is_refused_before_anything_is_allocated(build: Any, why: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), build())
    with pytest.raises(ValueError, match=rf"buffer '1\.table' of \w+ is on meta.*{why}.*reset_parameters\(\) method"):
        materialize(model, "cpu", fill)
    assert model[0].weight.is_meta


class Bare(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(size))


def test_a_parameter_whose_initial_value_is_unknown_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Bare(3))
    with pytest.raises(ValueError, match=r"module '0' \(Bare\) has parameters \['scale'\] and no reset_parameters"):
        materialize(model, "cpu", None)


def test_a_method_that_leaves_part_of_a_parameter_unset_is_named() -> None:
    class Part(Bare):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale[:1])

    with torch.device("meta"):
        model = Part(3)
    with pytest.raises(ValueError, match=r"reset_parameters\(\) of module 'root' leaves elements of 'scale' unset"):
        materialize(model, "cpu", None)


def test_materializing_on_meta_is_refused() -> None:
    with pytest.raises(ValueError, match="would allocate nothing"):
        materialize(TinyLM(), "meta", fill)


class WithExtra(nn.Linear):
    def get_extra_state(self) -> dict[str, Any]:
        return {"count": 7, "seen": [1]}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_extra_state_that_is_no_tensor_is_part_of_the_full_state() -> None:
    state = full_state_dict(WithExtra(2, 2))
    assert state["_extra_state"] == {"count": 7, "seen": [1]}


def gathered_on() -> list[str]:
    """Where the shards of a full state were gathered: without, and with another device than theirs to communicate on."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)]))
    gathered: list[str] = []

    def gather(value: DTensor) -> Tensor:
        gathered.append(value.to_local().device.type)
        return torch.ones(2, 2)

    for place in ("cpu", "meta"):  # meta stands for the accelerator
        with (
            mock.patch.object(DTensor, "full_tensor", gather),
            mock.patch.object(full_state, "compute_device", lambda value, place=place: torch.device(place)),
        ):
            assert full_state_dict(layer)["weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    return gathered


def test_offloaded_shards_are_gathered_on_the_device_that_communicates() -> None:
    assert run_ranks(gathered_on, 1) == [["cpu", "meta"]]
