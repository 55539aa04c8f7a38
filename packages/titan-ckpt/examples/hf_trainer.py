"""transformers' Trainer with titan-ckpt: ``TitanTrainer`` in place of ``Trainer``; resume as ever."""

from pathlib import Path

from titan_ckpt import Checkpointer, TrainState
from transformers import Trainer


class TitanTrainer(Trainer):
    """Checkpoints lie in ``<output_dir>/steps``; ``checkpoint-N`` keeps only the Trainer's own counters."""

    def _steps(self, **parts):
        root = Path(self.args.output_dir).absolute() / "steps"
        return Checkpointer(root, keep_last=self.args.save_total_limit), TrainState(**parts)

    def _parts(self):
        optim = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        return {"model": self.model_wrapped, "optim": optim, "sched": self.lr_scheduler}

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        checkpointer, state = self._steps(**self._parts())
        with checkpointer:
            checkpointer.save(self.state.global_step, state)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        pass  # with the optimizer, below

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            checkpointer, state = self._steps(**self._parts(), rng=False)
            checkpointer.restore(state, int(Path(checkpoint).name.rpartition("-")[2]))

    def _load_rng_state(self, checkpoint):
        if checkpoint is not None:  # after the batches that were seen are skipped
            checkpointer, state = self._steps()
            checkpointer.restore(state, int(Path(checkpoint).name.rpartition("-")[2]))
