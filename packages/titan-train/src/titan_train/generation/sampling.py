"""Choose the next token of each row from its logits.

Filters apply in the order of Hugging Face's generation, so that the same numbers mean the same: repetition penalty,
temperature, top-k, top-p, min-p; each sees the distribution that the one before left. All of it is done in float32.
Each row draws from its own generator, so its result does not depend on which other rows are in the batch.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from titan_train.values import Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen; the default takes the likeliest."""

    temperature: Annotated[float, Range(0, note="0 takes the likeliest token")] = 0.0
    """Divides the logits; 0 takes the likeliest token, for which top_k, top_p and min_p change nothing."""
    top_k: Annotated[int, Range(0, note="0 keeps all tokens")] = 0
    """Keep only this many likeliest tokens; 0 keeps all."""
    top_p: Annotated[float, Range(above=0, most=1, note="1 keeps all tokens")] = 1.0
    """Keep the likeliest tokens until their probabilities reach this, the one that crosses it included."""
    min_p: Annotated[float, Range(0, 1, note="0 keeps all tokens")] = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    repetition_penalty: Annotated[float, Range(above=0, note="1 changes nothing")] = 1.0
    """Above 1, tokens already in the row become less likely: positive logits are divided by it, negative multiplied."""

    def __post_init__(self) -> None:
        check_values("", self)


def choose_tokens(
    logits: Tensor, seen: Tensor | None, sampling: Sampling, generators: Sequence[torch.Generator]
) -> Tensor:
    """The next token of each row.

    Args:
        logits: ``[B, V]``, any float dtype.
        seen: ``[B, V]`` bool, tokens that the row already has; None where nothing is penalized for that.
        sampling: How to choose.
        generators: One CPU generator for each row.

    Returns:
        ``[B]`` int64 on the device of ``logits``.
    """
    logits = logits.float()
    if seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = filter_logits(logits, sampling).softmax(dim=-1).cpu()
    drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(probabilities, generators, strict=True)]
    return torch.cat(drawn).to(logits.device)


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that the row already has less likely (CTRL, arXiv:1909.05858); shapes as in `choose_tokens`."""
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature, top-k, top-p (arXiv:1904.09751) and min-p (arXiv:2407.01082).

    Args:
        logits: ``[B, V]`` float32.
        sampling: With ``temperature`` above 0.

    Returns:
        ``[B, V]``, with dropped tokens at -inf; at least one token of each row is kept.
    """
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # so the token that crosses top_p stays
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    if sampling.min_p > 0:
        probabilities = logits.softmax(dim=-1)
        least = sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, float("-inf"))
    return logits
