"""Accelerate with titan-ckpt: all that an ``Accelerator`` has prepared, saved and restored.

checkpoint = AccelerateCheckpoint(accelerator, "runs/a/ckpt", keep_last=2)
done = checkpoint.restore()
loader = accelerator.skip_first_batches(loader, checkpoint.counts["batches"])
...
    checkpoint.counts["batches"] += 1
    checkpoint.save(step)

A stateful loader (``use_stateful_dataloader=True``) goes on by itself: do not skip its batches. It does so on as many
processes as saved.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from accelerate import Accelerator
from torch import nn

from titan_ckpt import Checkpointer, SaveJob, TrainState

_OWN = "accelerator."
"""How the names of the accelerator's own values begin among `AccelerateCheckpoint.counts`."""


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
        """Save what the accelerator has prepared and registered, its gradient scaler and place in an accumulation, and `counts`.

        Raises:
            ValueError: DeepSpeed or Megatron-LM holds the state, or ``save_state`` has hooks.
        """
        state = self._state()
        state.extra.update(self._may_be_new())
        return self.checkpointer.save(step, state)

    def restore(self, **options: Any) -> int:
        """The newest step, restored; 0 if there is none yet. ``options`` are those of `titan_ckpt.Checkpointer.restore`.

        A gradient scaler or an accumulation that is new begins anew.

        Raises:
            ValueError: The step has more registered objects, other stateful loaders, or those of another number of processes.
        """
        state = self._state()
        own = {name for name in state.extra if name.startswith(_OWN)}
        step = self.checkpointer.restore(state, **options)
        for name, part in self._may_be_new().items():
            if saved := state.extra.get(name):
                part.load_state_dict(saved)
        self.counts.update({name: value for name, value in state.extra.items() if not name.startswith(_OWN)})
        more = [name for name in state.extra if name.startswith(f"{_OWN}registered") and name not in own]
        if more and options.get("strict", True):
            raise ValueError(
                f"step {step} has the state of {len(more)} more registered objects than this accelerator has. Register the same "
                "ones by accelerator.register_for_checkpointing before the restore, or pass strict=False to leave them out."
            )
        return step

    def _state(self) -> TrainState:
        held: Any = self.accelerator  # Accelerate has no public list of what it prepared
        _check(held)
        models = held._models
        if len(models) > 1:  # names of several may be equal
            models = nn.ModuleDict({str(number): model for number, model in enumerate(models)})
        loaders = [loader for loader in held._dataloaders if getattr(loader, "use_stateful_dataloader", False)]
        extra: dict[str, Any] = dict(self.counts)
        extra |= {f"{_OWN}registered {number}": found for number, found in enumerate(held._custom_objects)}
        return TrainState(
            model=models,
            optim=[wrapped.optimizer for wrapped in held._optimizers],
            sched=[wrapped.scheduler for wrapped in held._schedulers],
            data=_Loaders(loaders, held.num_processes) if loaders else None,
            extra=extra,
        )

    def _may_be_new(self) -> dict[str, Any]:
        """What a run may begin to use when it resumes: saved, and restored only from a step that has it."""
        held: Any = self.accelerator
        parts: dict[str, Any] = {} if held.scaler is None else {f"{_OWN}scaler": held.scaler}
        if held.gradient_state.num_steps > 1:
            parts[f"{_OWN}step"] = _AccumulationStep(held)
        return parts


def _check(held: Any) -> None:
    """Refuse an accelerator with state that is not its own."""
    kind = str(held.distributed_type.value)
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"accelerator.distributed_type is {kind}, which holds weights and optimizer itself, where AccelerateCheckpoint "
            "does not see them. Use accelerator.save_state, or train with DDP or FSDP2."
        )
    if held._save_model_state_pre_hook or held._load_model_state_pre_hook:
        raise ValueError(
            "the accelerator has hooks of save_state or load_state (register_save_state_pre_hook, register_load_state_pre_hook), "
            "which write and read files in a folder that AccelerateCheckpoint does not make. Remove them, and give what they "
            "save to accelerator.register_for_checkpointing."
        )


class _AccumulationStep:
    """How many batches the accelerator has taken since it last began to count, for ``accelerator.accumulate``."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def state_dict(self) -> dict[str, int]:
        return {"step": self._held.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._held.step = state["step"]


class _Loaders:
    """The stateful data loaders of this process, each of which counts the batches of this process alone."""

    def __init__(self, loaders: Sequence[Any], processes: int) -> None:
        self._loaders, self._processes = loaders, processes

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": [loader.state_dict() for loader in self._loaders], "processes": self._processes}

    def reshard(self, states: Sequence[dict[str, Any]]) -> NoReturn:
        self._refuse(states[0]["processes"])

    def _refuse(self, processes: int) -> NoReturn:
        raise ValueError(
            f"the step has the positions of stateful data loaders of {processes} processes, each of its own batches, which "
            f"say nothing of the batches of {self._processes}. Resume on {processes} processes, or prepare the loaders with "
            "use_stateful_dataloader=False and skip what was seen by accelerator.skip_first_batches: numbers of batches "
            f"become {processes}/{self._processes} of what they were, unless with split_batches=True."
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["processes"] != self._processes:
            self._refuse(state["processes"])
        saved: list[Any] = state["loaders"]
        if len(saved) != len(self._loaders):
            raise ValueError(
                f"the step has the positions of {len(saved)} stateful data loaders, and the accelerator has "
                f"{len(self._loaders)}. Prepare the same ones."
            )
        for loader, position in zip(self._loaders, saved, strict=True):
            loader.load_state_dict(position)
