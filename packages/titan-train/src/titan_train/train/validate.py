"""Loss on held-out text: the same sequences whatever the number of ranks, weighted by tokens."""

import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import titan_fp8
import torch

from titan_train.parallel.apply import ParallelModel
from titan_train.task import TaskBatch
from titan_train.tokenizers import bits_per_byte
from titan_train.train.reduce_scope import ReduceScope


class HeldOutLoss(NamedTuple):
    """The loss on held-out data, the same on every rank."""

    loss: float
    """Mean over what the task counts; of text, nats per valid label."""
    counted: int
    """Over all ranks."""
    bits_per_byte: float | None
    """The same loss per byte of text that the counted labels stand for; None where the task counts no bytes."""
    parts: dict[str, float]
    """The means of parts of the data, such as the times of diffusion; empty where the task has none."""


@torch.no_grad()
def validation_loss(
    model: ParallelModel,
    batches: Iterable[TaskBatch],
    *,
    accumulation: int,
    scope: ReduceScope,
    device: torch.device,
    text_bytes: Callable[[Any], torch.Tensor | None] | None = None,
) -> HeldOutLoss:
    """Mean loss over ``batches`` of all ranks.

    Sums and counts are added over ranks, not means, so that every label has the same weight.

    Args:
        model: What this rank trains.
        batches: This rank's micro-batches; every rank has as many, a multiple of ``accumulation``.
        accumulation: Micro-batches of a step, which a pipeline takes at once.
        scope: What this rank adds to sums.
        device: Where the batches are.
        text_bytes: Counts the bytes that the labels of a batch stand for, see `titan_train.task.TaskInputs`.
    """
    was_training = [part.training for part in model.parts]
    for part in model.parts:
        part.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    remaining = iter(batches)
    observing = nullcontext() if model.observed is None else model.observed.observing(device)
    with titan_fp8.ConstantWeights(*model.parts), observing as by_part:
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
                    if text_bytes is not None and (counted := text_bytes(batch)) is not None:
                        sums[2] += counted
    scope.sum(sums)
    for part, training in zip(model.parts, was_training, strict=True):
        part.train(training)
    total, count, num_bytes = sums.tolist()
    bits = bits_per_byte(total, num_bytes)
    return HeldOutLoss(total / max(1.0, count), int(count), bits, _means(model, scope, by_part))


def _means(model: ParallelModel, scope: ReduceScope, by_part: torch.Tensor | None) -> dict[str, float]:
    """The means of the parts that occurred.

    Ranks that compute the same part of the loss (tensor parallelism) add it as often to sums as to counts; other ranks than
    the last stage's (pipelines) add nothing.
    """
    if model.observed is None or by_part is None:
        return {}
    sums = scope.sum(by_part).tolist()
    return {name: total / count for name, (total, count) in zip(model.observed.names, sums, strict=True) if count}
