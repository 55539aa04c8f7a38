"""One optimizer step: forward and backward over the micro-batches, reduce, clip, update.

The loss of a step is the mean over all valid labels of all ranks and micro-batches. The divisor must be known before
the first backward, so the ranks first sum their label counts; that same collective carries the requests to stop or
to save, so that all ranks act on them at the same step, and costs nothing extra.

A step whose loss or gradient is not finite changes nothing: its gradients are dropped and it is counted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import titan_fsdp as fsdp
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_train.data import Batch
from titan_train.models import call_model
from titan_train.train.loss import count_valid, cross_entropy_sum


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    loss: float
    """Mean cross-entropy in nats over all valid labels."""
    grad_norm: float
    """2-norm of the whole gradient before clipping."""
    num_labels: int
    """Valid labels, over all ranks."""
    skipped: bool
    """Loss or gradient was not finite: nothing was updated."""
    requests: tuple[bool, ...]
    """For each request passed in, whether any rank made it."""


class OptimizerStep:
    """Runs optimizer steps of one model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
        accumulate: fsdp.Keep,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Prepare to step.

        Args:
            model: The wrapped model. Gradients must be summed, not averaged, over data-parallel ranks.
            optimizer: Holds the wrapped model's parameters.
            max_grad_norm: Clip the gradient's 2-norm to this; 0 only measures.
            accumulate: What titan-fsdp keeps between micro-batches.
            group: The ranks that the loss is summed over; None for one rank.
            device: Where the batches are.
        """
        self._model = model
        self._optimizer = optimizer
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._max_norm = max_grad_norm if max_grad_norm > 0 else float("inf")
        self._accumulate: fsdp.Keep = accumulate
        self._group = group
        self._device = device

    def __call__(self, batches: Sequence[Batch], requests: Sequence[bool] = ()) -> StepResult:
        """Train on one step's micro-batches.

        Args:
            batches: This rank's micro-batches; every rank passes as many.
            requests: This rank's flags (stop, save, …), combined with "any" over the ranks.
        """
        counts = torch.tensor([0, *requests], dtype=torch.int64, device=self._device)
        for batch in batches:
            counts[0] += count_valid(batch.labels)
        agreed = self._sum(counts).tolist()
        num_labels = max(1, agreed[0])

        total = torch.zeros((), device=self._device)
        for index, batch in enumerate(batches):
            with fsdp.accumulate(self._model, index, len(batches), keep=self._accumulate):
                loss = cross_entropy_sum(call_model(self._model, batch), batch.labels) / num_labels
                loss.backward()
            total += loss.detach()
        grad_norm = fsdp.clip_grad_norm_(self._parameters, self._max_norm)
        total = self._sum(total)

        loss_value, norm_value = torch.stack(
            [total, grad_norm.to(total.device, total.dtype)]
        ).tolist()  # the one host sync
        skipped = not (_finite(loss_value) and _finite(norm_value))
        if not skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss_value, norm_value, agreed[0], skipped, tuple(flag > 0 for flag in agreed[1:]))

    def _sum(self, value: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(value, group=self._group)
        return value


def _finite(value: float) -> bool:
    return value - value == 0.0


class Stopwatch:
    """Seconds spent in a part of a step."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def __enter__(self) -> "Stopwatch":
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.elapsed_s = time.perf_counter() - self._start
