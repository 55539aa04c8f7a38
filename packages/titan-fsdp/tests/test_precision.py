"""Dtypes of compute, reduction and output; gradients compressed on the way."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from model_for_tests import TinyLM, batches, fill, loss_of
from titan_fsdp import (
    CollectiveCounter,
    Collectives,
    Comm,
    MixedPrecision,
    Policy,
    Unit,
    materialize,
    named_parameters,
    plan,
)
from titan_fsdp.wrapping.borders import cast_at_borders
from titan_testing import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


def one_step(policy: Policy) -> tuple[dict[str, Tensor], Collectives, dict[str, torch.dtype]]:
    """Full gradients, counted collectives, and the dtypes that the modules saw."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, names = ((2, world // 2), ("r", "s")) if policy.mode == "hsdp" else ((world,), ("s",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model: Any = materialize(plan(TinyLM(), mesh, policy).apply(TinyLM()), "cpu", fill)
    seen: dict[str, torch.dtype] = {}

    def look(name: str) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            seen.setdefault(f"{name}.weight", module.weight.dtype)
            seen.setdefault(name, output.dtype)

        return hook

    model.layers[0].up.register_forward_hook(look("up"))
    model.layers[0].norm.register_forward_hook(look("norm"))
    model.head.register_forward_hook(look("head"))
    tokens, targets = batches(world, 1)
    with CollectiveCounter() as counter:
        output = model(tokens[0, rank])
        seen["output"] = output.dtype
        torch.nn.functional.cross_entropy(output.flatten(0, 1).float(), targets[0, rank].flatten()).backward()
    grads = {n: p.grad.full_tensor() for n, p in named_parameters(model)}
    return grads, counter.total, seen


def several(policies: list[Policy]) -> list[Any]:
    return [one_step(policy) for policy in policies]


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    flat = [torch.cat([g[n].double().flatten() for n in want]) for g in (got, want)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def test_bf16_reduce_scatter_halves_the_bytes_with_small_error() -> None:
    policies = [
        Policy(mode=mode, comm=Comm(reduce_scatter=comm), grad_divide=divide)
        for mode in ("fsdp", "hsdp")
        for divide in ("mean", "sum")
        for comm in ("native", "bf16")
    ]
    results = run_ranks(several, 4, policies)[0]
    for native, compressed in zip(results[::2], results[1::2], strict=True):
        assert compressed[1].all_to_all_bytes * 2 == native[1].reduce_scatter_bytes
        assert compressed[1].reduce_scatter_bytes == 0
        error = relative_error(compressed[0], native[0])
        # one rounding to bfloat16: at most 2^-9 = 2e-3 relative
        assert 0 < error < 5e-3, error


def test_parameters_compute_in_bf16_and_kept_modules_in_fp32() -> None:
    policies = [
        Policy(mode=mode, mp=MixedPrecision(param="bf16", output="fp32", keep_fp32=["*norm*"]))
        for mode in ("fsdp", "ddp")
    ]
    for grads, _, seen in run_ranks(several, 2, policies)[1]:
        assert seen["up.weight"] == seen["up"] == torch.bfloat16
        assert seen["norm.weight"] == torch.float32
        assert seen["head"] == torch.bfloat16
        assert seen["output"] == torch.float32
        assert {g.dtype for g in grads.values()} == {torch.float32}
        model = materialize(TinyLM(), "cpu", fill)
        tokens, targets = batches(2, 1)
        (loss_of(model, tokens[0], targets[0])).backward()
        want = {n: p.grad for n, p in model.named_parameters()}
        # bfloat16 compute: 2^-9 a rounding, a dozen roundings deep
        assert relative_error(grads, want) < 3e-2


class TwoNorms(torch.nn.Module):
    """Both norms of a block are kept in one nested unit, whose second module runs apart from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)
        self.up, self.down = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm2(self.up(self.norm1(x))))


def run_two_norms() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for mode in ("fsdp", "ddp"):
        model: Any = torch.nn.Sequential(TwoNorms(), TwoNorms())
        policy = Policy(mode=mode, units=["*"], mp=MixedPrecision(param="bf16", keep_fp32=["*.norm?"]))
        seen: list[tuple[torch.dtype, torch.dtype]] = []
        decided = plan(model, mesh, policy)
        model = materialize(decided.apply(model), "cpu", fill)
        for norm in (model[1].norm1, model[1].norm2):
            norm.register_forward_hook(lambda m, args, out, seen=seen: seen.append((args[0].dtype, out.dtype)))
        with CollectiveCounter() as counter:
            model(torch.ones(2, 4)).float().square().sum().backward()
        assert seen == [(torch.float32, torch.bfloat16)] * 2
        assert counter.total == decided.collectives()
        assert [u.name for u in decided.units[:2]] == ["0.norm1+0.norm2", "0"]


def test_two_norms_of_a_block_share_one_gather_and_both_compute_in_fp32() -> None:
    run_ranks(run_two_norms, 2)


class Choice(NamedTuple):
    weights: Tensor
    experts: Tensor


class Chooser(torch.nn.Linear):
    def forward(self, input: Tensor) -> Choice:
        return Choice(*super().forward(input).topk(2))


class Router(Chooser):
    keeps_output_dtype = True


class Loss(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).square().sum()


@pytest.mark.parametrize(("kind", "want"), [(Chooser, torch.bfloat16), (Router, torch.float32), (Loss, torch.float32)])
def test_a_kept_module_hands_on_bf16_but_for_a_loss_or_if_it_keeps_its_dtype(
    kind: type[Any], want: torch.dtype
) -> None:
    module = kind(4, 4)
    cast_at_borders([module], torch.float32, torch.bfloat16)
    found = module(torch.ones(2, 4, dtype=torch.bfloat16))
    assert (found.weights if isinstance(found, Choice) else found).dtype == want


def test_kept_modules_add_one_small_gather_a_unit_and_the_plan_knows() -> None:
    policy = Policy(mp=MixedPrecision(param="bf16", keep_fp32=["layers.*.norm"]))
    _, counted, _ = run_ranks(several, 2, [policy])[0][0]
    assert counted == plan(TinyLM(), {"shard": 2}, policy).collectives()


@pytest.mark.parametrize("name", ["embed", "head", "embed.weight", "head.weight"])
def test_a_tied_weight_is_kept_in_fp32_with_all_modules_that_hold_it_by_any_name(name: str) -> None:
    policy = Policy(mp=MixedPrecision(param="bf16", keep_fp32=[name]))
    units = {unit.name: unit.param_dtype for unit in plan(TinyLM(tied=True), {"shard": 2}, policy).units if unit.params}
    assert units.pop("embed+head") == torch.float32
    assert set(units.values()) == {torch.bfloat16}


class Tower(torch.nn.Module):
    """Has units of its own inside, and parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(TwoNorms() for _ in range(2))
        self.norm1 = torch.nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm1(x)


def towers() -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"encoder": Tower(), "decoder": Tower()})


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("encoder", {"encoder", "encoder.layers.0", "encoder.layers.1"}),
        ("encoder.layers", {"encoder.layers.0", "encoder.layers.1"}),
        ("*.layers.1", {"encoder.layers.1", "decoder.layers.1"}),
    ],
)
def test_units_inside_a_kept_module_or_container_are_kept(keep: str, kept: set[str]) -> None:
    policy = Policy(units=["*.layers.*"], mp=MixedPrecision(param="bf16", keep_fp32=[keep]))
    units = plan(towers(), {"shard": 2}, policy).units
    assert {unit.name for unit in units if unit.param_dtype == torch.float32} == kept


def test_a_unit_on_a_mesh_of_its_own_inside_a_kept_module_is_kept() -> None:
    policy = Policy(
        units=["*.layers.*", Unit("*.layers.*.up", mesh="experts")],
        mp=MixedPrecision(param="bf16", keep_fp32=["encoder.layers.0"]),
    )
    units = plan(towers(), {"shard": 4}, policy, meshes={"experts": {"shard": 2}}).units
    kept = {unit.name: unit.mesh for unit in units if unit.param_dtype == torch.float32}
    assert kept == {"encoder.layers.0": None, "encoder.layers.0.up": "experts"}


def run_kept_tower() -> None:
    policy = Policy(units=["layers.*", "norm1"], mp=MixedPrecision(param="bf16", keep_fp32=["layers"]))
    nested = Policy(units=["0.layers.*"], mp=MixedPrecision(param="bf16", keep_fp32=["0"]))
    for model, chosen, between in (
        (Tower(), policy, torch.bfloat16),
        (torch.nn.Sequential(Tower(), torch.nn.Linear(4, 4)), nested, torch.float32),
    ):
        wrapped: Any = materialize(plan(model, init_device_mesh("cpu", (2,)), chosen).apply(model), "cpu", fill)
        seen: list[torch.dtype] = []
        tower = wrapped[0] if between == torch.float32 else wrapped
        tower.layers[0].register_forward_hook(lambda m, args, out, seen=seen: seen.append(out.dtype))
        output = wrapped(torch.ones(2, 4))
        output.float().square().sum().backward()
        assert seen == [between]
        assert output.dtype == torch.bfloat16


def test_what_lies_in_a_kept_module_hands_on_float32() -> None:
    run_ranks(run_kept_tower, 2)
