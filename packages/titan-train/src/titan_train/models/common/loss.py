"""Cross-entropy as a sum over tokens, so that any cut of a batch over ranks and micro-batches adds up to the same.

The mean of means is wrong as soon as two micro-batches have different numbers of valid labels. Each micro-batch
gives a sum; the trainer divides by the number of valid labels of the whole step, over all ranks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""From logits and labels to the sum of the cross-entropy over valid labels."""

IGNORE_INDEX = -100
"""The label of a token that is not predicted: padding, or across a document's end."""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy over valid labels.

    Args:
        logits: Shape ``[B, S, V]``, any float dtype; the loss is computed in float32.
        labels: Shape ``[B, S]``, int64; `IGNORE_INDEX` where there is nothing to predict.

    Returns:
        A float32 scalar in nats; 0 if every label is ignored.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


def count_valid(labels: Tensor) -> Tensor:
    """Number of labels that are predicted, an int64 scalar on the labels' device."""
    return torch.count_nonzero(labels != IGNORE_INDEX)
