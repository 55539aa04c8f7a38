"""Cross-entropy over a vocabulary cut over the ranks against the whole one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from titan_testing import assert_close, run_ranks
from titan_train.parallel.tensor.loss import vocab_parallel_cross_entropy_sum
from titan_train.parallel.tensor.plan import own_units
from torch import Tensor


def sums(vocab: int, dtype: torch.dtype, ignored: str) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Loss and gradient, got and wanted, and the all-reduces of forward and backward."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    logits = (torch.randn(2, 6, vocab, dtype=torch.float64) * 4).to(dtype)
    labels = torch.randint(0, vocab, (2, 6))
    if ignored == "some":
        labels[:, ::3] = -100
    elif ignored == "all":
        labels[:] = -100

    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(
        whole.flatten(0, 1).to(torch.promote_types(dtype, torch.float32)), labels.flatten(), reduction="sum"
    )
    want.backward()

    start, length = own_units(vocab, group.size(), group.rank())
    own = logits[..., start : start + length].clone().requires_grad_()
    calls = [0]
    plain = dist.all_reduce

    def counted(*args, **kwargs):
        calls[-1] += 1
        return plain(*args, **kwargs)

    dist.all_reduce = counted
    got = vocab_parallel_cross_entropy_sum(own, labels, group, start)
    calls.append(0)
    got.backward()
    dist.all_reduce = plain
    return got.detach(), want.detach(), own.grad, whole.grad[..., start : start + length], calls


# float64: order of summation. float32: losses of order 100 in sum, gradients of order 1.
TOLERANCE = {torch.float64: (1e-12, 1e-13), torch.float32: (1e-6, 1e-6)}


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("vocab", [96, 97, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradient_match_the_whole_vocabulary(ranks, vocab, ignored):
    for dtype, (loss_bound, grad_bound) in TOLERANCE.items():
        for got, want, grad, want_grad, calls in run_ranks(sums, ranks, vocab, dtype, ignored):
            assert_close(got, want, atol=loss_bound, rtol=loss_bound)
            assert_close(grad, want_grad, atol=grad_bound)
            assert calls == [2, 0]  # all-reduces of forward, of backward
            if ignored == "all":
                assert float(got) == 0.0
                assert float(grad.abs().max()) == 0.0


def test_bf16_logits_are_summed_in_float32():
    for got, want, grad, want_grad, _ in run_ranks(sums, 2, 96, torch.bfloat16, "some"):
        assert got.dtype == torch.float32
        assert_close(got, want, rtol=1e-6)
        assert grad.dtype == torch.bfloat16
        assert_close(grad, want_grad, atol=2**-8)  # one rounding to bfloat16 of values up to 1


def huge() -> tuple[float, Tensor]:
    logits = torch.tensor([[[1e4, -1e4, 3.0]]]) if dist.get_rank() == 0 else torch.tensor([[[9e3, 1e4]]])
    logits.requires_grad_()
    loss = vocab_parallel_cross_entropy_sum(logits, torch.tensor([[4]]), dist.group.WORLD, 3 * dist.get_rank())
    loss.backward()
    return float(loss.detach()), logits.grad


def test_huge_logits_do_not_overflow():
    (loss, first), (_, second) = run_ranks(huge, 2)
    assert abs(loss - 0.6931472) < 1e-6
    assert_close(first, torch.tensor([[[0.5, 0.0, 0.0]]]))
    assert_close(second, torch.tensor([[[0.0, -0.5]]]))
