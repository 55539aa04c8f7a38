"""transformers' Trainer with titan-ckpt: ``TitanTrainer`` in place of ``Trainer``; resume as ever.

Weights, optimizer, schedule and random state are sharded, digested and committed at once, on any ranks. Checkpoints lie in
``<output_dir>/steps``; ``checkpoint-N`` keeps only the Trainer's own counters.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

from titan_ckpt import Checkpointer, TrainState
from titan_ckpt.comm import ByteComm


class TitanTrainer(Trainer):
    """Saves and resumes through titan-ckpt; everything else is transformers'.

    Raises:
        ValueError: With ``load_best_model_at_end``, which looks for transformers' own files.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.load_best_model_at_end:
            raise ValueError(
                "TitanTrainer got load_best_model_at_end=True, which looks for files that it does not write: the last weights "
                "would stay. Set load_best_model_at_end=False, and restore the best step after training: "
                f"Checkpointer({str(self._root())!r}).restore(TrainState(model=model, rng=False), "
                "trainer.state.best_global_step). save_total_limit must be large enough to keep it."
            )

    def _root(self) -> Path:
        return Path(str(self.args.output_dir)).absolute() / "steps"

    @cached_property
    def _saving_ranks(self) -> Any:
        """One group for all Checkpointers: where torch's has no gloo, each would make its own, which torch keeps."""
        return ByteComm().group

    def _steps(self, **parts: Any) -> tuple[Checkpointer, TrainState]:
        limit = self.args.save_total_limit
        return Checkpointer(self._root(), keep_last=limit, group=self._saving_ranks), TrainState(**parts)

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
            exported: Any = [
                c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)
            ]
            states: Any = self.state.stateful_callbacks
            states.update(TrainerState(stateful_callbacks=exported).stateful_callbacks)
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
