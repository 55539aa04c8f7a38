"""The overlapped products against the gather or scatter and the product, one after the other."""

import pytest
import torch
import torch.distributed as dist
from titan_pipeline.runtime import TorchStage
from titan_testing import run_ranks
from titan_train.parallel.tensor.async_matmul import all_gather_matmul, matmul_reduce_scatter
from titan_train.parallel.tensor.collectives import gather_parts, scatter_sum

INPUTS, OUTPUTS, PART = 24, (16, 8, 40), 6

# As a share of the largest value; only the order of summation differs: at most 64 terms, whose roundings of 2^-24 add up as
# their square root. Up to 2.6e-7 was seen, with two threads a rank.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 8 * 2**-24}

# batch dimensions, contiguous, dtype
CASES = [
    (batch, contiguous, dtype)
    for batch, contiguous in [((), True), ((1,), True), ((2,), False), ((2, 2), True)]
    for dtype in TOLERANCE
]


def gather_errors(dtype: torch.dtype, batch: tuple[int, ...], contiguous: bool) -> tuple[float, float, bool]:
    group = dist.group.WORLD
    torch.manual_seed(dist.get_rank())
    part = torch.randn(*batch, PART, INPUTS, dtype=dtype)
    if not contiguous:
        part = torch.randn(*batch, INPUTS, PART, dtype=dtype).transpose(-1, -2)
    weights = [torch.randn(size, INPUTS, dtype=dtype) for size in OUTPUTS]
    seeds = [torch.randn(*batch, PART * group.size(), size, dtype=dtype) for size in OUTPUTS]
    outs, dx, dws = [], [], []
    for overlapped in (False, True):
        x = part.clone(memory_format=torch.preserve_format).requires_grad_()
        ws = [w.clone().requires_grad_() for w in weights]
        if overlapped:
            ys = all_gather_matmul(x, ws, group)
        else:
            whole = gather_parts(x, part.ndim - 2, group)
            ys = [torch.nn.functional.linear(whole, w) for w in ws]
        # gradients that are not contiguous either
        seed = seeds if contiguous else [s.transpose(-1, -2).contiguous().transpose(-1, -2) for s in seeds]
        torch.autograd.backward(ys, seed)
        outs.append(torch.cat([y.detach() for y in ys], -1))
        dx.append(x.grad)
        dws.append([w.grad for w in ws])
    same_dw = all(torch.equal(a, b) for a, b in zip(*dws, strict=True))
    return relative(outs[1], outs[0]), relative(dx[1], dx[0]), same_dw


def scatter_errors(
    dtype: torch.dtype, batch: tuple[int, ...], contiguous: bool, bias: bool
) -> tuple[float, float, bool]:
    group = dist.group.WORLD
    torch.manual_seed(dist.get_rank())
    whole = torch.randn(*batch, PART * group.size(), INPUTS, dtype=dtype)
    if not contiguous:
        whole = torch.randn(*batch, INPUTS, PART * group.size(), dtype=dtype).transpose(-1, -2)
    weight = torch.randn(OUTPUTS[0], INPUTS, dtype=dtype)
    shift = torch.randn(OUTPUTS[0], dtype=dtype) if bias and group.rank() == 0 else None
    seed = torch.randn(*batch, PART, OUTPUTS[0], dtype=dtype)
    outs, dx, dws = [], [], []
    for overlapped in (False, True):
        x = whole.clone(memory_format=torch.preserve_format).requires_grad_()
        w = weight.clone().requires_grad_()
        b = None if shift is None else shift.clone().requires_grad_()
        if overlapped:
            y = matmul_reduce_scatter(x, w, group, b)
        else:
            y = scatter_sum(torch.nn.functional.linear(x, w, b), whole.ndim - 2, group)
        y.backward(seed)
        outs.append(y.detach())
        dx.append(x.grad)
        dws.append(w.grad if b is None else torch.cat([w.grad, b.grad.unsqueeze(-1)], -1))
    return relative(outs[1], outs[0]), relative(dx[1], dx[0]), torch.equal(*dws)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def gather_cases() -> list[tuple[float, float, bool]]:
    return [gather_errors(dtype, batch, contiguous) for batch, contiguous, dtype in CASES]


def scatter_cases(bias: bool) -> list[tuple[float, float, bool]]:
    return [scatter_errors(dtype, batch, contiguous, bias) for batch, contiguous, dtype in CASES]


def check(results: list[list[tuple[float, float, bool]]]) -> None:
    for rank in results:
        for case, (out, dx, same_dw) in zip(CASES, rank, strict=True):
            assert out <= TOLERANCE[case[2]], case
            assert dx <= TOLERANCE[case[2]], case
            assert same_dw, case  # bitwise: the same product of the same gathered rows


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_gather_matmul_matches_gather_then_multiply(ranks):
    check(run_ranks(gather_cases, ranks))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_matmul_reduce_scatter_matches_multiply_then_scatter(ranks, bias):
    check(run_ranks(scatter_cases, ranks, bias))


def frozen_weight() -> bool:
    group = dist.group.WORLD
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(6, 8)
    (y,) = all_gather_matmul(x, [weight], group)
    z = matmul_reduce_scatter(y, torch.randn(8, 6), group)
    z.sum().backward()
    return x.grad is not None and weight.grad is None


def test_frozen_weights_get_no_gradient():
    assert all(run_ranks(frozen_weight, 2))


class Pair(torch.nn.Module):
    """Gather, two products, scatter the second's sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.up = torch.nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
        self.down = torch.nn.Parameter(torch.randn(8, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = all_gather_matmul(x, [self.up], dist.group.WORLD)
        return matmul_reduce_scatter(y.tanh(), self.down, dist.group.WORLD)


def halves() -> tuple[bool, bool, dict[str, str]]:
    plain, split = Pair(), Pair()
    x, grad = torch.randn(2, 1, 4, 8, dtype=torch.float64)
    given = x.clone().requires_grad_()
    plain(given).backward(grad)
    stage = TorchStage(split, 1)
    stage.configure(True)
    stage.forward(0, (x,), None, {}, True)
    (got,) = stage.backward(0, (grad,), True)
    early = any(p.grad is not None for p in split.parameters())
    stage.backward_weight(0)
    same = all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), split.parameters(), strict=True))
    return early, same and torch.equal(got, given.grad), stage.not_deferred


def test_weight_gradients_wait_in_a_pipeline_that_splits_the_backward():
    assert run_ranks(halves, 2) == [(False, True, {})] * 2
