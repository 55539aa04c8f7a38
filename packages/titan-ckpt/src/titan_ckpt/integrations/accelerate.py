"""Accelerate with titan-ckpt: all that an ``Accelerator`` has prepared, saved and restored.

checkpoint = AccelerateCheckpoint(accelerator, "runs/a/ckpt", keep_last=2)
step, counts = checkpoint.restore(), checkpoint.counts
for epoch in range(counts.get("epoch", 0), epochs):
    loader.set_epoch(epoch)
    for batch in accelerator.skip_first_batches(loader, counts["batches"]):
        ...
        step, counts["batches"] = step + 1, counts["batches"] + 1
        checkpoint.save(step)
    counts.update(epoch=epoch + 1, batches=0)

A shuffled loader needs ``DataLoaderConfiguration(use_seedable_sampler=True)``, so that the order of a pass follows from a seed
and its number. Give loaders ``generator=torch.Generator()``: others draw from torch's generator where they begin to read, also
in the middle of a pass, and dropout is another after that.

A stateful loader (``use_stateful_dataloader=True``) goes on by itself: do not skip its batches, and leave out ``set_epoch``. It
does so on as many processes as saved. On one process torchdata's ``StatefulDataLoader(shuffle=True)`` needs no seedable sampler.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from accelerate import Accelerator
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

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
            ValueError: DeepSpeed or Megatron-LM holds the state, ``save_state`` has hooks, or the order of a shuffled loader
                cannot be found again.
        """
        state = self._state()
        state.extra.update(self._may_be_new())
        return self.checkpointer.save(step, state)

    def restore(self, **options: Any) -> int:
        """The newest step, restored; 0 if there is none yet. ``options`` are those of `titan_ckpt.Checkpointer.restore`.

        A gradient scaler or an accumulation that is new begins anew. With ``strict=False`` so do loaders that are new: they are
        matched in the order in which they were prepared.

        Raises:
            ValueError: As `save`; or the step has more registered objects, another number of loaders or stateful loaders, or
                those of another number of processes.
        """
        strict = bool(options.get("strict", True))
        state = self._state(strict)
        own = {name for name in state.extra if name.startswith(_OWN)}
        step = self.checkpointer.restore(state, **options)
        for name, part in self._may_be_new(strict).items():
            if saved := state.extra.get(name):
                part.load_state_dict(saved)
        self.counts.update({name: value for name, value in state.extra.items() if not name.startswith(_OWN)})
        more = [name for name in state.extra if name.startswith(f"{_OWN}registered") and name not in own]
        if more and strict:
            raise ValueError(
                f"step {step} has the state of {len(more)} more registered objects than this accelerator has. Register the same "
                "ones by accelerator.register_for_checkpointing before the restore, or pass strict=False to leave them out."
            )
        return step

    def _state(self, strict: bool = True) -> TrainState:
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
            data=_Loaders(loaders, held.num_processes, strict) if loaders else None,
            extra=extra,
        )

    def _may_be_new(self, strict: bool = True) -> dict[str, Any]:
        """What a run may begin to use when it resumes: saved, and restored only from a step that has it."""
        held: Any = self.accelerator
        parts: dict[str, Any] = {} if held.scaler is None else {f"{_OWN}scaler": held.scaler}
        if held._dataloaders:
            parts[f"{_OWN}passes"] = _Passes(held, strict)
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
    for loader in held._dataloaders:
        sampler = _sampler(loader)
        if isinstance(sampler, _DRAWN) and not hasattr(sampler, "set_epoch") and not _keeps_its_order(loader):
            raise ValueError(
                f"a data loader that the accelerator has prepared shuffles by a {type(sampler).__name__}, whose order is drawn "
                "anew where a pass begins: after a resume in the middle of one, other samples would come. For shuffle=True, make "
                "the Accelerator with dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True); else give the loader "
                "a sampler with set_epoch, whose order follows from a seed and the number of the pass."
            )


_SAME = "Prepare the same ones; or prepare new ones last, and pass strict=False to this restore."
_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def _sampler(loader: Any) -> Any:
    """What draws the order of a prepared loader; None if nothing does."""
    batches = _batch_sampler(loader)
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", None)  # of this process, of all


def _batch_sampler(loader: Any) -> Any:
    given = getattr(loader, "sampler", None)
    return given if isinstance(given, BatchSampler) else getattr(loader, "batch_sampler", None)


def _keeps_its_order(loader: Any) -> bool:
    """Whether the state of a stateful loader has what the order of its pass was drawn from, as torchdata's samplers give it."""
    samplers = (_batch_sampler(loader), _sampler(loader))
    stateful = getattr(loader, "use_stateful_dataloader", False)
    return stateful and all(hasattr(iter(sampler), "state_dict") for sampler in samplers)


class _Passes:
    """The number of each prepared loader's pass, and the seed of its order."""

    def __init__(self, held: Any, strict: bool) -> None:
        self._held, self._strict = held, strict

    def state_dict(self) -> dict[str, Any]:
        return {"passes": [self._of(loader) for loader in self._held._dataloaders]}

    def _of(self, loader: Any) -> dict[str, int | None]:
        begun = any(loader is other for other in self._held.gradient_state.dataloader_references)
        ends = begun and loader.end_of_dataloader  # with the batch in hand: the next one is of the next pass
        return {
            "number": getattr(loader, "iteration", 0) + ends,
            "seed": getattr(_sampler(loader), "initial_seed", None),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved: list[dict[str, int | None]] = state["passes"]
        loaders: list[Any] = self._held._dataloaders
        if len(saved) != len(loaders) and self._strict:
            raise ValueError(
                f"the step has the passes of {len(saved)} data loaders, and the accelerator has {len(loaders)}: which is which "
                f"does not follow. {_SAME}"
            )
        for loader, of in zip(loaders, saved, strict=False):
            if of["seed"] is not None and hasattr(_sampler(loader), "initial_seed"):
                _sampler(loader).initial_seed = of["seed"]
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(of["number"])


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

    def __init__(self, loaders: Sequence[Any], processes: int, strict: bool) -> None:
        self._loaders, self._processes, self._strict = loaders, processes, strict

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
        if len(saved) != len(self._loaders) and self._strict:
            raise ValueError(
                f"the step has the positions of {len(saved)} stateful data loaders, and the accelerator has "
                f"{len(self._loaders)}. {_SAME}"
            )
        for loader, position in zip(self._loaders, saved, strict=False):
            loader.load_state_dict(position)
