"""transformers' Trainer with titan-ckpt: ``TitanTrainer`` in place of ``Trainer``; resume as ever.

Weights, optimizer, schedule and random state are sharded, digested and committed at once, on any ranks. Checkpoints lie in
``<output_dir>/steps``; ``checkpoint-N`` keeps only the Trainer's own counters.
"""

from pathlib import Path
from typing import Any

from transformers import Trainer

from titan_ckpt import Checkpointer, TrainState


class TitanTrainer(Trainer):
    """Saves and resumes through titan-ckpt; everything else is transformers'."""

    def _steps(self, **parts: Any) -> tuple[Checkpointer, TrainState]:
        root = Path(str(self.args.output_dir)).absolute() / "steps"
        return Checkpointer(root, keep_last=self.args.save_total_limit), TrainState(**parts)

    def _parts(self) -> dict[str, Any]:
        optim = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        return {"model": self.model_wrapped, "optim": optim, "sched": self.lr_scheduler}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        checkpointer, state = self._steps(**self._parts())
        with checkpointer:
            checkpointer.save(self.state.global_step, state)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """With the optimizer, below."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._restore(checkpoint, **self._parts(), rng=False)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self._restore(checkpoint)  # after the batches that were seen are skipped

    def _restore(self, checkpoint: str | None, **parts: Any) -> None:
        if checkpoint is not None:
            checkpointer, state = self._steps(**parts)
            checkpointer.restore(state, int(Path(checkpoint).name.rpartition("-")[2]))
