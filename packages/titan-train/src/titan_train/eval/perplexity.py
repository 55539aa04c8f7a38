"""Log-likelihoods of continuations in batches of like length; perplexity and bits per byte of whole texts.

Each token is scored once. A text longer than the model reads is cut into windows, each of which sees one token of the window
before it; the last, which is shorter, sees as many as the model reads; the first sees the token that begins a text. So
lm-evaluation-harness does it too.

Bits per byte do not depend on the tokenizer: the sum of the negative log-likelihoods over ln 2 and the bytes of the text.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from titan_train.eval.model import EvalModel
from titan_train.eval.ranks import Ranks
from titan_train.files import read_text
from titan_train.tokenizers import bits_per_byte


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts texts."""

    nats: float
    """Sum of the negative log-likelihoods of all tokens."""
    tokens: int
    bytes: int
    """Of the texts in UTF-8."""
    texts: int
    max_length: int
    """Tokens that the model read at once; the figures depend on it."""

    @property
    def per_token(self) -> float:
        """Perplexity of a token; infinite where it exceeds what a float holds."""
        mean = self.nats / max(1, self.tokens)
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nats, max(1, self.bytes)) or 0.0


def perplexity(model: EvalModel, texts: Sequence[str], *, batch_size: int, ranks: Ranks) -> Perplexity:
    """Score texts; every rank takes its share and returns the whole result.

    Args:
        model: What scores.
        texts: The same on every rank.
        batch_size: Windows of one forward.
        ranks: Who shares the work.

    Raises:
        ValueError: There is no text with a token.
    """
    if not any(texts):
        raise ValueError("there is no text to evaluate: every text is empty. Name files with text.")
    windows: list[tuple[list[int], list[int]]] = []
    tokens = 0
    for text in texts[ranks.rank :: ranks.world_size]:
        ids = model.encode(text)
        tokens += len(ids)
        windows += list(rolling_windows(ids, model.prefix_id, model.max_length))
    nats = -math.fsum(likely for likely, _ in score(model, windows, batch_size=batch_size))
    nats, total = ranks.sum([nats, float(tokens)])
    return Perplexity(nats, int(total), sum(len(text.encode()) for text in texts), len(texts), model.max_length)


def rolling_windows(ids: Sequence[int], prefix_id: int, max_length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Context and continuation of each window: every token of ``ids`` is in one continuation."""
    whole = [prefix_id, *ids]
    for start in range(1, len(whole), max_length):
        continuation = whole[start : start + max_length]
        seen = max_length - len(continuation) + 1 if start > 1 else 1
        yield whole[start - seen : start], continuation


def read_texts(files: Sequence[Path]) -> list[str]:
    """One text for each file; of a ``.jsonl`` file, the field ``text`` of each line.

    Raises:
        ValueError: A file is not UTF-8, or a line is not an object with a text.
        OSError: A file cannot be read.
    """
    texts: list[str] = []
    for file in files:
        try:
            content = read_text(file).removeprefix("\ufeff")  # a byte-order mark, as training has it
            if file.suffix.lower() != ".jsonl":
                texts.append(content)
                continue
            for number, line in enumerate(content.split("\n"), start=1):
                if line.strip():
                    value = json.loads(line)
                    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                        raise ValueError(f"line {number} is not an object with a text")
                    texts.append(value["text"])
        except ValueError as err:
            raise ValueError(
                f"{file} cannot be evaluated: {err}. Name UTF-8 files, or JSON lines with a text."
            ) from err
    return texts


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
