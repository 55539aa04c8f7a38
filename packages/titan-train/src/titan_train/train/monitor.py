"""What the trainer reports. The trainer knows this interface only; `titan_train.launch` implements it."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Literal

from torch import nn


class StepMonitor:
    """Called by the trainer at the points where a run can hang or fail. Does nothing by itself."""

    def before_step(self, step: int, parts: Sequence[nn.Module]) -> None:
        """Called before a step, after its batch is loaded and before any collective."""

    def step_made(self, step: int) -> None:
        """Called when all ranks have finished step ``step``."""

    @contextlib.contextmanager
    def phase(self, name: Literal["save", "validate"], step: int) -> Generator[None]:
        """A block that is not a step: saving or validating."""
        yield
