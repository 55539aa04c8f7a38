"""Tensor parallelism in float8 computes what one process does with the whole tensors."""

import copy
import dataclasses
from typing import Any

import pytest
import titan_fp8
import torch
import torch.distributed as dist
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, TOKENS, K, N = 2, 256, 96, 64


def tensors() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, TOKENS, K, generator=draw, dtype=torch.bfloat16)
    weights = [torch.randn(N, K, generator=draw, dtype=torch.bfloat16) * 0.1 for _ in range(2)]
    grads = [torch.randn(BATCH, TOKENS, N, generator=draw, dtype=torch.bfloat16) for _ in range(2)]
    return x, *weights, *grads


class GatheredBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func._schema.name:
            self.total += args[1].numel() * args[1].element_size()
        return func(*args, **(kwargs or {}))


def column_parallel(recipe: str) -> tuple[Any, ...]:
    rank, n = dist.get_rank(), dist.get_world_size()
    x, w1, w2, g1, g2 = tensors()
    part = x.chunk(n, 1)[rank].clone().requires_grad_()
    shards = [w.chunk(n, 0)[rank].clone().requires_grad_() for w in (w1, w2)]
    with GatheredBytes() as forward:
        outs = titan_fp8.all_gather_linears(part, shards, recipe, group=dist.group.WORLD)
    with GatheredBytes() as backward:
        torch.autograd.backward(outs, [g.chunk(n, -1)[rank].contiguous() for g in (g1, g2)])
    return [o.detach() for o in outs], part.grad, [w.grad for w in shards], forward.total, backward.total


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_column_parallel_linears_gather_in_float8_what_one_process_casts(recipe: str) -> None:
    x, w1, w2, g1, g2 = tensors()
    x, w1, w2 = x.requires_grad_(), w1.requires_grad_(), w2.requires_grad_()
    wants = []
    for rank in range(2):  # a rank's shard of each weight, in one process
        part = [w.detach().chunk(2, 0)[rank].clone().requires_grad_() for w in (w1, w2)]
        whole = x.detach().clone().requires_grad_()
        outs = titan_fp8.linears(whole, part, None, recipe)
        torch.autograd.backward(outs, [g.chunk(2, -1)[rank].contiguous() for g in (g1, g2)])
        wants.append((outs, whole.grad, [w.grad for w in part]))
    dx = (wants[0][1] + wants[1][1]).chunk(2, 1)
    for rank, (outs, dpart, dws, forward, backward) in enumerate(run_ranks(column_parallel, 2, recipe)):
        assert all(torch.equal(a, b) for a, b in zip(outs, wants[rank][0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(dws, wants[rank][2], strict=True))
        assert torch.equal(dpart, dx[rank])
        bf16 = BATCH * TOKENS // 2 * K * 2
        padded = 128 / K if recipe == "blockwise" else 1.0  # K is padded to the block
        assert forward <= bf16 * 0.55 * padded
        assert backward <= bf16 * 0.55 * padded


def row_parallel(recipe: str) -> tuple[Any, ...]:
    rank, n = dist.get_rank(), dist.get_world_size()
    x, w, _, g, _ = tensors()
    x = x.chunk(n, -1)[rank].contiguous().requires_grad_()
    w = w.chunk(n, 1)[rank].contiguous().requires_grad_()
    out = titan_fp8.linear_reduce_scatter(x, w, recipe, group=dist.group.WORLD)
    out.backward(g.chunk(n, 1)[rank].contiguous())
    grads = x.grad, w.grad
    x.grad = w.grad = None
    with torch.autograd.graph.saved_tensors_hooks(packed_row_by_row, torch.clone):
        out = titan_fp8.linear_reduce_scatter(x, w, recipe, group=dist.group.WORLD)
    out.backward(g.chunk(n, 1)[rank].contiguous())
    assert torch.equal(x.grad, grads[0])
    assert torch.equal(w.grad, grads[1])
    return out.detach(), *grads


def packed_row_by_row(saved: torch.Tensor) -> torch.Tensor:
    """What ``save_on_cpu(pin_memory=True)`` makes of a saved tensor's strides."""
    return torch.empty(saved.size(), dtype=saved.dtype).copy_(saved)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_row_parallel_linear_gathers_its_gradient_in_float8(recipe: str) -> None:
    x, w, _, g, _ = tensors()
    total, grads = 0, []
    for rank in range(2):
        part = x.chunk(2, -1)[rank].contiguous().requires_grad_()
        shard = w.chunk(2, 1)[rank].contiguous().requires_grad_()
        out = titan_fp8.linear(part, shard, None, recipe)
        out.backward(g)
        total = total + out.detach()
        grads.append((part.grad, shard.grad))
    for rank, (out, dx, dw) in enumerate(run_ranks(row_parallel, 2, recipe)):
        assert torch.equal(out, total.chunk(2, 1)[rank])
        assert torch.equal(dx, grads[rank][0])
        assert torch.equal(dw, grads[rank][1])


def compiled_region(recipe: str) -> bool:
    rank, n = dist.get_rank(), dist.get_world_size()
    x, w, *_ = tensors()
    down = tensors()[2].t()[:N, :16]  # [N, 16]: this rank's half of the rows, transposed, is [16, N / 2]

    def region(part: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        (hidden,) = titan_fp8.all_gather_linears(part, [up], recipe, group=dist.group.WORLD)
        return titan_fp8.linear_reduce_scatter(hidden, down, recipe, group=dist.group.WORLD)

    def run(fn: Any) -> list[torch.Tensor]:
        leaves = (x.chunk(n, 1)[rank], w.chunk(n, 0)[rank], down.chunk(n, 0)[rank].t())
        leaves = [t.clone().requires_grad_() for t in leaves]
        out = fn(*leaves)
        out.float().square().sum().backward()
        return [out.detach(), *(t.grad for t in leaves)]

    compiled = torch.compile(region, fullgraph=True, backend="aot_eager")
    return all(torch.equal(a, b) for a, b in zip(run(compiled), run(region), strict=True))


def test_a_compiled_region_has_the_bits_of_the_eager_one() -> None:
    assert all(run_ranks(compiled_region, 2, "blockwise", timeout_s=150))


def lopsided() -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` and ``w`` whose halves differ in size: a rank's own amax would spare the second half from underflow."""
    x, w, *_ = tensors()
    x, w = x.float(), w.float()
    x[..., : K // 2] *= 2**14
    w[:, K // 2 :] *= 2**14  # so that both halves count alike in the output
    return x, w


def cut_by_columns(group: bool, wgrad: Any = "fp8") -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    x, w = (t.chunk(n, -1)[rank] for t in lopsided())
    recipe = dataclasses.replace(titan_fp8.RECIPES["tensorwise"], wgrad=wgrad)
    out = titan_fp8.linear(x, w, None, recipe, amax_group=dist.group.WORLD if group else None)
    dist.all_reduce(out)
    return out


def test_an_amax_over_the_group_gives_the_scales_of_the_whole_tensor() -> None:
    x, w = lopsided()
    recipe = titan_fp8.Recipe.get("tensorwise")
    codes = [titan_fp8.cast(t.flatten(0, -2), s, layouts="rows") for t, s in ((x, recipe.x), (w, recipe.w))]
    a, b = (q.data[: q.rows, : q.columns].double() * q.scale.double() for q in codes)
    exact = (a @ b.t()).view(BATCH, TOKENS, N)
    # A float32 sum of K products in any order is within K * 2^-24 of the exact one, relative to the sum of magnitudes.
    bound = (K * 2**-24 * (a.abs() @ b.abs().t())).view_as(exact)
    for got in (*run_ranks(cut_by_columns, 2, True), *run_ranks(cut_by_columns, 2, True, "hp")):
        assert ((got.double() - exact).abs() <= bound).all()
    for got in run_ranks(cut_by_columns, 2, False):
        assert ((got.double() - exact).abs() > bound).any()


def second_derivatives(recipe: str) -> None:
    x, w, *_ = (t.float().requires_grad_() for t in tensors())
    group, recipe_of_x = dist.group.WORLD, titan_fp8.Recipe.get(recipe).x
    for y in (
        *titan_fp8.all_gather_linears(x, [w], recipe, group=group),
        titan_fp8.linear_reduce_scatter(x, w, recipe, group=group),
        titan_fp8.all_gather_float8(x, recipe_of_x, group=group).square(),
    ):
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            (grad.square().sum() + w.sum()).backward()


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    run_ranks(second_derivatives, 1, "blockwise")


def gather_any(scaling: titan_fp8.Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    rank, n = dist.get_rank(), dist.get_world_size()
    part = tensors()[0].chunk(n, 1)[rank].clone().requires_grad_()
    whole = titan_fp8.all_gather_float8(part, scaling, group=dist.group.WORLD)
    whole.backward(torch.ones_like(whole))
    return whole.detach(), part.grad


@pytest.mark.parametrize("gran", ["tensor", "row", "block1x128", "mx32"])
def test_gathering_in_float8_and_casting_again_loses_nothing(gran: Any) -> None:
    x = tensors()[0]
    scaling = titan_fp8.Scaling(gran)
    want = titan_fp8.cast(x.flatten(0, 1), scaling, layouts="rows")
    for whole, grad in run_ranks(gather_any, 2, scaling):
        again = titan_fp8.cast(whole.flatten(0, 1), scaling, layouts="rows")
        values = [q.data.float() for q in (want, again)]
        scales = [q.scale.float() for q in (want, again)]
        if gran in ("block1x128", "mx32"):
            scales = [s.repeat_interleave(128 if gran == "block1x128" else 32, -1) for s in scales]
        assert torch.equal(values[0] * scales[0], values[1] * scales[1])
        assert torch.equal(grad, torch.full_like(grad, 2.0))


def test_recipes_whose_scales_span_ranks_and_odd_lengths_are_refused() -> None:
    run_ranks(refusals, 1)


def copied_layer() -> bool:
    layer = titan_fp8.Float8Linear(32, 16, recipe="tensorwise")
    layer.amax_group = dist.group.WORLD
    averaged = torch.optim.swa_utils.AveragedModel(nn.Sequential(layer))
    copied = averaged.module[0]
    x = torch.randn(4, 32)
    assert torch.equal(copied(x), layer(x))
    assert copied.weight is not layer.weight
    return copied.amax_group is dist.group.WORLD


def test_a_copy_is_of_the_same_ranks() -> None:
    assert all(run_ranks(copied_layer, 1))


def refusals() -> None:
    x, w, *_ = tensors()
    with pytest.raises(ValueError, match="cannot be gathered in float8"):
        titan_fp8.all_gather_linears(x, [w], "rowwise", group=dist.group.WORLD)
    with pytest.raises(ValueError, match="multiple of 128"):
        titan_fp8.all_gather_linears(x[:, :100], [w], "blockwise", group=dist.group.WORLD)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1 = nn.Linear(K, 2 * N, bias=False, dtype=torch.bfloat16)
        self.w3 = nn.Linear(K, 2 * N, dtype=torch.bfloat16)
        self.w2 = nn.Linear(2 * N, K, bias=False, dtype=torch.bfloat16)
        titan_fp8.convert_to_float8(self, "blockwise", min_speedup=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w1(x) * self.w3(x))


def styled(prepare: bool) -> tuple[torch.Tensor, ...]:
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    block = FeedForward()
    column = titan_fp8.Float8ColwiseParallel(gather=not prepare)
    plan = {"w1": column, "w3": column, "w2": titan_fp8.Float8RowwiseParallel()}
    parallelize_module(block, mesh, plan)
    if prepare:
        parallelize_module(block, mesh, titan_fp8.PrepareFloat8Input("blockwise"))
    part = tensors()[0].chunk(n, 1)[rank].clone().requires_grad_()
    out = block(part)
    out.float().square().sum().backward()
    grads = [p.grad.full_tensor() for p in block.parameters()]
    return out.detach(), part.grad, *grads


@pytest.mark.parametrize("prepare", [False, True])
def test_parallel_styles_compute_the_layer_of_one_process(prepare: bool) -> None:
    block = FeedForward()
    x = tensors()[0].requires_grad_()
    out = block(x)
    out.float().square().sum().backward()
    wants = [(out.chunk(2, 1)[r].detach(), x.grad.chunk(2, 1)[r]) for r in range(2)]
    for rank, (got, dx, *grads) in enumerate(run_ranks(styled, 2, prepare)):
        # Partial sums are rounded to bfloat16 before they are added, and biases after: a last bit that differs there
        # moves a code of the next layer now and then. Far above float8's own 27 dB.
        assert_sqnr(got, wants[rank][0], 35.0)
        assert_sqnr(dx, wants[rank][1], 25.0)
        for a, parameter in zip(grads, block.parameters(), strict=True):
            assert_sqnr(a, parameter.grad, 25.0)  # what float8 itself keeps; the gradient's codes differ in last bits


def column_layer_with_a_bias(dtype: torch.dtype) -> bool:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    layer = titan_fp8.Float8Linear(K, N, recipe="tensorwise")
    parallelize_module(layer, mesh, titan_fp8.Float8ColwiseParallel())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        return layer(tensors()[0].to(dtype)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_float32_bias_leaves_the_output_its_dtype(dtype: torch.dtype) -> None:
    assert all(run_ranks(column_layer_with_a_bias, 1, dtype))


def assert_sqnr(got: torch.Tensor, want: torch.Tensor, floor_db: float) -> None:
    noise = (got.double() - want.double()).square().sum()
    assert 10 * torch.log10(want.double().square().sum() / noise) >= floor_db


def copied_styles() -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    block, column = FeedForward(), titan_fp8.Float8ColwiseParallel()
    parallelize_module(block, mesh, {"w1": column, "w3": column, "w2": titan_fp8.Float8RowwiseParallel()})
    copied, x = copy.deepcopy(block), tensors()[0]
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.to_local().zero_()
        return bool((copied(x) == 0).all()), bool((block(x) != 0).any())


def test_a_copy_of_a_cut_layer_computes_with_its_own_weights() -> None:
    assert run_ranks(copied_styles, 1) == [(True, True)]


def wrong_styles() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match="call convert_to_float8 before"):
        parallelize_module(nn.Linear(8, 8), mesh, titan_fp8.Float8ColwiseParallel())
    with pytest.raises(ValueError, match="bias"):
        parallelize_module(titan_fp8.Float8Linear(8, 8), mesh, titan_fp8.Float8RowwiseParallel())


def test_styles_refuse_layers_they_cannot_cut() -> None:
    run_ranks(wrong_styles, 1)
