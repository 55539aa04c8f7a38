"""Cross-entropy as a sum over tokens, so that any cut of a batch over ranks and micro-batches adds up to the same.

The mean of means is wrong as soon as two micro-batches have different numbers of valid labels. Each micro-batch
gives a sum; the trainer divides by the number of valid labels of the whole step, over all ranks.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""From logits and labels to the sum of the cross-entropy over valid labels."""

IGNORE_INDEX = -100
"""The label of a token that is not predicted: padding, or across a document's end."""


@dataclass(frozen=True, slots=True)
class LogitsChange:
    """What a family does to each logit after its head: ``x * scale`` (Cohere, Granite), and with a cap ``cap * tanh(x / cap)`` of
    that (Gemma 2, arXiv:2408.00118, section 2).
    """

    scale: float = 1.0
    cap: float = 0.0
    """0: none."""

    def __call__(self, logits: Tensor) -> Tensor:
        """The changed logits, of any shape."""
        scaled = logits if self.scale == 1 else logits * self.scale
        return self.cap * torch.tanh(scaled / self.cap) if self.cap else scaled

    def with_slope(self, logits: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor | float]:
        """The changed logits, computed in ``wide``, and their derivative with respect to ``logits``, whose memory is used."""
        scaled = logits.to(wide).mul_(self.scale)
        if not self.cap:
            return scaled.to(logits.dtype), self.scale
        of_cap = scaled.div_(self.cap).tanh_()
        changed = (of_cap * self.cap).to(logits.dtype)
        return changed, of_cap.square_().neg_().add_(1).mul_(self.scale)


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, z_loss: float = 0.0) -> Tensor:
    """Sum of the cross-entropy over valid labels.

    Args:
        logits: Shape ``[B, S, V]``, any float dtype; the loss is computed in float32.
        labels: Shape ``[B, S]``, int64; `IGNORE_INDEX` where there is nothing to predict.
        z_loss: Weight of the squared log-sum-exp of every valid label's logits in the gradients (arXiv:2204.02311, section
            5); the returned loss does not hold it.

    Returns:
        A float32 scalar in nats; 0 if every label is ignored.
    """
    wide = logits.flatten(0, 1).float()
    loss = F.cross_entropy(wide, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    if not z_loss:
        return loss
    spread = z_loss * wide.logsumexp(-1).square().masked_fill(labels.flatten() == IGNORE_INDEX, 0.0).sum()
    return loss + (spread - spread.detach())


class NextTokenLoss:
    """The cross-entropy of whole logits, which may also be computed in the head, or by ranks with parts of the logits."""

    def __init__(self, loss: TokenLoss) -> None:
        """Wrap what computes it."""
        self._loss = loss

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over valid labels."""
        return self._loss(logits, labels)


def whole_vocabulary_loss(
    vocab_size: int, *, z_loss: float = 0.0, cross_entropy: TokenLoss | None = None
) -> NextTokenLoss:
    """`cross_entropy_sum`, for models that return whole logits; anything else that a model returns is refused.

    Logits that miss part of the vocabulary would give a loss as well, as long as no label falls into that part.

    Args:
        vocab_size: The tokenizer's: the least number of logits of a token.
        z_loss: As `cross_entropy_sum`.
        cross_entropy: What computes it instead, where there is no z-loss.
    """

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        given = cast("object", logits)  # a user's model returns what it likes
        if not isinstance(given, Tensor):
            raise ValueError(
                f"the model returned a {type(given).__name__}: its forward must return the logits, one tensor [B, S, V]. Return "
                "that tensor from it, such as output.logits."
            )
        if logits.shape[:-1] != labels.shape or logits.shape[-1] < vocab_size:
            raise ValueError(
                f"the model returned a tensor of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)} and "
                f"{vocab_size} tokens: it must be [B, S, V] with V at least {vocab_size}. Under parallel.tp, the linear to the "
                "vocabulary must have the style 'head' in parallel.tp_plan."
            )
        if cross_entropy is not None and not z_loss:
            return cross_entropy(logits, labels)
        return cross_entropy_sum(logits, labels, z_loss=z_loss)

    return NextTokenLoss(loss)


def count_valid(labels: Tensor) -> Tensor:
    """Number of labels that are predicted, an int64 scalar on the labels' device."""
    return torch.count_nonzero(labels != IGNORE_INDEX)


class ObservedLoss:
    """A task's loss that can be watched: validation reports it by parts, under any layout, from the place that computes it."""

    def __init__(self, loss: TokenLoss, names: Sequence[str], sums: Callable[[Tensor, Any], Tensor]) -> None:
        """Wrap a loss.

        Args:
            loss: The loss.
            names: Of the parts.
            sums: From output and target to ``[parts, 2]``: each part's sum of the loss, and its count.
        """
        self.names = tuple(names)
        self._loss = loss
        self._of_parts = sums
        self._sums: Tensor | None = None

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        """The sum of the loss."""
        if self._sums is not None:
            self._sums += self._of_parts(output, target).to(self._sums)
        return self._loss(output, target)

    @contextmanager
    def observing(self, device: torch.device) -> Generator[Tensor]:
        """Add up; yields the sums ``[parts, 2]``, float64, of what this rank's loss is called with until the end."""
        self._sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)
        try:
            yield self._sums
        finally:
            self._sums = None
