"""accelerate with titan-ckpt: all that an ``Accelerator`` has prepared, saved and restored."""

from accelerate import Accelerator
from titan_ckpt import Checkpointer, TrainState


class AccelerateCheckpoint:
    """``save`` and ``restore`` in place of ``accelerator.save_state`` and ``load_state``; call them on every process."""

    def __init__(self, accelerator: Accelerator, root: str, **options) -> None:
        self.accelerator, self.counts = accelerator, {"batches": 0}
        self.checkpointer = Checkpointer(root, **options)

    def state(self) -> TrainState:
        accelerator = self.accelerator
        return TrainState(
            model=accelerator._models,
            optim=[wrapped.optimizer for wrapped in accelerator._optimizers],
            sched=[wrapped.scheduler for wrapped in accelerator._schedulers],
            extra=self.counts,
        )

    def save(self, step: int):
        """Count batches in ``counts``: on resume ``accelerator.skip_first_batches(loader, counts["batches"])``."""
        return self.checkpointer.save(step, self.state())

    def restore(self) -> int:
        return self.checkpointer.restore(self.state())
