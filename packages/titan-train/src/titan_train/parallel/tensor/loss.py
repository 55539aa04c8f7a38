"""Cross-entropy on logits whose vocabulary is cut over the ranks, without ever gathering them.

The loss of a token is ``log sum_v exp(z_v - m) - (z_label - m)`` with ``m`` the largest logit. Each rank has some of the
``z_v``, so three numbers a token are exchanged: the maximum in one all-reduce, then the sum of exponentials and the
label's logit (which one rank has, the others give zero) together in a second. The backward needs no communication:
the gradient of ``z_v`` is the softmax of what a rank holds, less one at the label if it holds that.

Cost: 3 floats a token on the wire, against V of a gather; memory for the logits once more in float32, in the backward.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from titan_train.models.common.loss import TokenLoss
from titan_train.models.common.tensor_styles import StyleTable
from titan_train.parallel.param_shard import ParamShards
from titan_train.parallel.tensor.collectives import all_reduce
from titan_train.parallel.tensor.styles import style_of

IGNORE_INDEX = -100


def vocab_parallel_cross_entropy_sum(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup, vocab_offset: int, *, z_loss: float = 0.0
) -> Tensor:
    """Sum of the cross-entropy over valid labels, from logits cut along the vocabulary.

    Args:
        logits: This rank's, shape ``[B, S, V_r]``, any float dtype; ranks may hold different numbers, at least one.
            The loss is computed in float32, or in float64 for float64 logits.
        labels: Shape ``[B, S]``, int64, in the whole vocabulary, the same on every rank; -100 where there is nothing to
            predict.
        group: The ranks, in the order of the vocabulary.
        vocab_offset: The first vocabulary entry that this rank holds.
        z_loss: As `titan_train.models.common.loss.cross_entropy_sum`.

    Returns:
        A float32 scalar in nats, the same on every rank; 0 if every label is ignored.
    """
    return cast(Tensor, _CrossEntropySum.apply(logits, labels, group, vocab_offset, z_loss))


def whole_loss(
    loss: TokenLoss, cuts: ParamShards, table: StyleTable, group: dist.ProcessGroup, *, z_loss: float
) -> TokenLoss:
    """The loss on the logits that tensor parallelism leaves a rank: ``loss`` itself where it cut no head."""
    owners = ((name.rpartition("."), cut) for name, cut in cuts.items())
    heads = [cut for (owner, _, leaf), cut in owners if leaf == "weight" and style_of(owner, table) == "head"]
    if not heads:
        return loss
    offset = heads[-1].offset[0]
    return lambda logits, labels: vocab_parallel_cross_entropy_sum(logits, labels, group, offset, z_loss=z_loss)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, vocab_offset: int, z_loss: float
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = all_reduce(wide.amax(-1), group, op="max")
        own = labels - vocab_offset
        valid = labels != IGNORE_INDEX
        here = valid & (own >= 0) & (own < logits.shape[-1])
        own = own.masked_fill(~here, 0)
        at_label = (wide.gather(-1, own.unsqueeze(-1)).squeeze(-1) - largest).masked_fill(~here, 0.0)
        exponentials = (wide - largest.unsqueeze(-1)).exp_().sum(-1)
        total, target = all_reduce(torch.stack([exponentials, at_label]), group).unbind()
        ctx.z_loss = z_loss
        ctx.save_for_backward(logits, largest, total.log(), own, here, valid)
        return (total.log() - target).masked_fill(~valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, largest, log_total, own, here, valid = ctx.saved_tensors
        # the maximum first: added to the logarithm it would cost digits
        grad = (logits.to(largest.dtype) - largest.unsqueeze(-1)).sub_(log_total.unsqueeze(-1)).exp_()
        if ctx.z_loss:
            grad *= (1 + 2 * ctx.z_loss * (largest + log_total)).unsqueeze(-1)
        grad.scatter_add_(-1, own.unsqueeze(-1), -here.to(grad.dtype).unsqueeze(-1))
        scale = grads[0] * valid.to(grad.dtype)
        return grad.mul_(scale.unsqueeze(-1)).to(logits.dtype), None, None, None, None
