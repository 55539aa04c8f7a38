"""The global norm of mixed meshes, pipeline stages and experts equals the single process's."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_for_tests import TinyLM, batches, fill, loss_of
from titan_fsdp import Policy, clip_grad_norm_, materialize, named_parameters, plan
from titan_testing import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

NORMS = (2.0, 1.0, math.inf)


def reference() -> tuple[dict[str, Tensor], dict[float, float]]:
    """Gradients and their norms in one process, over the data of two data-parallel ranks."""
    model = materialize(TinyLM(), "cpu", fill)
    tokens, targets = batches(2, 1)
    loss_of(model, tokens[0], targets[0]).backward()
    norms = {p: float(torch.nn.utils.get_total_norm([w.grad for w in model.parameters()], p)) for p in NORMS}
    return {n: w.grad for n, w in model.named_parameters()}, norms


def check_norms(params: list[Any], norms: dict[float, float], **options: Any) -> None:
    for p, want in norms.items():
        got = clip_grad_norm_(params, math.inf, p, **options)
        assert got.dtype == torch.float32
        # float32 sums in another order
        assert abs(float(got) - want) <= 1e-6 * max(1.0, want), (p, float(got), want)


def fsdp_with_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    want, norms = reference()
    with torch.device("meta"):
        model: Any = TinyLM()
    for layer in model.layers:  # the norms, the embedding and the head stay whole
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = materialize(plan(model, mesh["dp"], Policy()).apply(model), "cpu", fill)
    tokens, targets = batches(2, 1)
    rank = mesh["dp"].get_local_rank()
    loss_of(model, tokens[0, rank], targets[0, rank]).backward()
    grads = {n: p.grad.full_tensor() for n, p in named_parameters(model)}
    for name, grad in want.items():
        assert float((grads[name] - grad).abs().max()) < 1e-6, name
    params = list(model.parameters())
    check_norms(params, norms)
    clip_grad_norm_(params, 0.1)
    clipped = float(clip_grad_norm_(params, math.inf))
    assert abs(clipped - 0.1) < 1e-5, clipped
    factor = 0.1 / norms[2.0]
    for name, parameter in named_parameters(model):
        assert float((parameter.grad.full_tensor() - want[name] * factor).abs().max()) < 1e-6, name


def fsdp_in_two_pipeline_stages() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    want, norms = reference()
    stage = mesh["pp"].get_local_rank()
    model: Any = TinyLM()
    if stage == 0:
        del model.norm, model.head, model.layers[1]
    else:
        del model.embed, model.layers[0]
    names = {n: n if stage == 0 else n.replace("layers.0", "layers.1") for n, _ in named_parameters(model)}
    model = plan(model, mesh["dp"], Policy(pp=True)).apply(model)
    for name, parameter in named_parameters(model):
        whole = want[names[name]]
        rows = -(-whole.size(0) // 2)
        mine = whole[mesh["dp"].get_local_rank() * rows :][:rows]
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().copy_(mine)
    check_norms(list(model.parameters()), norms, pp_group=mesh["pp"].get_group())


def experts_as_plain_slices() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    experts = torch.arange(1.0, 25.0).view(4, 6)
    dense = torch.ones(3)
    local = torch.nn.Module()
    local.w = torch.nn.Parameter(torch.zeros(2, 6))  # this rank's experts, a plain tensor
    local.dense = torch.nn.Parameter(torch.zeros(3))
    local = plan(local, mesh["dp"], Policy()).apply(local)
    mine = experts.chunk(2)[mesh["ep"].get_local_rank()].chunk(2)[mesh["dp"].get_local_rank()]
    local.w.grad = torch.zeros_like(local.w)
    local.w.grad.to_local().copy_(mine)
    local.dense.grad = torch.zeros_like(local.dense)
    local.dense.grad.to_local().copy_(dense[: len(local.dense.to_local())])
    everything = [experts, dense]
    norms = {p: float(torch.nn.utils.get_total_norm(everything, p)) for p in NORMS}
    check_norms(list(local.parameters()), norms, sharded_over=[([local.w], mesh["ep"].get_group())])


def all_settings() -> None:
    fsdp_with_tensor_parallel()
    fsdp_in_two_pipeline_stages()
    experts_as_plain_slices()
    assert dist.get_world_size() == 4


def test_clip_norm_matches_the_single_process_with_tensor_parallel_stages_and_experts() -> None:
    run_ranks(all_settings, 4, timeout_s=150)


def test_clip_on_a_plain_model_matches_torch() -> None:
    grads, norms = reference()
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
    for p, g in zip(params, grads.values(), strict=True):
        p.grad = g.clone()
    check_norms([*params, params[0]], norms)  # a tied parameter counts once
    theirs = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
    for p, g in zip(theirs, grads.values(), strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(theirs, 0.3)
    clip_grad_norm_(params, 0.3)
    for a, b in zip(params, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm", [2.0, 3.0, math.inf])
def test_gradients_of_every_dtype_are_clipped_together(norm: float) -> None:
    dtypes = [torch.float64, torch.complex128, torch.complex64, torch.float32, torch.bfloat16]
    params = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    for p in params:
        p.grad = (torch.arange(1.0, 4.0) * (1 + 2j if p.is_complex() else 1)).to(p.dtype)
    before = [p.grad.clone() for p in params]
    want = torch.linalg.vector_norm(torch.cat([grad.abs().double() for grad in before]), norm)
    got = clip_grad_norm_(params, 0.5, norm)
    torch.testing.assert_close(got, want.float())
    for p, grad in zip(params, before, strict=True):
        torch.testing.assert_close(p.grad, grad * (0.5 / got))


def test_a_norm_that_is_not_finite_can_raise() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, math.nan])
    assert math.isnan(float(clip_grad_norm_([p], math.inf)))
    with pytest.raises(RuntimeError, match="gradients hold NaN or infinity"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


def test_bad_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="max_norm=-1"):
        clip_grad_norm_([], -1)
