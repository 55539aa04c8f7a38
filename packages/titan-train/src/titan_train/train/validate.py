"""Loss on held-out text: the same sequences whatever the number of ranks, weighted by tokens."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from titan_train.data import Batch
from titan_train.models import call_model
from titan_train.train.loss import count_valid, cross_entropy_sum


@torch.no_grad()
def validation_loss(
    model: nn.Module, batches: Iterable[Batch], *, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[float, int]:
    """Mean cross-entropy in nats per valid label over ``batches`` of all ranks, and the number of labels.

    Sums and counts are reduced, never means: ranks whose batches hold different numbers of labels weigh rightly.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        sums[0] += cross_entropy_sum(call_model(model, batch), batch.labels)
        sums[1] += count_valid(batch.labels)
    if group is not None:
        dist.all_reduce(sums, group=group)
    model.train(was_training)
    total, count = sums.tolist()
    return total / max(1.0, count), int(count)
