"""What the trainer tells the outside about itself. The trainer knows this class only; `titan_train.launch` fills it."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Literal

from torch import nn


class StepMonitor:
    """Called by the trainer at the places where a run can stand still or be struck. Does nothing by itself."""

    def before_step(self, step: int, parts: Sequence[nn.Module]) -> None:
        """Step ``step`` is about to be made: its data is there, no rank has been waited for yet."""

    def step_made(self, step: int) -> None:
        """Step ``step`` is done on all ranks."""

    @contextlib.contextmanager
    def phase(self, name: Literal["save", "validate"], step: int) -> Generator[None]:
        """Something other than steps takes its time in this block."""
        yield
