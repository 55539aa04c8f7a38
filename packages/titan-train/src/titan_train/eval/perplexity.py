"""Perplexity and bits per byte of whole texts.

Each token is scored once. A text longer than the model reads is cut into disjoint windows, each of which sees one token of
the window before it; the first sees the token that begins a text. So lm-evaluation-harness does it too.

Bits per byte do not depend on the tokenizer: the sum of the negative log-likelihoods over ln 2 and the bytes of the text.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_train.eval.model import EvalModel
from titan_train.eval.ranks import Ranks
from titan_train.eval.scoring import score
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
        yield [whole[start - 1]], list(whole[start : start + max_length])


def read_texts(files: Sequence[Path]) -> list[str]:
    """One text for each file; of a ``.jsonl`` file, the field ``text`` of each line.

    Raises:
        ValueError: A file is not UTF-8, or a line is no object with a text.
        OSError: A file cannot be read.
    """
    texts: list[str] = []
    for file in files:
        try:
            content = read_text(file)
            if file.suffix != ".jsonl":
                texts.append(content)
                continue
            for number, line in enumerate(content.splitlines(), start=1):
                if line.strip():
                    value = json.loads(line)
                    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                        raise ValueError(f"line {number} is no object with a text")
                    texts.append(value["text"])
        except ValueError as err:
            raise ValueError(
                f"{file} cannot be evaluated: {err}. Name UTF-8 files, or JSON lines with a text."
            ) from err
    return texts
