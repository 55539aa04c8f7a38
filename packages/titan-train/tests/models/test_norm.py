"""The shipped families' RMSNorm against torch's."""

import pytest
import torch
from titan_train.models.common.norm import RMSNorm
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

# Float32 sums of 96 terms in any order are within 96 * 2^-24 of the sum of magnitudes; a gradient has three of them.
FLOAT32 = 3 * 96 * 2.0**-24


def pair(dtype: torch.dtype) -> tuple[RMSNorm, nn.RMSNorm, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ours, theirs = RMSNorm(96, eps=1e-5, dtype=dtype), nn.RMSNorm(96, eps=1e-5, dtype=dtype)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.normal_())
    return ours, theirs, torch.randn(3, 5, 96, dtype=dtype), torch.randn(3, 5, 96, dtype=dtype)


def test_norm_has_torchs_bits_and_its_gradients():
    ours, theirs, x, grad = pair(torch.float32)
    mine, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = theirs(reference)
    expected.backward(grad)
    found = ours(mine)
    found.backward(grad)
    assert torch.equal(found, expected)
    for a, b in ((mine.grad, reference.grad), (ours.weight.grad, theirs.weight.grad)):
        assert (a.double() - b.double()).abs().max() <= FLOAT32 * b.double().abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs(dtype):
    ours, theirs, x, _ = pair(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_backward_keeps_the_input_and_a_number_per_row():
    ours, _, x, _ = pair(torch.float32)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(x.requires_grad_())
    assert sum(t.numel() for t in kept) == x.numel() + 96 + 15
