"""Run an exported step function: `step_model`'s contract, whatever executes it.

A folder of such a target holds ``export.json``, which says what the caches look like, and the tokenizer.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_train.export.step_model import CacheShape
from titan_train.export.tokenizer_json import folder_ids
from titan_train.files import read_text, write_atomic

DESCRIPTION = "export.json"


class SteppedModel(ABC):
    """A step function with its caches."""

    def __init__(self, folder: Path) -> None:
        self.description: dict[str, Any] = json.loads(read_text(folder / DESCRIPTION))
        self.shape = CacheShape(**self.description["cache"])
        self._ids = folder_ids(folder)

    def ids(self, text: str) -> list[int] | None:
        return self._ids(text)

    @abstractmethod
    def step(self, tokens: Tensor, positions: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """As `StepModel.forward`."""

    def logits(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        self._check(length)
        positions = torch.arange(length).expand(rows, -1).contiguous()
        return self.step(tokens.contiguous(), positions, self.shape.empty(rows, length))[0]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        total = len(prompt) + count
        self._check(total)
        logits, caches = self.step(
            torch.tensor([list(prompt)]), torch.arange(len(prompt))[None], self.shape.empty(1, total)
        )
        found = [int(logits[0, -1].argmax())]
        while len(found) < count:
            at = torch.tensor([[len(prompt) + len(found) - 1]])
            logits, caches = self.step(torch.tensor([[found[-1]]]), at, caches)
            found.append(int(logits[0, -1].argmax()))
        return found

    def _check(self, length: int) -> None:
        limit = self.description["max_positions"]
        if limit is not None and length > limit:
            raise ValueError(f"{length} positions are needed, but the model has learned {limit}. Shorten the text.")


def write_description(folder: Path, shape: CacheShape, *, max_positions: int | None, step: int, **more: Any) -> None:
    """Write ``export.json``."""
    cache = {name: getattr(shape, name) for name in CacheShape.__dataclass_fields__}
    content = {"step": step, "cache": cache, "max_positions": max_positions, **more}
    write_atomic(folder / DESCRIPTION, json.dumps(content, indent=2) + "\n")
