"""transformers' Trainer with titan-ckpt: ``TitanTrainer`` in place of ``Trainer``; resume as ever.

Weights, optimizer, schedule and random state are sharded, digested and committed at once, on any ranks. Checkpoints lie in
``<output_dir>/steps``; ``checkpoint-N`` keeps only the Trainer's own counters.
"""

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

from titan_ckpt import Checkpointer, TrainState
from titan_ckpt.comm import ByteComm
from titan_ckpt.storage.files import write_plain

_log = logging.getLogger("titan_ckpt")
_COUNTERS, _SCALER = "trainer_state.json", "scaler"


class TitanTrainer(Trainer):
    """Saves and resumes through titan-ckpt; everything else is transformers'.

    Raises:
        ValueError: With ``load_best_model_at_end`` or ``push_to_hub``, which look for transformers' own files.
    """

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **kwargs: Any) -> None:
        if args is not None and args.push_to_hub:  # else a repository is made on the Hub
            raise ValueError(
                "TitanTrainer got push_to_hub=True, which uploads files that it does not write. Set push_to_hub=False; after "
                "training call trainer.save_model(FOLDER) and upload that folder."
            )
        super().__init__(model, args, *others, **kwargs)
        if self.args.load_best_model_at_end:
            raise ValueError(
                "TitanTrainer got load_best_model_at_end=True, which looks for files that it does not write: the last weights "
                "would stay. Set load_best_model_at_end=False and "
                f"metric_for_best_model={self.args.metric_for_best_model!r}, save at every evaluation (the same strategy and "
                "steps), and restore the best step after training: "
                f"Checkpointer({str(self._root())!r}).restore(TrainState(model=model, rng=False), "
                "trainer.state.best_global_step). save_total_limit must be large enough to keep it."
            )

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            ValueError: Always: trials would save their steps to one folder, each over another's.
        """
        raise ValueError(
            f"TitanTrainer.hyperparameter_search would save the steps of all trials to {self._root()}, each over another's. "
            "Search with transformers' Trainer, or make a TitanTrainer with an output_dir of its own for each trial."
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            ValueError: Always: it would upload the saved steps too.
        """
        raise ValueError(
            f"TitanTrainer.push_to_hub would upload {self.args.output_dir} with all saved steps. Call "
            "trainer.save_model(FOLDER) and upload that folder."
        )

    def _root(self) -> Path:
        return Path(str(self.args.output_dir)).absolute() / "steps"

    @cached_property
    def _saving_ranks(self) -> Any:
        """One group for all Checkpointers: where torch's has no gloo, each would make its own, which torch keeps."""
        return ByteComm().group

    def _checkpointer(self) -> Checkpointer:
        return Checkpointer(self._root(), keep_last=self.args.save_total_limit, group=self._saving_ranks)

    def _parts(self) -> dict[str, Any]:
        optim = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        return {"model": self.model_wrapped, "optim": optim, "sched": self.lr_scheduler}

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers', where ``True`` resumes from the newest step that is finished.

        Raises:
            ValueError: None is finished.
        """
        return super().train(self._resumed_from(resume_from_checkpoint), *args, **kwargs)

    def _resumed_from(self, given: Any) -> Any:
        if given is None or given is False:
            return given
        folder, checkpointer = self._root().parent, self._checkpointer()

        def find() -> list[list[int]]:
            steps = checkpointer.steps()
            return [steps, [step for step in steps if (folder / f"checkpoint-{step}" / _COUNTERS).is_file()]]

        ranks = ByteComm(self._saving_ranks)
        steps, counted = ranks.from_rank0(find, f"listing {self._root()}", lambda err: err)
        if given is True:
            if not counted:
                raise ValueError(
                    f"{folder} has no finished step to resume from. Call train() without resume_from_checkpoint to begin."
                )
        elif not counted or Path(given).absolute().parent != folder or _number(given) <= max(steps):
            return given
        else:
            _log.warning("%s was not finished; step %d is resumed from", given, counted[-1])
        return str(folder / f"checkpoint-{counted[-1]}")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        if self.args.should_save:  # before the step: every step that is found has its counters
            self._write_counters(Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}"))
        scaler = self.accelerator.scaler
        state = TrainState(**self._parts(), extra={} if scaler is None else {_SCALER: scaler})
        with self._checkpointer() as checkpointer:
            checkpointer.save(self.state.global_step, state)

    def _write_counters(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        exported: Any = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
        states: Any = self.state.stateful_callbacks
        states.update(TrainerState(stateful_callbacks=exported).stateful_callbacks)
        unfinished = folder / f".{_COUNTERS}"
        self.state.save_to_json(str(unfinished))
        write_plain(unfinished, unfinished.read_bytes())  # on disk
        unfinished.replace(folder / _COUNTERS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """With the optimizer, below."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._restore(checkpoint, **self._parts(), rng=False)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler, saved = self.accelerator.scaler, self._restore(checkpoint, rng=False, extra={})
        if scaler is not None and _SCALER in saved:
            scaler.load_state_dict(saved[_SCALER])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self._restore(checkpoint)  # after the batches that were seen are skipped

    def _restore(self, checkpoint: str | None, **parts: Any) -> Any:
        state = TrainState(**parts)
        if checkpoint is not None:  # may be one of another output folder
            root = Path(checkpoint).absolute().parent / "steps"
            Checkpointer(root, group=self._saving_ranks).restore(state, _number(checkpoint))
        return state.extra


def _number(checkpoint: str) -> int:
    """The step of the folder ``checkpoint-N``."""
    return int(Path(checkpoint).name.rpartition("-")[2])
