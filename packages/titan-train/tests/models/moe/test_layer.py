"""The mixture of experts against a dense reference: every expert on every token, zero weight where not chosen."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from titan_testing import assert_close
from titan_train.models.common.args import MoEArgs
from titan_train.models.common.blocks import SwiGLU
from titan_train.models.common.moe.balance import update_expert_bias
from titan_train.models.common.moe.experts import GroupedMM, grouped_mm_loop, grouped_mm_masked
from titan_train.models.common.moe.layer import MoE
from titan_train.models.common.moe.routed import StackedExperts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ARGS = {"dim": 32, "expert_ffn_dim": 48, "num_experts": 8, "experts_per_token": 2}


def make(**changes: object) -> MoE:
    args = MoEArgs(**{**ARGS, **changes})  # type: ignore[arg-type]
    layer = MoE(args, SwiGLU(32, 64) if args.num_shared_experts else None)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(i))
    return layer


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, probe = (torch.randn(3, 10, 32, generator=generator).to(dtype) for _ in range(2))
    return x.requires_grad_(), probe


def reference(layer: MoE, x: Tensor) -> Tensor:
    """All experts on all tokens."""
    routing = layer.router(x.flatten(0, 1), layer.expert_bias)
    weights = torch.zeros_like(routing.scores).scatter(1, routing.experts, routing.weights)
    e = layer.experts
    out = torch.zeros_like(x.flatten(0, 1))
    for i in range(layer.args.num_experts):
        hidden = F.silu(x.flatten(0, 1) @ e.w1[i].T) * (x.flatten(0, 1) @ e.w3[i].T)
        out = out + weights[:, i : i + 1].to(x.dtype) * (hidden @ e.w2[i].T)
    out = out.view_as(x)
    return out if layer.shared_experts is None else out + layer.shared_experts(x)


def grads_of(layer: MoE, x: Tensor) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}
    assert all(grad is not None for grad in found.values())
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize(
    "changes",
    [{}, {"scores": "sigmoid", "experts_per_token": 3, "num_shared_experts": 1, "bias_rate": 0.1}, {"num_experts": 2}],
    ids=["softmax", "sigmoid-k3-shared-bias", "all-experts"],
)
def test_output_and_every_gradient_match_the_dense_reference(changes: dict[str, object]) -> None:
    layer = make(**changes).double()
    if layer.expert_bias is not None:
        layer.expert_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    x, probe = batch(torch.float64)
    layer(x).backward(probe)
    got = grads_of(layer, x)
    layer.zero_grad()
    x.grad = None
    want = reference(layer, x)
    want.backward(probe)
    assert_close(layer(x).detach(), want.detach())
    assert_close(got, grads_of(layer, x), atol=1e-11)  # sums of 30 terms of order 10 in float64


def test_counts_equal_the_reference_routers_and_every_token_is_computed_under_total_skew() -> None:
    layer = make(bias_rate=0.1, scores="sigmoid")
    assert layer.expert_bias is not None
    layer.expert_bias.copy_(torch.tensor([0.0, 0, 9, 0, 0, 9, 0, 0]))  # all tokens to experts 2 and 5
    x, probe = batch()
    out = layer(x)
    out.backward(probe)
    assert layer.load.tolist() == [0, 0, 30, 0, 0, 30, 0, 0]
    assert_close(out.detach(), reference(layer, x).detach())  # nothing was dropped
    assert layer.experts.w1.grad is not None
    idle = [0, 1, 3, 4, 6, 7]
    assert float(layer.experts.w1.grad[idle].abs().max()) == 0.0

    even = make()
    x, probe = batch()
    even(x).backward(probe)
    chosen = even.router(x.flatten(0, 1)).experts
    assert even.load.tolist() == [int((chosen == e).sum()) for e in range(8)]


def test_bfloat16_stays_near_float32() -> None:
    layer = make(num_shared_experts=1, bias_rate=0.1)
    x, _ = batch()
    want = layer(x).detach()
    got = layer.bfloat16()(x.bfloat16()).detach()
    assert got.dtype == torch.bfloat16
    assert layer.expert_bias is not None
    assert layer.expert_bias.dtype == torch.float32  # steps of 1e-3 would vanish
    same = layer.router(x.bfloat16().flatten(0, 1)).experts == make().router(x.flatten(0, 1)).experts
    assert float(same.float().mean()) > 0.9
    # 8 bits of mantissa; tokens that a rounded gate sent elsewhere are not compared
    kept = same.all(-1).view(3, 10)
    assert float((got.float() - want)[kept].abs().max()) < 0.05 * float(want.std()) + 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_and_its_gradients_equal_the_plain_loop(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20, 16, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(4, 24, 16, generator=generator).to(dtype).requires_grad_()
    probe = torch.randn(20, 24, generator=generator).to(dtype)
    offs = torch.tensor([7, 7, 19, 20], dtype=torch.int32)
    exact = [t.detach().double() for t in (a, b, probe)]
    ends = [0, *offs.tolist()]
    parts = [slice(start, end) for start, end in pairwise(ends)]
    want = (
        torch.cat([exact[0][part] @ m.T for part, m in zip(parts, exact[1], strict=True)]),
        torch.cat([exact[2][part] @ m for part, m in zip(parts, exact[1], strict=True)]),
        torch.stack([exact[2][part].T @ exact[0][part] for part in parts]),
    )
    absolute = [t.abs() for t in exact]
    terms = (
        torch.cat([absolute[0][part] @ m.T for part, m in zip(parts, absolute[1], strict=True)]),
        torch.cat([absolute[2][part] @ m for part, m in zip(parts, absolute[1], strict=True)]),
        torch.stack([absolute[2][part].T @ absolute[0][part] for part in parts]),
    )
    for product in (GroupedMM(), grouped_mm_loop, grouped_mm_masked):
        a.grad = b.grad = None
        out = product(a, b.transpose(-2, -1), offs=offs)
        out.backward(probe)
        for name, got, exactly, sums in zip(
            ("out", "a", "b"), (out.detach(), a.grad, b.grad), want, terms, strict=True
        ):
            assert got is not None
            # Whatever the order, a sum of n products of float32 is off by at most n u times the sum of their magnitudes
            # (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), n <= 24; bfloat16 then rounds once more.
            unit = 24 * 2**-24 + (2**-8 if dtype == torch.bfloat16 else 0.0)
            assert bool(((got.double() - exactly).abs() <= unit * sums).all()), (product, name)


@pytest.mark.parametrize(("k", "n"), [(6, 10), (16, 6), (6, 16)])
def test_widths_that_the_kernel_refuses_fall_back_to_the_loop(k: int, n: int) -> None:
    a, b = torch.randn(5, k), torch.randn(2, n, k)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    want = torch.cat([a[:2] @ b[0].T, a[2:] @ b[1].T])
    assert_close(GroupedMM()(a, b.transpose(-2, -1), offs=offs), want)


def test_the_meta_device_gives_shapes_in_any_dtype() -> None:
    with torch.device("meta"):
        layer = make_meta()
        for dtype in (torch.float32, torch.bfloat16):
            out = layer.to(dtype)(torch.empty(2, 8, 32, dtype=dtype, requires_grad=True))
            assert (out.shape, out.dtype, out.is_meta) == ((2, 8, 32), dtype, True)
            out.sum().backward()


def make_meta() -> MoE:
    return MoE(MoEArgs(**ARGS))  # type: ignore[arg-type]


def test_another_grouped_product_can_take_its_place() -> None:
    class Doubled(nn.Module):
        def forward(self, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor) -> Tensor:
            return 2 * grouped_mm_loop(mat_a, mat_b, offs=offs)

    layer = make()
    x, _ = batch()
    rows = x.detach().flatten(0, 1)
    counts = torch.tensor([30, 0, 0, 0, 0, 0, 0, 0])
    layer.experts.grouped_mm = Doubled()
    e = layer.experts
    want = 2 * (F.silu(2 * rows @ e.w1[0].T) * (2 * rows @ e.w3[0].T)) @ e.w2[0].T
    assert_close(layer.experts(rows, counts).detach(), want.detach(), atol=1e-4, rtol=1e-6)


def test_recomputation_and_evaluation_leave_the_counts_right() -> None:
    layer = make(balance_loss=0.01)
    x, probe = batch()
    layer(x).backward(probe)
    want, losses, grads = layer.load.tolist(), layer.losses.tolist(), grads_of(layer, x)

    for again in ("non-reentrant", "reentrant"):
        layer.zero_grad()
        x.grad = None
        update_expert_bias(layer, None)
        assert layer.load.tolist() == [0] * 8
        out = checkpoint(layer, x, use_reentrant=again == "reentrant")
        assert out is not None
        with torch.no_grad():
            layer(x)  # evaluation in between
        out.backward(probe)
        assert layer.load.tolist() == want
        assert layer.losses.tolist() == losses
        assert all(torch.equal(grad, grads[name]) for name, grad in grads_of(layer, x).items())


@pytest.mark.parametrize("padding", [None, torch.arange(10) >= torch.tensor([[10], [4], [0]])], ids=["full", "padded"])
def test_the_layer_compiles_to_one_graph_that_counts_the_same(padding: Tensor | None) -> None:
    layer = make(balance_loss=0.01, bias_rate=0.01, num_shared_experts=1)
    x, probe = batch()
    out = layer(x, padding)
    out.backward(probe)
    want, load = grads_of(layer, x), layer.load.tolist()
    layer.zero_grad()
    x.grad = None
    update_expert_bias(layer, None, skip=True)
    torch._dynamo.reset()
    layer.compile(fullgraph=True, backend="aot_eager")
    for step in range(2):
        x.grad = None
        layer.zero_grad()
        assert_close(layer(x, padding).detach(), out.detach())
        layer(x, padding).backward(probe)
        assert_close(grads_of(layer, x), want)
        assert layer.load.tolist() == [n * (step + 1) for n in load]


def test_padding_goes_to_all_experts_alike_and_changes_no_other_token() -> None:
    layer, x = make(), torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(3))
    x[:, 8:] = x[:, 8]  # alike: by their scores all would choose the same experts
    rows: list[int] = []
    layer.experts.register_forward_pre_hook(lambda _, args: rows.extend(args[1].tolist()))
    padding = torch.arange(64)[None] >= 8
    out = layer(x, padding)
    assert max(rows) <= 8 + 56 * 2 // 8
    assert_close(out[:, :8].detach(), layer(x)[:, :8].detach())
    assert max(rows) >= 56


def test_padding_of_other_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padding of \[3, 20\] for tokens of \[3, 10\].*style 'positions'"):
        make()(batch()[0], torch.zeros(3, 20, dtype=torch.bool))


def test_stacks_of_all_layers_are_of_one_class() -> None:
    """torch.compile would compile a block again for each class, and stop at the ninth."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(2, 4, 4))

    stacks = [Stack(), Stack()]
    for stack in stacks:
        StackedExperts.take_over(stack, 1)
    assert type(stacks[0]) is type(stacks[1])
    assert isinstance(stacks[0], StackedExperts)
    assert isinstance(stacks[0], Stack)
