"""Misuse that torch lets pass, or reports far from the cause, is an error before step 1."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_for_tests import TinyLM, batches, fill, loss_of
from titan_fsdp import (
    Comm,
    Policy,
    accumulate,
    check_optimizer,
    drop_unreached,
    eval_mode,
    materialize,
    named_parameters,
    plan,
    verify,
)
from titan_testing import run_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def misuses() -> None:
    line = mesh()
    tokens, _ = batches(1, 1)

    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters())
    model = plan(model, line).apply(model)
    with pytest.raises(ValueError, match="built before wrapping"):
        check_optimizer(model, optimizer)
    check_optimizer(model, torch.optim.AdamW(model.parameters()))
    other = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="1 of the optimizer's 1 parameters"):
        check_optimizer([model], other)

    with pytest.raises(ValueError, match="already wrapped by FSDP2"):
        plan(model, line)
    with pytest.raises(ValueError, match="'root' is already wrapped by Distributed"):
        plan(DistributedDataParallel(TinyLM()), line)
    inner: Any = TinyLM()
    fully_shard(inner.layers[0], mesh=line)
    with pytest.raises(ValueError, match=r"'layers\.0' is already wrapped by FSDP2"):
        plan(inner, line)

    # tensor parallelism after FSDP, by replacing a parameter
    model = TinyLM()
    model = plan(model, line).apply(model)
    model.head.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(11, 6), line, [Replicate()]))
    with pytest.raises(ValueError, match=r"'head\.weight' changed after FSDP was applied.*come before plan\.apply"):
        model(tokens[0, 0])

    # wrapping around something already wrapped: a module without parameters shows it does not need any
    model = TinyLM()
    model = plan(model, line, Policy(units=["layers.*"])).apply(model)
    model.layers.add_module("extra", torch.nn.Identity())
    fully_shard(model.layers.extra, mesh=line)
    with pytest.raises(ValueError, match=r"'layers\.extra' was wrapped after the modules around it \(top-down\)"):
        model(tokens[0, 0])

    # tensor parallelism over the data-parallel axis
    model = TinyLM()
    model.head.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(11, 6), line, [Shard(0)]))
    with pytest.raises(ValueError, match="must use another axis"):
        plan(model, line)

    with torch.device("meta"):
        model = TinyLM()
    with pytest.raises(ValueError, match=r"before plan\.apply"):
        plan(model, line, Policy(mode="ddp", comm=Comm(ddp_hook="bf16"))).apply(model)
    model = plan(model, line).apply(model)
    with pytest.raises(ValueError, match="still on the meta device"):
        model(tokens[0, 0])
    materialize(model, "cpu", fill)
    model(tokens[0, 0])

    with pytest.raises(ValueError, match="mode='fsdp' has none"), accumulate(model, 0, 1, "hsdp-ar"):
        pass
    with pytest.raises(ValueError, match="index=3"), accumulate(model, 3, 2):
        pass
    with pytest.raises(ValueError, match="needs a 2-D mesh"):
        plan(TinyLM(), line, Policy(mode="hsdp"))
    with pytest.raises(ValueError, match="Plan again"):
        plan(TinyLM(), {"shard": 8}).apply(TinyLM(), line)
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="cpu-nopin"):
            plan(TinyLM(), line, Policy(offload="cpu")).apply(TinyLM())


def test_misuse_is_an_error_before_the_first_step() -> None:
    run_ranks(misuses, 1)


def evaluation_and_verification() -> None:
    line = mesh()
    model: Any = TinyLM()
    decided = plan(model, line, Policy(reshard="never"))
    model = materialize(decided.apply(model), "cpu", fill)
    tokens, targets = batches(2, 1)
    rank = dist.get_rank()
    with eval_mode(model):
        assert not model.training
        assert not model(tokens[0, rank]).requires_grad
        assert not isinstance(model.layers[0].up.weight, DTensor)  # kept gathered after forward
    assert model.training
    assert all(isinstance(p, DTensor) for _, p in named_parameters(model))

    def step() -> None:
        loss_of(model, tokens[0, rank], targets[0, rank]).backward()

    step()
    before = {n: p.grad.full_tensor() for n, p in named_parameters(model)}
    with eval_mode(model):
        model(tokens[0, rank])
    for name, parameter in named_parameters(model):
        assert torch.equal(parameter.grad.full_tensor(), before[name]), name
    if not hasattr(model, "reset_iter_state"):
        step()  # torch 2.11 gathers once for nothing after an evaluation
    seen = verify(decided, model, step)
    assert seen.ok, seen.report()
    other = plan(TinyLM(), line, Policy(reshard="always"))
    seen = verify(other, model, step)
    assert not seen.ok
    assert "all_gather: planned" in seen.report()


def test_evaluation_frees_kept_parameters_and_verify_tells_plans_apart() -> None:
    run_ranks(evaluation_and_verification, 2)


def frozen_and_ignored() -> None:
    line = mesh()
    for mode in ("fsdp", "ddp"):
        model: Any = TinyLM()
        model.embed.weight.requires_grad_(False)
        decided = plan(model, line, Policy(mode=mode, ignore=["norm.weight"]))
        model = materialize(decided.apply(model), "cpu", fill)
        assert not isinstance(model.norm.weight, DTensor)
        tokens, targets = (t[0, dist.get_rank()] for t in batches(2, 1))
        seen = verify(decided, model, lambda m=model, x=tokens, y=targets: loss_of(m, x, y).backward())
        assert seen.ok, seen.report()
        assert model.embed.weight.grad is None


def ignored_by_ddp_hook() -> None:
    rank = dist.get_rank()
    model: Any = checkpoint_wrapper(TinyLM(tied=True))
    model._checkpoint_wrapped_module.scale = torch.nn.Parameter(torch.ones(6))
    model._checkpoint_wrapped_module.norm.register_forward_hook(lambda norm, _, out: out * model.scale)
    materialize(model, "cpu", fill)
    policy = Policy(mode="ddp", comm=Comm(ddp_hook="bf16"), ignore=["head.weight", "scale"])
    wrapped = plan(model, mesh(), policy).apply(model)
    tokens, targets = (t[0, rank] for t in batches(2, 1))
    loss_of(wrapped, tokens, targets).backward()
    for name, parameter in named_parameters(wrapped):
        assert parameter.requires_grad
        grads = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(grads, parameter.grad)
        assert torch.equal(*grads) == (name not in ("embed.weight", "scale")), name


def test_parameters_ignored_beside_a_ddp_hook_are_trained_by_each_rank() -> None:
    run_ranks(ignored_by_ddp_hook, 2)


def test_evaluation_leaves_a_submodule_in_the_mode_it_was_in() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Dropout())
    model[1].eval()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_frozen_units_are_not_reduced_and_ignored_parameters_stay_plain() -> None:
    run_ranks(frozen_and_ignored, 2)


def unused_inside_a_unit() -> str:
    """Rank 1 skips a linear inside a block; the reduction must still match on both ranks."""
    line = mesh()

    class Skips(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + (self.b(x) if dist.get_rank() == 0 else 0.0)

    model: Any = torch.nn.Sequential(Skips(), Skips())
    try:
        model = plan(model, line, Policy(units=["*"], unused_parameters=True)).apply(model)
    except ValueError as error:
        return str(error)
    materialize(model, "cpu", fill)
    model(torch.ones(2, 4)).sum().backward()
    grad = model[0].b.weight.grad.full_tensor()
    assert float(grad.abs().max()) > 0
    return "ran"


class Chooses(torch.nn.Module):
    """Two experts of one shape, of which each rank uses its own, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + self.experts[expert](x)


def experts_by_rank(mode: Any) -> None:
    policy = Policy(mode=mode, units=[], unused_parameters=True, grad_divide="sum")
    ranks = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if mode == "hsdp" else mesh()
    model: Any = plan(Chooses(), ranks, policy).apply(Chooses())
    materialize(model, "cpu", fill)
    for micro in range(2):  # rank 0 takes experts 0 and 1, rank 1 expert 1 alone
        with accumulate(model, micro, 2):
            model(torch.full((1, 4), 1.0 + dist.get_rank()), max(micro, dist.get_rank())).sum().backward()
    drop_unreached(model)
    sums = [None if (grad := e.weight.grad) is None else float(grad.full_tensor().sum()) for e in model.experts]
    assert sums == [16.0, 16.0 + 2 * 32.0, None], sums


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.13")
@pytest.mark.parametrize("mode", ["fsdp", "hsdp", "ddp"])
def test_what_no_rank_used_has_no_gradient_and_the_rest_its_own(mode: str) -> None:
    run_ranks(experts_by_rank, 2, mode)


def test_parameters_unused_on_one_rank_reduce_or_name_the_torch_that_can() -> None:
    for said in run_ranks(unused_inside_a_unit, 2):
        assert said == "ran" or "needs torch 2.13 or newer" in said
