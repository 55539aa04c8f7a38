"""Loss on held-out text: the same sequences whatever the number of ranks, weighted by tokens."""

import itertools
from collections.abc import Iterable

import titan_fp8
import torch

from titan_train.parallel.apply import ParallelModel
from titan_train.task import TaskBatch
from titan_train.train.reduce_scope import ReduceScope


@torch.no_grad()
def validation_loss(
    model: ParallelModel, batches: Iterable[TaskBatch], *, accumulation: int, scope: ReduceScope, device: torch.device
) -> tuple[float, int]:
    """Mean cross-entropy in nats per valid label over ``batches`` of all ranks, and the number of labels.

    Sums and counts are added over ranks, not means, so that every label has the same weight.

    Args:
        model: What this rank trains.
        batches: This rank's micro-batches; every rank has as many, a multiple of ``accumulation``.
        accumulation: Micro-batches of a step, which a pipeline takes at once.
        scope: What this rank adds to sums.
        device: Where the batches are.
    """
    was_training = [part.training for part in model.parts]
    for part in model.parts:
        part.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    remaining = iter(batches)
    with titan_fp8.ConstantWeights(*model.parts):
        while group := list(itertools.islice(remaining, accumulation)):
            cut = group if model.context is None else [model.context.cut(batch) for batch in group]
            if model.pipeline is not None:
                sums[0] += model.pipeline.evaluate(cut) * scope.counts_loss
            else:
                for batch in cut:
                    sums[0] += model.loss_sum(batch) * scope.counts_loss
            if scope.counts_labels:
                sums[1] += sum(model.task.count(batch) for batch in group)
    scope.sum(sums)
    for part, training in zip(model.parts, was_training, strict=True):
        part.train(training)
    total, count = sums.tolist()
    return total / max(1.0, count), int(count)
