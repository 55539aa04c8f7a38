"""Log-likelihoods of continuations, in batches of like length."""

from collections.abc import Sequence

import torch

from titan_train.eval.model import EvalModel


def score(
    model: EvalModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, batch_size: int
) -> list[tuple[float, bool]]:
    """How likely each continuation is after its context.

    Rows are padded on the right, where causal attention does not look. A row longer than the model reads loses tokens at
    its beginning, as in lm-evaluation-harness.

    Args:
        model: What scores.
        pairs: Token ids of contexts, at least one each, and of continuations.
        batch_size: Rows of one forward.

    Returns:
        For each pair the natural logarithm of the continuation's probability, and whether each of its tokens is the most
        likely one.

    Raises:
        ValueError: A context is empty, or a continuation longer than the model reads.
    """
    for context, continuation in pairs:
        if not context or len(continuation) > model.max_length:
            raise ValueError(
                f"a context of {len(context)} and a continuation of {len(continuation)} tokens cannot be scored: a context "
                f"has at least one token, a continuation at most {model.max_length} (--max-length)."
            )
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for i, result in zip(chosen, _score(model, [pairs[i] for i in chosen]), strict=True):
            found[i] = result
    return found


def _score(model: EvalModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    rows = [[*context, *continuation][-(model.max_length + 1) :] for context, continuation in pairs]
    longest = max(len(row) - 1 for row in rows)
    tokens = torch.tensor([[*row[:-1], *([0] * (longest - len(row) + 1))] for row in rows], device=model.device)
    logits = model.logits(tokens)
    results: list[tuple[float, bool]] = []
    for number, (row, (_, continuation)) in enumerate(zip(rows, pairs, strict=True)):
        if not continuation:
            results.append((0.0, True))
            continue
        predicted = logits[number, len(row) - 1 - len(continuation) : len(row) - 1]
        wanted = torch.tensor(continuation, device=predicted.device)
        likely = predicted.log_softmax(-1).gather(-1, wanted[:, None])
        results.append((float(likely.double().sum()), bool((predicted.argmax(-1) == wanted).all())))
    return results
