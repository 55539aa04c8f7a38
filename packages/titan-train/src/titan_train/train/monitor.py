"""What the trainer reports. The trainer knows this interface only; `titan_train.launch` implements it."""

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

if TYPE_CHECKING:
    from titan_train.observe.timing.collectives import CollectiveMeter


class StepMonitor:
    """Called by the trainer at the points where a run can hang or fail. Does nothing by itself."""

    def measured(self, meter: "CollectiveMeter") -> None:
        """Called once, with what counts the collectives of the steps."""

    def before_data(self, step: int) -> None:
        """Called before the batch of ``step`` is loaded."""

    def data_loaded(self, step: int, batches: list[Any]) -> list[Any]:
        """Called with the microbatches of ``step``; returns those to train on."""
        return batches

    def before_step(self, step: int, parts: Sequence[nn.Module]) -> None:
        """Called before a step, after its batch is loaded and before any collective."""

    def step_made(self, step: int) -> None:
        """Called when all ranks have finished step ``step``."""

    @contextlib.contextmanager
    def phase(self, name: Literal["save", "validate"], step: int) -> Generator[None]:
        """A block that is not a step: saving or validating."""
        yield
