"""Accelerate with titan-ckpt: all that an ``Accelerator`` has prepared, saved and restored.

checkpoint = AccelerateCheckpoint(accelerator, "runs/a/ckpt", keep_last=2)
done = checkpoint.restore()
loader = accelerator.skip_first_batches(loader, checkpoint.counts["batches"])
...
    checkpoint.counts["batches"] += 1
    checkpoint.save(step)
"""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from titan_ckpt import Checkpointer, SaveJob, TrainState


class AccelerateCheckpoint:
    """``save`` and ``restore`` in place of ``accelerator.save_state`` and ``load_state``; call them on every process."""

    counts: dict[str, int]
    """Saved with each step and restored: count the batches of the epoch here, and whatever else you need."""
    checkpointer: Checkpointer

    def __init__(self, accelerator: Accelerator, root: str | Path, **options: Any) -> None:
        """Open the folder ``root``.

        Args:
            accelerator: After ``accelerator.prepare``.
            root: Where the steps lie.
            options: As of `titan_ckpt.Checkpointer`.
        """
        self.accelerator, self.counts = accelerator, {"batches": 0}
        self.checkpointer = Checkpointer(root, **options)

    def save(self, step: int) -> SaveJob:
        """Save what the accelerator has prepared, and `counts`."""
        return self.checkpointer.save(step, self._state())

    def restore(self) -> int:
        """The newest step, restored; 0 if there is none yet."""
        return self.checkpointer.restore(self._state())

    def _state(self) -> TrainState:
        held: Any = self.accelerator  # Accelerate has no public list of what it prepared
        return TrainState(
            model=held._models,
            optim=[wrapped.optimizer for wrapped in held._optimizers],
            sched=[wrapped.scheduler for wrapped in held._schedulers],
            extra=self.counts,
        )
