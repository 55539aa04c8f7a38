"""Float8 products without a rule wait for the weight pass: gathered tokens, several linears, grouped experts."""

import copy

import pytest
import titan_fp8
import torch
import torch.distributed as dist
from titan_fp8.parallel.tensor import all_gather_linears, linear_reduce_scatter
from titan_pipeline.runtime import TorchStage
from titan_testing import run_ranks
from torch import nn


class Experts(nn.Module):
    """Grouped experts, their weight kept transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 128, 256) / 16)

    def forward(self, x):
        return titan_fp8.grouped_mm(x, self.weight.mT, torch.tensor([5, 16], dtype=torch.int32), "blockwise")


class Together(nn.Module):
    """Two linears of one input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(128, 256) / 16) for _ in range(2))

    def forward(self, x):
        one, two = titan_fp8.linears(x, [self.a, self.b], recipe="tensorwise")
        return one + two


class Gathering(nn.Module):
    """Tokens gathered in float8, and scattered again."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(256, 256) / 16)
        self.down = nn.Parameter(torch.randn(128, 256) / 16)

    def forward(self, x):
        (wide,) = all_gather_linears(x[None], [self.up], "blockwise", group=dist.group.WORLD)
        return linear_reduce_scatter(wide.relu(), self.down, "blockwise", group=dist.group.WORLD)[0]


def check(module, rows):
    """The gradients of one backward, bit for bit, and none of a weight before W."""
    alone = copy.deepcopy(module)
    x = torch.randn(rows, 256, dtype=torch.bfloat16)
    module, alone = module.bfloat16(), alone.bfloat16()
    given = x.clone().requires_grad_()
    out = alone(given)
    grad = torch.randn_like(out)
    out.backward(grad)
    stage = TorchStage(module, 1)
    stage.configure(True)
    stage.forward(0, (x,), None, {}, True)
    (got,) = stage.backward(0, (grad,), True)
    assert all(p.grad is None for p in module.parameters())
    stage.backward_weight(0)
    assert torch.equal(got, given.grad)
    for p, e in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, e.grad)
    assert (stage.not_deferred, stage.deferred_share) == ({}, 1)


@pytest.mark.parametrize("kind", [Experts, Together])
def test_float8_products_without_a_rule_wait(kind):
    torch.manual_seed(0)
    check(kind(), 16)


def gathering():
    torch.manual_seed(dist.get_rank())
    check(Gathering(), 128)


def test_linears_of_tokens_gathered_in_float8_wait():
    run_ranks(gathering, 2)
