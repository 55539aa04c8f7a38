"""Loss on held-out data: the same samples on any number of ranks, weighted by labels."""

import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import titan_fp8
import torch

from titan_train.data.loader.source import TaskBatch
from titan_train.models.call import evaluating
from titan_train.observe.records import ValidationRecord
from titan_train.parallel.model import ParallelModel
from titan_train.tokenizers import bits_per_byte
from titan_train.train.reduce_scope import ReduceScope


@torch.no_grad()
def validation_loss(
    model: ParallelModel,
    batches: Iterable[TaskBatch],
    *,
    accumulation: int,
    scope: ReduceScope,
    device: torch.device,
    text_bytes: Callable[[Any], torch.Tensor | None] | None = None,
    step: int = 0,
) -> ValidationRecord:
    """Mean loss over ``batches`` of all ranks, the same on each.

    Sums and counts are added over ranks, not means, so that every label has the same weight.

    Args:
        model: What this rank trains.
        batches: This rank's micro-batches; every rank has as many, a multiple of ``accumulation``.
        accumulation: Micro-batches of a step, which a pipeline takes at once.
        scope: What this rank adds to sums.
        device: Where the batches are.
        text_bytes: Counts the bytes that the labels of a batch stand for, see `titan_train.task.TaskInputs`; not asked where the
            loss is another than their cross-entropy.
        step: Optimizer steps made.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    remaining = iter(batches)
    observing = nullcontext() if model.observed is None else model.observed.observing(device)
    with evaluating(model.parts), titan_fp8.ConstantWeights(*model.parts), observing as by_part:
        while group := list(itertools.islice(remaining, accumulation)):
            cut = group if model.context is None else [model.context.cut(batch) for batch in group]
            if model.pipeline is not None:
                sums[0] += model.pipeline.evaluate(cut) * scope.counts_loss
            else:
                for batch in cut:
                    sums[0] += model.loss_sum(batch) * scope.counts_loss
            if scope.counts_labels:
                for batch in group:
                    sums[1] += model.task.count(batch)
                    if text_bytes is not None and not model.own_loss and (counted := text_bytes(batch)) is not None:
                        sums[2] += counted
    scope.sum(sums)
    total, count, num_bytes = sums.tolist()
    return ValidationRecord(
        step=step,
        loss=total / count if count else math.nan,
        bits_per_byte=bits_per_byte(total, num_bytes),
        tokens=int(count),
        parts=_means(model, scope, by_part),
    )


def _means(model: ParallelModel, scope: ReduceScope, by_part: torch.Tensor | None) -> dict[str, float]:
    """The means of the parts that occurred.

    Ranks that compute the same part of the loss (tensor parallelism) add it as often to sums as to counts; other ranks than
    the last stage's (pipelines) add nothing.
    """
    if model.observed is None or by_part is None:
        return {}
    sums = scope.sum(by_part).tolist()
    return {name: total / count for name, (total, count) in zip(model.observed.names, sums, strict=True) if count}
